// The form: what a model takes, and what is sent.

import { send } from "/page/api.js"
import { make, t } from "/page/texts.js"

const form = document.getElementById("order")
const field = (name) => document.getElementById(name)
const SETTINGS = ["num_inference_steps", "num_frames", "num_videos", "guidance_scale", "negative_prompt"]
// The server's names of fields -> ours.
const SHOWN_AT = { width: "size", height: "size", image: "picture", input_reference: "picture", n: "num_videos" }

let models = []
let thumbnails = []

const chosenModel = () => models.find((model) => model.id === field("model").value)

export function showModels(given) {
  const before = field("model").value
  models = given
  field("model").replaceChildren(...models.map((model) => make("option", { value: model.id, textContent: model.id })))
  if (models.some((model) => model.id === before)) field("model").value = before
  showModel()
}

/** Fields, hints and limits of the chosen model. */
export function showModel() {
  const model = chosenModel()
  if (!model) return
  const { defaults, limits } = model
  const isVideo = model.kind === "video"
  const sizes = [`${defaults.width}x${defaults.height}`, ...model.sizes]
  field("sizes").replaceChildren(...[...new Set(sizes)].map((value) => make("option", { value })))
  field("size").placeholder = sizes[0]
  for (const name of SETTINGS) field(name).placeholder = String(defaults[name])
  field("num_inference_steps").max = limits.steps_max
  field("num_videos").max = limits.videos_max
  field("num_frames").max = limits.frames_max
  field("guidance_scale").max = limits.guidance_max
  field("num_frames-field").hidden = !isVideo
  field("num_videos-field").hidden = isVideo
  field("guidance_scale-field").hidden = !model.has_guidance
  field("negative_prompt-field").hidden = !model.has_negative_prompt
  field("frames-hint").textContent = t("framesHint", { step: limits.frames_multiple, fps: defaults.fps })
  field("upscale-field").hidden = !model.has_second_pass
  field("picture-field").hidden = !model.takes_images
  field("picture").multiple = model.max_images > 1
  field("picture").required = model.needs_image
  field("picture-hint").textContent = t(model.needs_image ? "pictureNeeded" : "pictureOptional")
}

function showThumbnails() {
  thumbnails.forEach((url) => URL.revokeObjectURL(url))
  thumbnails = [...field("picture").files].map((file) => URL.createObjectURL(file))
  field("picture-thumbnails").replaceChildren(...thumbnails.map((src) => make("img", { src, alt: "" })))
}

/** Puts a job's settings into the form. */
export function reuseSettings(job) {
  const { settings, second_pass: second } = job
  if (models.some((model) => model.id === job.model)) field("model").value = job.model
  showModel()
  field("prompt").value = job.prompt
  field("size").value = settings.width ? `${settings.width}x${settings.height}` : job.size
  field("seed").value = settings.seed ?? ""
  for (const name of SETTINGS) field(name).value = settings[name] ?? ""
  field("upscale").value = second?.scale ?? ""
  field("picture").value = ""
  showThumbnails()
  if (job.has_image) field("picture-hint").textContent = t("pictureAgain")
  showError("")
  field("prompt").focus()
  form.scrollIntoView({ block: "start" })
}

export function showError(message, name = "") {
  for (const element of form.querySelectorAll("[aria-invalid]")) element.removeAttribute("aria-invalid")
  const wrong = field(SHOWN_AT[name] ?? (name === "steps" ? "num_inference_steps" : name))
  field("order-error").textContent = message
  field("order-error").hidden = !message
  if (!message || !wrong || !form.contains(wrong)) return
  wrong.setAttribute("aria-invalid", "true")
  const details = wrong.closest("details")
  if (details) details.open = true
  wrong.focus()
}

function readFields(model) {
  const fields = { model: model.id, prompt: field("prompt").value }
  fields.seed = field("seed").value.trim() || String(crypto.getRandomValues(new Uint32Array(1))[0])
  if (field("size").value.trim()) fields.size = field("size").value.trim().replace("×", "x")
  for (const name of [...SETTINGS, "upscale"]) {
    const isShown = !field(name).closest(".field").hidden
    if (isShown && field(name).value.trim()) fields[name] = field(name).value.trim()
  }
  return fields
}

async function order(onOrdered, onRefused) {
  const model = chosenModel()
  if (!model || field("send").disabled) return
  const pictures = model.takes_images ? [...field("picture").files] : []
  if (!field("prompt").value.trim()) return showError(t("noPrompt"), "prompt")
  if (model.needs_image && !pictures.length) return showError(t("noPicture"), "image")
  showError("")
  field("send").disabled = true
  field("send").textContent = t("sending")
  try {
    onOrdered(await send(`/v1/${model.kind}s`, readFields(model), pictures))
  } catch (error) {
    onRefused(error)
  } finally {
    field("send").disabled = false
    field("send").textContent = t("send")
  }
}

export function startOrders(onOrdered, onRefused) {
  const submit = (event) => {
    event.preventDefault()
    order(onOrdered, onRefused)
  }
  form.addEventListener("submit", submit)
  form.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) submit(event)
  })
  field("model").addEventListener("change", showModel)
  field("picture").addEventListener("change", showThumbnails)
}

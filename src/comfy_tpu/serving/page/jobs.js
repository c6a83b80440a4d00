// The queue and the gallery: a card for each job, changed in place, so that what plays goes on and focus stays.

import { call } from "/page/api.js"
import { make, t } from "/page/texts.js"

const queue = document.getElementById("queue")
const gallery = document.getElementById("gallery")
const cards = new Map() // by the job's id

export const isActive = (job) => job.status === "queued" || job.status === "in_progress"
export const pathOf = (job) => `/v1/${job.object}s/${encodeURIComponent(job.id)}`

function summary(job) {
  const { settings } = job
  const values = { model: job.model, size: job.size.replace("x", "×"), steps: settings.num_inference_steps }
  return t("summary", { ...values, seed: settings.seed })
}

function stageText(job) {
  if (job.status === "completed") return ""
  if (job.error) {
    return job.error.code === "cancelled" ? t("stage.cancelled") : t("stage.failed", { message: job.error.message })
  }
  const stage = job.status === "in_progress" && job.stage === "queued" ? "next" : job.stage
  return t(`stage.${stage}`, { percent: job.progress })
}

function button(name, job, onClick) {
  const element = make("button", { type: "button", className: name, onclick: onClick, textContent: t(name) })
  element.setAttribute("aria-label", t(`${name}Label`, { prompt: job.prompt }))
  return element
}

function frame(job) {
  const element = make("div", { className: "frame" })
  element.style.aspectRatio = job.size.replace("x", " / ")
  return element
}

/** A card of the queue. */
function queueCard(job, actions) {
  const preview = make("img", { alt: t("preview", { prompt: job.prompt }), hidden: true })
  const box = frame(job)
  box.append(preview)
  const bar = make("progress", { max: 100 })
  bar.setAttribute("aria-label", t("progress", { prompt: job.prompt }))
  const stage = make("p", { className: "stage" })
  const text = make("div", { className: "text" },
    make("p", { className: "prompt", textContent: job.prompt, title: job.prompt }),
    make("p", { className: "summary", textContent: summary(job) }), bar, stage)
  const element = make("li", { className: "card" }, box, text, button("cancel", job, () => actions.cancel(job)))
  const update = (now) => {
    if (now.preview && now.preview !== preview.src) {
      preview.src = now.preview
      preview.hidden = false
    }
    bar.hidden = now.status !== "in_progress" || now.stage === "queued"
    if (now.stage === "denoising") bar.value = now.progress
    else if (now.stage === "decoding") bar.value = 100
    else bar.removeAttribute("value")
    stage.textContent = stageText(now)
  }
  return { element, update, close: () => {} }
}

// Files are fetched when they come into sight, and with the key, which an address cannot carry.
const sights = new WeakMap()
const observer = new IntersectionObserver((entries) => {
  for (const entry of entries.filter((each) => each.isIntersecting)) {
    observer.unobserve(entry.target)
    sights.get(entry.target)?.()
  }
}, { rootMargin: "200px" })

/** A card of the gallery. */
function galleryCard(job, actions) {
  const count = job.object === "image" ? job.settings.num_videos ?? 1 : 1
  const urls = []
  const isDone = job.status === "completed"
  const boxes = isDone ? Array.from({ length: count }, () => frame(job)) : []
  const problem = make("p", { className: "error", hidden: true })

  async function fetchFile(index) {
    urls[index] ??= URL.createObjectURL(await (await call(`${pathOf(job)}/content?index=${index}`)).blob())
    return urls[index]
  }
  async function show(index) {
    try {
      const src = await fetchFile(index)
      const media = job.object === "image"
        ? make("img", { src, alt: job.prompt })
        : make("video", { src, controls: true, loop: true, muted: true, playsInline: true })
      if (job.object === "video") media.setAttribute("aria-label", job.prompt)
      boxes[index].replaceChildren(media)
    } catch (error) {
      problem.textContent = t("noContent", { message: error.message })
      problem.hidden = false
    }
  }
  async function download() {
    try {
      for (let index = 0; index < count; index += 1) {
        const number = index ? `-${index + 1}` : ""
        const name = `${job.id}${number}.${job.object === "image" ? "png" : "mp4"}`
        make("a", { href: await fetchFile(index), download: name }).click()
      }
    } catch (error) {
      problem.textContent = t("noContent", { message: error.message })
      problem.hidden = false
    }
  }
  boxes.forEach((box, index) => {
    sights.set(box, () => show(index))
    observer.observe(box)
  })
  const buttons = make("div", { className: "buttons" }, button("reuse", job, () => actions.reuse(job)))
  if (isDone) buttons.append(button("download", job, download))
  buttons.append(button("delete", job, () => actions.remove(job)))
  const frames = make("div", { className: count > 1 ? "frames several" : "frames" }, ...boxes)
  const element = make("li", { className: "card" }, ...(isDone ? [frames] : []),
    make("p", { className: "prompt", textContent: job.prompt, title: job.prompt }),
    make("p", { className: "summary", textContent: summary(job) }),
    ...(isDone ? [] : [make("p", { className: "error", textContent: stageText(job) })]), problem, buttons)
  const close = () => {
    boxes.forEach((box) => observer.unobserve(box))
    urls.forEach((url) => URL.revokeObjectURL(url))
  }
  return { element, update: () => {}, close }
}

function removeCard(id) {
  const card = cards.get(id)
  card.close()
  card.element.remove()
  cards.delete(id)
}

/** Shows these jobs and no others. `jobs`: newest first. */
export function showJobs(jobs, actions) {
  const ids = new Set(jobs.map((job) => job.id))
  for (const id of [...cards.keys()]) if (!ids.has(id)) removeCard(id)
  const waiting = jobs.filter(isActive).reverse()
  let focused = null
  for (const job of jobs) {
    const known = cards.get(job.id)
    const hadFocus = known?.element.contains(document.activeElement)
    if (known && known.status !== (isActive(job) ? "active" : job.status)) removeCard(job.id)
    if (!cards.has(job.id)) {
      const card = isActive(job) ? queueCard(job, actions) : galleryCard(job, actions)
      cards.set(job.id, { ...card, status: isActive(job) ? "active" : job.status })
    }
    cards.get(job.id).update(job)
    if (hadFocus && cards.get(job.id) !== known) focused = cards.get(job.id).element
  }
  place(queue, waiting)
  place(gallery, jobs.filter((job) => !isActive(job)))
  document.getElementById("queue-empty").hidden = waiting.length > 0
  document.getElementById("queue-count").textContent = waiting.length ? `(${waiting.length})` : ""
  document.getElementById("gallery-empty").hidden = jobs.length > waiting.length
  focused?.querySelector("button").focus({ preventScroll: true })
}

/** The cards of the jobs in this order. One that is at its place is not moved: a video would stop. */
function place(list, jobs) {
  jobs.forEach((job, index) => {
    const { element } = cards.get(job.id)
    if (list.children[index] !== element) list.insertBefore(element, list.children[index] ?? null)
  })
}

/** Makes all cards anew, for another language. */
export function forgetCards() {
  for (const id of [...cards.keys()]) removeCard(id)
}

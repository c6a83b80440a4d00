// The four parts of the panel. Each is made once, and shows whatever status it is given (docs: GET /comfy_tpu/status).

import { Bar, element, Rows, setHidden, setText } from "./elements.js"
import { bytes, clock, percent, seconds } from "./format.js"
import { partText, subjectLines } from "./words.js"

const SEPARATOR = " · "

class Section {
  constructor(strings, titleKey, ...children) {
    this.strings = strings
    this.titleKey = titleKey
    this.heading = element("h3", "comfy-tpu-heading")
    this.root = element("section", "comfy-tpu-section", this.heading, ...children)
    this.root.dataset.section = titleKey
  }

  show() {
    setText(this.heading, this.strings.get(this.titleKey))
    this.root.setAttribute("aria-label", this.strings.get(this.titleKey))
  }
}

/** What is going on: "Denoising", "Wan 2.1 T2V 14B · 832×480, 81 frames", a bar, "3 of 50 · 1.37 s/step · 1:04 left". */
export class Activity extends Section {
  constructor(strings) {
    const stage = element("div", "comfy-tpu-strong")
    const what = element("div", "comfy-tpu-muted comfy-tpu-wrap")
    const bar = new Bar("progressbar", "progress")
    const figures = element("div", "comfy-tpu-muted comfy-tpu-figures")
    // Read out by screen readers; the figures change too often for that.
    stage.setAttribute("aria-live", "polite")
    super(strings, "now", stage, what, bar.root, figures)
    Object.assign(this, { stage, what, bar, figures })
  }

  show(status) {
    super.show()
    const { stage, done, total } = status.activity
    const running = stage !== "idle"
    // A total of one is no progress to speak of: compiling, encoding a prompt.
    const counted = total > 1
    const name = this.strings.get(`stage.${stage}`)
    const figures = running ? this.#figures(status) : ""
    setText(this.stage, name)
    const what = running ? subjectLines(this.strings, status.activity).join("\n") : ""
    setText(this.what, what)
    setHidden(this.what, !what)
    setText(this.figures, figures)
    setHidden(this.figures, !figures)
    setHidden(this.bar.root, !running)
    this.bar.root.classList.toggle("comfy-tpu-bar-endless", running && !counted)
    this.bar.set([counted ? percent(done, total) : 0], name, figures || name)
  }

  #figures(status) {
    const { stage, done, total } = status.activity
    const figures = []
    if (total > 1) {
      // Loading counts bytes, everything else counts steps.
      const unit = stage === "loading" ? bytes : String
      figures.push(this.strings.get("progress", { done: unit(done), total: unit(total) }))
    }
    if (stage === "denoising" && status.step_seconds != null)
      figures.push(this.strings.get("seconds_per_step", { seconds: seconds(status.step_seconds) }))
    if (status.eta_seconds != null) figures.push(this.strings.get("left", { time: clock(status.eta_seconds) }))
    return figures.join(SEPARATOR)
  }
}

/** One bar for each device that reports its memory: weights, and what else is used, of the limit. */
export class Memory extends Section {
  constructor(strings) {
    const devices = new Rows(element("div", "comfy-tpu-devices"), () => new Device(strings))
    const note = element("p", "comfy-tpu-muted comfy-tpu-note")
    super(strings, "memory", devices.root, note)
    Object.assign(this, { devices, note })
  }

  show(status) {
    super.show()
    const unknown = status.devices.every((device) => device.limit_bytes == null)
    this.devices.set(status.devices)
    setText(this.note, this.strings.get("used_unknown"))
    setHidden(this.note, !unknown || status.devices.length === 0)
  }
}

class Device {
  constructor(strings) {
    this.strings = strings
    this.name = element("span", "")
    this.sizes = element("div", "comfy-tpu-muted comfy-tpu-figures")
    this.bar = new Bar("meter", "weights", "other")
    this.root = element("div", "comfy-tpu-device", element("div", "comfy-tpu-line", this.name), this.bar.root, this.sizes)
  }

  set({ id, kind, weights_bytes: weights, used_bytes: used, limit_bytes: limit }) {
    const name = this.strings.get("device", { kind, id })
    const sizes = [this.strings.get("weights", { size: bytes(weights) })]
    if (used != null && limit != null)
      sizes.push(this.strings.get("used_of", { used: bytes(used), limit: bytes(limit) }))
    else if (used != null) sizes.push(this.strings.get("used", { used: bytes(used) }))
    setText(this.name, name)
    setText(this.sizes, sizes.join(SEPARATOR))
    const share = percent(weights, limit)
    const other = Math.min(percent(Math.max((used ?? 0) - weights, 0), limit), 100 - share)
    this.bar.set([share, other], name, sizes.join(SEPARATOR))
    // Without a limit, no length would be true.
    setHidden(this.bar.root, limit == null)
    this.root.classList.toggle("comfy-tpu-nearly-full", limit != null && share + other > 95)
  }
}

/** What stays on the device between runs. */
export class Resident extends Section {
  constructor(strings) {
    const rows = new Rows(element("ul", "comfy-tpu-list"), () => new ResidentRow(strings))
    const none = element("p", "comfy-tpu-muted comfy-tpu-note")
    super(strings, "resident", rows.root, none)
    Object.assign(this, { rows, none })
  }

  show(status) {
    super.show()
    const several = status.devices.length > 1
    this.rows.set(status.resident.map((entry) => ({ ...entry, several })))
    setText(this.none, this.strings.get("nothing_resident"))
    setHidden(this.none, status.resident.length > 0)
  }
}

class ResidentRow {
  constructor(strings) {
    this.strings = strings
    this.label = element("span", "comfy-tpu-grow")
    this.badge = element("span", "comfy-tpu-badge")
    this.size = element("div", "comfy-tpu-muted comfy-tpu-figures")
    this.sharding = new Rows(element("dl", "comfy-tpu-facts comfy-tpu-sharding"), () => new Fact())
    const line = element("div", "comfy-tpu-line", this.label, this.badge)
    this.root = element("li", "", line, this.size, this.sharding.root)
  }

  set({ label, model, part, bytes_per_device: size, in_use: inUse, several, sharding }) {
    setText(this.label, model || label)
    setText(this.badge, this.strings.get("in_use"))
    setHidden(this.badge, !inUse)
    const memory = several ? this.strings.get("per_device", { size: bytes(size) }) : bytes(size)
    setText(this.size, [model ? partText(this.strings, part) : "", memory].filter(Boolean).join(SEPARATOR))
    // One device holds everything: there is nothing to tell.
    this.sharding.set(several && sharding ? this.#shares(sharding) : [])
  }

  #shares({ mesh, sharded, gathered, replicated }) {
    const facts = []
    facts.push(["mesh", Object.entries(mesh).map(([axis, size]) => `${axis}=${size}`).join(" ")])
    if (sharded.tensors) facts.push(["sharded", this.#share(sharded)])
    if (gathered.tensors) facts.push(["gathered", this.#share(gathered)])
    if (replicated.tensors) facts.push(["replicated", this.#share(replicated)])
    return facts.map(([key, value]) => [this.strings.get(key), value])
  }

  #share({ tensors, nbytes }) {
    return this.strings.get("tensors", { count: tensors, size: bytes(nbytes) })
  }
}

/** How many programs were compiled, and which one is being compiled. */
export class Compiled extends Section {
  constructor(strings) {
    const rows = new Rows(element("dl", "comfy-tpu-facts"), () => new Fact())
    super(strings, "compiled", rows.root)
    this.rows = rows
  }

  show(status) {
    super.show()
    const { programs, from_cache: fromCache, seconds: spent, last, latest } = status.compiled
    const { stage } = status.activity
    const facts = []
    if (stage === "compiling") facts.push(["compiling_now", subjectLines(this.strings, status.activity).join("\n") || "…"])
    facts.push(["programs", String(programs)])
    facts.push(["from_cache", String(fromCache)])
    if (programs > 0) facts.push(["compile_seconds", this.strings.get("seconds", { seconds: seconds(spent) })])
    if (latest || last) facts.push(["last_compiled", latest ? subjectLines(this.strings, latest).join("\n") : last])
    this.rows.set(facts.map(([key, value]) => [this.strings.get(key), value]))
  }
}

class Fact {
  constructor() {
    this.name = element("dt", "comfy-tpu-muted")
    this.value = element("dd", "comfy-tpu-figures")
    this.root = element("div", "comfy-tpu-line", this.name, this.value)
  }

  set([name, value]) {
    setText(this.name, name)
    setText(this.value, value)
  }
}

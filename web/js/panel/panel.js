import { element, setHidden, setText } from "./elements.js"
import { Fallbacks } from "./fallbacks.js"
import { Activity, Compiled, Memory, Resident } from "./sections.js"

/** The panel's page: made anew whenever the sidebar opens, then shows one status after the other. */
export class Panel {
  #fallbacks
  #free
  #message
  #sections
  #strings
  #title
  #nextFrame = null

  constructor(strings, onFree) {
    this.#strings = strings
    this.#title = element("span", "comfy-tpu-title")
    this.#free = element("button", "comfy-tpu-button")
    this.#free.type = "button"
    this.#free.addEventListener("click", onFree)
    this.#message = element("p", "comfy-tpu-message")
    this.#message.setAttribute("role", "status")
    this.#sections = [new Activity(strings), new Memory(strings), new Resident(strings), new Compiled(strings)]
    this.#fallbacks = new Fallbacks(strings)
    this.root = element(
      "div",
      "comfy-tpu-panel",
      element("div", "comfy-tpu-header", this.#title, this.#free),
      element("div", "comfy-tpu-body", this.#message, this.#fallbacks.root, ...this.#sections.map((section) => section.root)),
    )
  }

  /** state: {status, problem} of StatusFeed. Drawn with the next frame, so that a burst of events costs one drawing. */
  show(state) {
    cancelAnimationFrame(this.#nextFrame)
    this.#nextFrame = requestAnimationFrame(() => this.#draw(state))
  }

  remove() {
    cancelAnimationFrame(this.#nextFrame)
    this.root.remove()
  }

  #draw({ status, problem }) {
    const started = Boolean(status?.started) && problem !== "other_version"
    const message = problem ?? (status && !started ? "not_started" : null)
    setText(this.#title, this.#strings.get("title"))
    setText(this.#free, this.#strings.get("free"))
    this.#free.title = this.#strings.get("free_hint")
    this.#free.disabled = !started || problem != null
    setText(this.#message, message ? this.#strings.get(message) : "")
    setHidden(this.#message, !message)
    this.#fallbacks.show(problem === "other_version" ? null : status)
    for (const section of this.#sections) {
      setHidden(section.root, !started)
      if (started) section.show(status)
    }
    this.root.classList.toggle("comfy-tpu-stale", problem === "offline")
  }
}

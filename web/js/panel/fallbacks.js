import { element, Rows, setHidden, setText } from "./elements.js"

/** What ran on the host instead of the TPU, and why. Shown only where something did, also before anything started. */
export class Fallbacks {
  #heading = element("h3", "comfy-tpu-heading")
  #rows
  #strings

  constructor(strings) {
    this.#strings = strings
    this.#rows = new Rows(element("ul", "comfy-tpu-list"), () => new Row(strings))
    this.root = element("section", "comfy-tpu-section", this.#heading, this.#rows.root)
    this.root.dataset.section = "on_host"
  }

  show(status) {
    const entries = status?.fallbacks ?? []
    setHidden(this.root, entries.length === 0)
    setText(this.#heading, this.#strings.get("on_host"))
    this.root.setAttribute("aria-label", this.#strings.get("on_host"))
    this.#rows.set(entries)
  }
}

class Row {
  constructor(strings) {
    this.strings = strings
    this.what = element("span", "comfy-tpu-strong")
    this.node = element("span", "comfy-tpu-muted")
    this.reason = element("div", "comfy-tpu-muted")
    this.root = element("li", "", element("div", "comfy-tpu-line", this.what, this.node), this.reason)
  }

  set({ what, node, reason }) {
    setText(this.what, what)
    setText(this.node, node == null ? "" : this.strings.get("on_host_node", { node }))
    setText(this.reason, reason)
  }
}

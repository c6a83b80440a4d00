// Building blocks of the panel. Data from the server only ever becomes text (textContent) or a number in a style.

/** element("div", "name", child, "text", …) */
export function element(tag, className, ...children) {
  const made = document.createElement(tag)
  if (className) made.className = className
  made.append(...children)
  return made
}

/** Only touches the page when something differs: events arrive ten times a second, and a text selection survives. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text
}

export function setHidden(node, hidden) {
  if (node.hidden !== hidden) node.hidden = hidden
}

/** A bar of one or more stacked parts. */
export class Bar {
  #parts

  constructor(role, ...partNames) {
    this.#parts = partNames.map((name) => element("div", `comfy-tpu-bar-part comfy-tpu-bar-${name}`))
    this.root = element("div", "comfy-tpu-bar", ...this.#parts)
    this.root.setAttribute("role", role)
    this.root.setAttribute("aria-valuemin", "0")
    this.root.setAttribute("aria-valuemax", "100")
  }

  /** percents: one for each part. label names the bar, text is its value in words. */
  set(percents, label, text) {
    this.#parts.forEach((part, index) => {
      part.style.width = `${percents[index]}%`
    })
    const total = percents.reduce((sum, share) => sum + share, 0)
    this.root.setAttribute("aria-valuenow", String(Math.round(total)))
    this.root.setAttribute("aria-label", label)
    this.root.setAttribute("aria-valuetext", text)
  }
}

/** As many rows as there are items; rows stay in place and are filled again. */
export class Rows {
  #make
  #rows = []

  constructor(root, make) {
    this.root = root
    this.#make = make
  }

  set(items) {
    while (this.#rows.length > items.length) this.#rows.pop().root.remove()
    while (this.#rows.length < items.length) {
      const row = this.#make()
      this.#rows.push(row)
      this.root.append(row.root)
    }
    items.forEach((item, index) => this.#rows[index].set(item))
  }
}

// A badge on each node that computed on the host instead of the TPU, and on the TPU Compile node it comes from.

import { api } from "../../../scripts/api.js"
import { app } from "../../../scripts/app.js"
import { sharedStrings } from "./panel/strings.js"

const EVENT = "comfy_tpu.status"
const ROUTE = "/comfy_tpu/status"
const OURS = /^TPU/
const MAX_CHARACTERS = 42 // no wider than most nodes; the panel has the whole reason
const COLORS = { fgColor: "#1f1300", bgColor: "#e0a030" }

/** The node with an execution id: "12", or "12:5" for node 5 inside of the subgraph node 12. */
function findNode(id) {
  let graph = app.rootGraph ?? app.graph
  let node = null
  for (const part of String(id ?? "").split(":")) {
    node = part && graph ? (graph.getNodeById(Number(part)) ?? graph.getNodeById(part)) : null
    graph = node?.subgraph ?? null
  }
  return node ?? null
}

class Badges {
  #strings
  #entries = []
  #isTold = false
  /** The number of the newest entry when a node last began to run: older ones are about an earlier run. */
  #seenAtStart = new Map()
  #badges = new Map()

  constructor(strings) {
    this.#strings = strings
  }

  take(status) {
    this.#isTold = true
    this.#entries = status?.fallbacks ?? []
    this.draw()
  }

  /** What happened before this page was opened. An event that comes first is newer than the answer. */
  async ask() {
    try {
      const response = await api.fetchApi(ROUTE, { cache: "no-store" })
      const status = response.ok ? await response.json() : null
      if (status && !this.#isTold) this.take(status)
    } catch {
      // No connection: the next event brings what this would have.
    }
  }

  start(id) {
    const newest = Math.max(0, ...this.#entries.map(({ number }) => number))
    this.#seenAtStart.set(String(id), newest)
    this.draw()
  }

  /** A server that was started anew counts from one again. */
  forget() {
    this.#seenAtStart.clear()
  }

  draw() {
    const wanted = new Map()
    for (const entry of this.#entries) {
      if (entry.number <= (this.#seenAtStart.get(String(entry.node)) ?? 0)) continue
      // Ids are the workflow's own: in another one, opened since, the same id is another node.
      const compile = findNode(entry.compile_node)
      if (!compile || !OURS.test(compile.comfyClass ?? compile.type ?? "")) continue
      for (const node of [compile, findNode(entry.node)]) if (node) wanted.set(node, entry)
    }
    for (const [node, badge] of this.#badges) if (!wanted.has(node)) this.#remove(node, badge)
    for (const [node, entry] of wanted) this.#put(node, this.#text(entry))
  }

  #text({ reason }) {
    const text = this.#strings.get("on_host_badge", { reason })
    return text.length > MAX_CHARACTERS ? `${text.slice(0, MAX_CHARACTERS - 1)}…` : text
  }

  #put(node, text) {
    const known = this.#badges.get(node)
    if (known && known.text === text && node.badges?.includes(known)) return
    if (known) this.#remove(node, known)
    const badge = new window.LGraphBadge({ text, ...COLORS })
    node.badges = [...(node.badges ?? []), badge]
    this.#badges.set(node, badge)
    node.setDirtyCanvas?.(true, true)
  }

  #remove(node, badge) {
    node.badges = (node.badges ?? []).filter((each) => each !== badge)
    this.#badges.delete(node)
    node.setDirtyCanvas?.(true, true)
  }
}

let badges = null

app.registerExtension({
  name: "comfy_tpu.fallbacks",

  async setup() {
    if (!window.LGraphBadge) return // an older frontend: the panel has the reasons as well
    const strings = sharedStrings(app, api)
    await strings.load()
    badges = new Badges(strings)
    strings.onChange(() => badges.draw())
    api.addEventListener(EVENT, ({ detail }) => badges.take(detail))
    api.addEventListener("reconnected", () => badges.forget())
    api.addEventListener("executing", ({ detail }) => detail != null && badges.start(detail))
    badges.ask() // not awaited: the page would wait for it
  },

  afterConfigureGraph() {
    badges?.draw()
  },
})

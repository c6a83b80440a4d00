// The text on a running node, in the user's language. The server sends it in English, and before it the same as keys and
// values; here the English event is followed at once by a translated one, so that the page never draws the first.

import { api } from "../../../scripts/api.js"
import { app } from "../../../scripts/app.js"
import { sharedStrings } from "./panel/strings.js"

const EVENT = "comfy_tpu.node_text"
const TEXT = "progress_text"

app.registerExtension({
  name: "comfy_tpu.node_text",

  async setup() {
    const strings = sharedStrings(app, api)
    /** By node: {text, lines}. */
    const newest = new Map()
    api.addEventListener(EVENT, ({ detail }) => newest.set(String(detail.node), detail))
    api.addEventListener(TEXT, ({ detail }) => {
      const known = newest.get(String(detail?.nodeId))
      // Another pack may show a text on the same node.
      if (!known || known.text !== detail.text) return
      const text = strings.translate(known.lines)
      if (text === detail.text) return
      // For a listener of the frontend's that comes after this one, and for one that was before.
      detail.text = text
      api.dispatchCustomEvent(TEXT, { nodeId: detail.nodeId, text })
    })
    await strings.load()
    strings.onChange(() => {
      for (const { node, text } of newest.values()) api.dispatchCustomEvent(TEXT, { nodeId: node, text })
    })
  },
})

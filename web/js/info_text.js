// TPU Info shows its text on the node, as ComfyUI's Preview as Text does. The frontend does so for its own nodes only.
// On the node the text is in the user's language; the output that other nodes read is in English.

import { api } from "../../../scripts/api.js"
import { app } from "../../../scripts/app.js"
import { sharedStrings } from "./panel/strings.js"

const NODE = "TPUInfo"
const WIDGET = "text"

function addTextWidget(node) {
  const { widget } = app.widgets.STRING(node, WIDGET, ["STRING", { multiline: true }], app)
  widget.options.read_only = true
  // Neither in a saved workflow nor in what is sent to the server.
  widget.serialize = false
  widget.options.serialize = false
  if (widget.element) widget.element.readOnly = true
}

app.registerExtension({
  name: "comfy_tpu.info_text",

  async setup() {
    await sharedStrings(app, api).load()
  },

  beforeRegisterNodeDef(nodeType, nodeData) {
    if (nodeData.name !== NODE) return
    const { onNodeCreated, onExecuted } = nodeType.prototype

    nodeType.prototype.onNodeCreated = function (...args) {
      onNodeCreated?.apply(this, args)
      addTextWidget(this)
    }

    nodeType.prototype.onExecuted = function (output, ...args) {
      onExecuted?.call(this, output, ...args)
      const widget = this.widgets?.find((candidate) => candidate.name === WIDGET)
      if (!widget || !output?.text) return
      const lines = output.comfy_tpu_lines
      widget.value = lines ? sharedStrings(app, api).translate(lines) : [output.text].flat().join("\n")
    }
  },
})

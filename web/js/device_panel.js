// A sidebar tab with the state of the device: memory, models on it, progress, compiled programs.
// ComfyUI imports every .js file under web/ by itself; this one registers the extension, the others only define things.

import { api } from "../../../scripts/api.js"
import { app } from "../../../scripts/app.js"
import { Panel } from "./panel/panel.js"
import { StatusFeed } from "./panel/status_feed.js"
import { sharedStrings } from "./panel/strings.js"

const TAB = "comfy-tpu"

function addStyles() {
  const link = document.createElement("link")
  link.rel = "stylesheet"
  link.href = new URL("../css/device_panel.css", import.meta.url).href
  document.head.append(link)
}

app.registerExtension({
  name: "comfy_tpu.device_panel",

  async setup() {
    addStyles()
    const feed = new StatusFeed(api)
    const strings = sharedStrings(app, api)
    await strings.load()
    let panel = null

    const close = () => {
      feed.unfollow()
      panel?.remove()
      panel = null
    }
    strings.onChange(() => {
      panel?.show(feed.state)
      const tab = app.extensionManager.getSidebarTabs().find((candidate) => candidate.id === TAB)
      if (tab) tab.tooltip = strings.get("tooltip")
    })

    app.extensionManager.registerSidebarTab({
      id: TAB,
      icon: "pi pi-microchip",
      title: "TPU",
      // Not as a key, which the sidebar could translate: in languages that we do not speak it would show the key.
      tooltip: strings.get("tooltip"),
      type: "custom",
      // Called again with the same container whenever the sidebar is drawn anew.
      render(container) {
        if (panel && container.contains(panel.root)) return
        close()
        panel = new Panel(strings, () => api.freeMemory({ freeExecutionCache: false }))
        container.classList.add("comfy-tpu-container")
        container.append(panel.root)
        feed.follow((state) => panel?.show(state))
        feed.refresh()
      },
      destroy: close,
    })
  },
})

// A sidebar tab with the state of the device: memory, models on it, progress, compiled programs.
// ComfyUI imports every .js file under web/ by itself; this one registers the extension, the others only define things.

import { api } from "../../../scripts/api.js"
import { app } from "../../../scripts/app.js"
import { Panel } from "./panel/panel.js"
import { StatusFeed } from "./panel/status_feed.js"
import { sharedStrings } from "./panel/strings.js"

const TAB = "comfy-tpu"
const FREE_TRIES = 3
const FREE_MS = 4000

function addStyles() {
  const link = document.createElement("link")
  link.rel = "stylesheet"
  link.href = new URL("../css/device_panel.css", import.meta.url).href
  document.head.append(link)
}

/** ComfyUI overlooks a request that comes while it collects garbage after a run: it is asked again while models stay. */
async function freeMemory(feed) {
  await api.freeMemory({ freeExecutionCache: false })
  for (let tries = 1; tries < FREE_TRIES; tries += 1) {
    await new Promise((done) => setTimeout(done, FREE_MS))
    const status = feed.state.status
    if (!status?.resident?.length || status.activity?.stage !== "idle") return
    const headers = { "Content-Type": "application/json" }
    await api.fetchApi("/free", { method: "POST", headers, body: JSON.stringify({ unload_models: true }) })
  }
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
        panel = new Panel(strings, () => freeMemory(feed))
        container.classList.add("comfy-tpu-container")
        container.append(panel.root)
        feed.follow((state) => panel?.show(state))
        feed.refresh()
      },
      destroy: close,
    })
  },
})

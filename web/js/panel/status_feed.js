const EVENT = "comfy_tpu.status"
const ROUTE = "/comfy_tpu/status"
const SCHEMA = 1

/** The newest status of the server: asked for when needed, and pushed by it while something runs. */
export class StatusFeed {
  #api
  #listener = () => {}
  #received = 0

  /** problem: null, or the key of a sentence. */
  state = { status: null, problem: null }

  constructor(api) {
    this.#api = api
    // From the start, not only while the panel is open: the frontend complains of events that nobody listens to.
    api.addEventListener(EVENT, ({ detail }) => this.#take(detail))
    api.addEventListener("reconnecting", () => this.#set({ ...this.state, problem: "offline" }))
    api.addEventListener("reconnected", () => this.refresh())
  }

  /** Calls back with the current state and with every later one. */
  follow(listener) {
    this.#listener = listener
    listener(this.state)
  }

  unfollow() {
    this.#listener = () => {}
  }

  async refresh() {
    const before = this.#received
    let status = null
    try {
      const response = await this.#api.fetchApi(ROUTE, { cache: "no-store" })
      if (response.ok) status = await response.json()
    } catch {
      // No connection, or a proxy's page instead of JSON: said in the panel below, and tried again on reconnecting.
    }
    // An event that came meanwhile is newer than this answer.
    if (this.#received !== before) return
    if (status) this.#take(status)
    else this.#set({ ...this.state, problem: "offline" })
  }

  #take(status) {
    this.#received += 1
    if (status?.schema === SCHEMA) this.#set({ status, problem: null })
    else this.#set({ ...this.state, problem: "other_version" })
  }

  #set(state) {
    this.state = state
    this.#listener(state)
  }
}

// The panel's words come from locales/<language>/main.json, which ComfyUI serves together with those of other packs.

const SETTING = "Comfy.Locale"

export class Strings {
  #api
  #app
  #languages = {}
  #locale = "en"

  constructor(app, api) {
    this.#app = app
    this.#api = api
  }

  async load() {
    this.#locale = String(this.#app.extensionManager.setting.get(SETTING) ?? "en")
    const response = await this.#api.fetchApi("/i18n")
    this.#languages = response.ok ? await response.json() : {}
  }

  /** Calls back when the user has chosen another language. */
  onChange(callback) {
    this.#app.ui.settings.addEventListener(`${SETTING}.change`, ({ detail }) => {
      this.#locale = String(detail.value)
      callback()
    })
  }

  /** In the user's language, else in English; the key itself where even that has no word for it. */
  get(key, values = {}) {
    const languages = [this.#locale, this.#locale.split("-")[0], "en"]
    const text = languages.map((name) => this.#lookUp(name, key)).find((found) => typeof found === "string") ?? key
    return text.replace(/\{(\w+)\}/g, (placeholder, name) => values[name] ?? placeholder)
  }

  #lookUp(language, key) {
    return key.split(".").reduce((level, part) => level?.[part], this.#languages[language]?.comfy_tpu)
  }
}

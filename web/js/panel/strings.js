// The panel's words come from locales/<language>/main.json, which ComfyUI serves together with those of other packs.

const SETTING = "Comfy.Locale"
const SEPARATOR = " · "

let shared = null

/** The words of this page. */
export function sharedStrings(app, api) {
  shared ??= new Strings(app, api)
  return shared
}

class Strings {
  #api
  #app
  #languages = {}
  #loading = null
  #locale = "en"

  constructor(app, api) {
    this.#app = app
    this.#api = api
  }

  /** May be called by every extension of ours: the words are fetched once. */
  load() {
    this.#loading ??= this.#fetch()
    return this.#loading
  }

  async #fetch() {
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

  /** A text of the server's: lines of words, each a string, or a key with values that may be such words. */
  translate(lines) {
    return lines.map((line) => line.map((word) => this.#translateWord(word)).join(SEPARATOR)).join("\n")
  }

  #translateWord(word) {
    if (typeof word === "string") return word
    const values = Object.entries(word.values).map(([name, value]) => [name, this.#translateWord(value)])
    return this.get(word.key, Object.fromEntries(values))
  }

  /** Whether there is a word for the key, at least in English. */
  has(key) {
    return typeof this.#lookUp("en", key) === "string"
  }

  #lookUp(language, key) {
    return key.split(".").reduce((level, part) => level?.[part], this.#languages[language]?.comfy_tpu)
  }
}

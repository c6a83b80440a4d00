// The page's words in the chosen language.

const LANGUAGE = "comfy-tpu-language"
const all = await (await fetch("/page/texts.json")).json()

function preferredLanguage() {
  const chosen = localStorage.getItem(LANGUAGE)
  if (chosen in all) return chosen
  return (navigator.languages ?? [navigator.language]).some((name, index) => index === 0 && /^zh\b/i.test(name))
    ? "zh" : "en"
}

let language = preferredLanguage()

/** The text of a key such as "stage.queued", with {names} replaced. */
export function t(key, values = {}) {
  const text = key.split(".").reduce((texts, name) => texts[name], all[language])
  return text.replace(/\{(\w+)\}/g, (_, name) => values[name] ?? "")
}

export function useLanguage(code) {
  language = code
  localStorage.setItem(LANGUAGE, code)
  translatePage()
}

export function translatePage() {
  document.documentElement.lang = language === "zh" ? "zh-CN" : "en"
  for (const element of document.querySelectorAll("[data-text]")) element.textContent = t(element.dataset.text)
}

/** An element with properties, and children that are elements or texts: a text never becomes markup. */
export function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties)
  element.append(...children)
  return element
}

// Calls of the server's API, each with the key of this tab.

const KEY = "comfy-tpu-key"

export class ApiError extends Error {
  constructor(message, status, param) {
    super(message)
    this.status = status
    this.param = param
  }
}

export const getKey = () => sessionStorage.getItem(KEY) ?? ""
export const setKey = (key) => (key ? sessionStorage.setItem(KEY, key) : sessionStorage.removeItem(KEY))

/** The answer to a request; an ApiError with the server's words where it refuses, one of status 0 where none comes. */
export async function call(path, options = {}) {
  const headers = { ...(options.headers ?? {}) }
  if (getKey()) headers.Authorization = `Bearer ${getKey()}`
  let answer
  try {
    answer = await fetch(path, { ...options, headers, cache: "no-store" })
  } catch (error) {
    if (error.name === "AbortError") throw error
    throw new ApiError(error.message, 0)
  }
  if (answer.ok) return answer
  const said = await answer.json().catch(() => ({}))
  const error = said.error ?? {}
  const message = error.message ?? said.detail?.[0]?.msg ?? `${answer.status} ${answer.statusText}`
  throw new ApiError(message, answer.status, error.param)
}

/** JSON, with seeds as text: half of them have more digits than a number of JavaScript. */
const parse = (text) =>
  JSON.parse(text, (name, value, context) => (name === "seed" ? (context?.source ?? value) : value))

export const getJson = async (path, options = {}) => parse(await (await call(path, options)).text())

export async function send(path, fields, pictures) {
  if (!pictures.length) {
    const headers = { "Content-Type": "application/json" }
    return getJson(path, { method: "POST", headers, body: JSON.stringify(fields) })
  }
  const form = new FormData()
  for (const [name, value] of Object.entries(fields)) form.append(name, value)
  for (const picture of pictures) form.append("image", picture)
  return getJson(path, { method: "POST", body: form })
}

/** Calls `onEvent` with the JSON of each server-sent event, until the stream ends. EventSource cannot send a key. */
export async function readEvents(path, onEvent, signal) {
  const answer = await call(path, { signal })
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader()
  let rest = ""
  for (;;) {
    const { value, done } = await reader.read()
    if (done) return
    const events = (rest + value).split("\n\n")
    rest = events.pop()
    for (const event of events) {
      const data = event.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6))
      if (data.length) onEvent(parse(data.join("\n")))
    }
  }
}

// Models, their parts and sizes as people name them, in the user's language.

const SIZE = /^(\d+)×(\d+)(?:×(\d+))?$/
const TOKENS = /^(\d+) tokens$/
const SEPARATOR = " · "

/** "832×480×81" -> "832×480, 81 frames". */
export function sizeText(strings, size) {
  const [, width, height, frames] = SIZE.exec(size ?? "") ?? []
  if (width && frames && frames !== "1") return strings.get("size.video", { width, height, frames })
  if (width) return strings.get("size.image", { width, height })
  const [, count] = TOKENS.exec(size ?? "") ?? []
  return count ? strings.get("size.tokens", { count }) : (size ?? "")
}

/** "text_encoder" -> "text encoder"; a part that only its family knows, by its name. */
export function partText(strings, part) {
  return strings.has(`part.${part}`) ? strings.get(`part.${part}`) : (part ?? "").replaceAll("_", " ")
}

/** ["Wan 2.1 T2V 14B · transformer", "832×480, 81 frames"], as far as the status says. */
export function subjectLines(strings, { model, part, size }) {
  const name = [model, partText(strings, part)].filter(Boolean).join(SEPARATOR)
  return [name, sizeText(strings, size)].filter(Boolean)
}

// Numbers as people read them: the same units as the text on the nodes ("3.2 of 28.6 GB", "1:04 left").

const UNITS = ["B", "kB", "MB", "GB", "TB"]

/** 14200000 -> "14.2 MB". Decimal units, as accelerators' data sheets and the progress text use them. */
export function bytes(count) {
  let unit = 0
  let size = Number(count) || 0
  // 999.95 would be written as "1000.0", so it goes up as well.
  while (size >= 999.95 && unit < UNITS.length - 1) {
    size /= 1000
    unit += 1
  }
  return `${unit === 0 ? size : size.toFixed(1)} ${UNITS[unit]}`
}

/** 64 -> "1:04", 3661 -> "1:01:01". */
export function clock(seconds) {
  const whole = Math.max(0, Math.round(Number(seconds) || 0))
  const [h, m, s] = [Math.floor(whole / 3600), Math.floor((whole % 3600) / 60), whole % 60]
  const pad = (number) => String(number).padStart(2, "0")
  return h ? `${h}:${pad(m)}:${pad(s)}` : `${m}:${pad(s)}`
}

/** Two digits below ten, one above: 1.37, 12.4. */
export function seconds(value) {
  const number = Number(value) || 0
  return number < 10 ? number.toFixed(2) : number.toFixed(1)
}

/** A share of a whole in percent, between 0 and 100; 0 where the whole is unknown. */
export function percent(part, whole) {
  if (!(whole > 0)) return 0
  return Math.min(100, Math.max(0, (100 * part) / whole))
}

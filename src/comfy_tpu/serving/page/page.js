// Starts the page: language, key, and what the server's jobs do.

import { call, getJson, getKey, readEvents, setKey } from "/page/api.js"
import { forgetCards, isActive, pathOf, showJobs } from "/page/jobs.js"
import { reuseSettings, showError, showModel, showModels, startOrders } from "/page/order.js"
import { t, translatePage, useLanguage } from "/page/texts.js"

const BUSY_MS = 2000
const IDLE_MS = 10000
const PAGE_SIZE = 100
// A browser opens six connections to a server; files and lists need some of them.
const MAX_STREAMS = 3

const field = (name) => document.getElementById(name)
const jobs = new Map()
const streams = new Map()
const older = { video: null, image: null } // the last id of each kind where there are more
const removed = new Set()
let timer = 0
let isLoaded = false
let wasDenied = false

/** Newest first; those of one second in the server's order. */
const sorted = () => [...jobs.values()].sort((a, b) => b.created_at - a.created_at || a.rank - b.rank)
const say = (text) => (field("status").textContent = text)

function notice(text) {
  if (field("notice").textContent !== text) field("notice").textContent = text
  field("notice").hidden = !text
}

function render() {
  showJobs(sorted(), actions)
  field("older").hidden = !(older.video || older.image)
}

/** Takes a job as the server describes it. `rank`: its place in a list. */
function take(job, rank) {
  const before = jobs.get(job.id)
  // An answer may come late, after one that knew more.
  if (removed.has(job.id) || (before && !isActive(before) && isActive(job))) return
  if (before && isActive(before) && job.status === "completed") say(t("ready", job))
  if (before && isActive(before) && job.status === "failed") say(t("notDone", job))
  jobs.set(job.id, { ...job, preview: job.preview ?? before?.preview, rank: rank ?? before?.rank ?? -1 })
}

async function refresh() {
  clearTimeout(timer)
  try {
    if (!isLoaded) {
      showModels((await getJson("/v1/models")).data)
      isLoaded = true
      field("main").hidden = false
    }
    for (const kind of ["video", "image"]) {
      const known = [...jobs.values()]
      const { data, has_more, last_id } = await getJson(`/v1/${kind}s?limit=${PAGE_SIZE}`)
      const oldest = data.at(-1)?.created_at ?? 0
      const listed = new Set(data.map((job) => job.id))
      // What another tab deleted. Older ones than the list's are not in it, and stay.
      for (const job of known) {
        const isInRange = !has_more || job.created_at > oldest
        if (job.object === kind && !listed.has(job.id) && isInRange) jobs.delete(job.id)
      }
      data.forEach((job, index) => take(job, index))
      if (has_more && older[kind] === null) older[kind] = last_id
    }
    notice("")
    field("forget-key").hidden = !getKey()
    render()
    follow()
  } catch (error) {
    failed(error)
    if (error.status !== 401) timer = setTimeout(refresh, BUSY_MS)
    return
  }
  timer = setTimeout(refresh, [...jobs.values()].some(isActive) && !document.hidden ? BUSY_MS : IDLE_MS)
}

function failed(error) {
  if (error.status === 401) askForKey()
  else notice(error.status === 0 ? t("offline") : t("serverError", error))
}

/** Listens to the events of some running jobs: progress, and previews. The others are looked at now and then. */
function follow() {
  const running = sorted().filter((job) => job.status === "in_progress").reverse()
  for (const job of running) {
    if (streams.size >= MAX_STREAMS) return
    if (streams.has(job.id)) continue
    const stopping = new AbortController()
    streams.set(job.id, stopping)
    const onEvent = (now) => {
      take(now)
      render()
    }
    readEvents(`${pathOf(job)}/events`, onEvent, stopping.signal)
      .catch(() => {}) // the next refresh says what is wrong
      .finally(() => {
        streams.delete(job.id)
        schedule(100)
      })
  }
}

function schedule(milliseconds) {
  if (field("key-dialog").open) return
  clearTimeout(timer)
  timer = setTimeout(refresh, milliseconds)
}

const actions = {
  async cancel(job) {
    await attempt(async () => take(await getJson(`${pathOf(job)}/cancel`, { method: "POST" })))
  },
  reuse(job) {
    reuseSettings(job)
    say(t("reused"))
  },
  async remove(job) {
    field("delete-prompt").textContent = job.prompt
    field("delete-dialog").returnValue = ""
    field("delete-dialog").showModal()
    await new Promise((done) => field("delete-dialog").addEventListener("close", done, { once: true }))
    if (field("delete-dialog").returnValue !== "yes") return
    await attempt(async () => {
      await call(pathOf(job), { method: "DELETE" })
      removed.add(job.id)
      jobs.delete(job.id)
      say(t("deleted"))
    })
    field("gallery-heading").focus({ preventScroll: true })
  },
}

async function attempt(action) {
  try {
    await action()
    notice("")
  } catch (error) {
    failed(error)
  }
  render()
}

async function showOlder() {
  await attempt(async () => {
    for (const kind of ["video", "image"].filter((each) => older[each])) {
      const { data, has_more, last_id } = await getJson(`/v1/${kind}s?limit=${PAGE_SIZE}&after=${older[kind]}`)
      data.forEach((job, index) => take(job, PAGE_SIZE + index))
      older[kind] = has_more ? last_id : ""
    }
  })
}

function askForKey() {
  streams.forEach((stopping) => stopping.abort())
  field("key-error").hidden = !wasDenied
  field("key-error").textContent = wasDenied ? t("keyWrong") : ""
  wasDenied = true
  setKey("")
  field("main").hidden = true
  isLoaded = false
  if (!field("key-dialog").open) field("key-dialog").showModal()
  field("key").value = ""
  field("key").focus()
}

function forgetKey() {
  wasDenied = false
  jobs.clear()
  render()
  field("forget-key").hidden = true
  askForKey()
}

function translate() {
  translatePage()
  field("language").textContent = t("language")
  field("language").lang = t("languageCode")
}

function start() {
  translate()
  field("language").addEventListener("click", () => {
    useLanguage(t("languageCode"))
    translate()
    showModel()
    forgetCards()
    render()
  })
  field("older").addEventListener("click", showOlder)
  field("forget-key").addEventListener("click", forgetKey)
  field("key-dialog").addEventListener("cancel", (event) => event.preventDefault())
  field("key-form").addEventListener("submit", (event) => {
    event.preventDefault()
    setKey(field("key").value.trim())
    field("key-dialog").close()
    refresh()
  })
  document.addEventListener("visibilitychange", () => document.hidden || schedule(0))
  const accepted = (job) => {
    take(job)
    say(t("accepted", job))
    render()
    schedule(200)
  }
  const refused = (error) => {
    if (error.status === 401) askForKey()
    else showError(error.status === 0 ? t("offline") : t("serverError", error), error.param)
  }
  startOrders(accepted, refused)
  refresh()
}

start()

// Shows the reports of FLUX Fast Path in a sidebar tab, and keeps the text on our nodes. Everything here is optional: nodes and pictures work without it.
import { api } from '../../scripts/api.js'
import { app } from '../../scripts/app.js'
import { createNodes } from './nodes.js'
import { createPanel } from './panel.js'
import { readAnswer, readReport, withReport } from './reports.js'
import { textsFor } from './texts.js'

const NAME = 'FluxFastPath'
const TAB = 'flux-fast-path'
const TOAST = 'FluxFastPath.Toast'
const SEEN = 'flux_fast_path.seen_disabled'
const MAX_SEEN = 100

let reports = []
// Reports that came while the list was on its way from the server: they are newer than what the list says.
let arrived = []
const badge = {
  label: 'FLUX Fast Path',
  url: 'https://github.com/flux-fast-path/flux-fast-path',
  icon: 'pi pi-bolt'
}

// Front ends differ by version: what one of them lacks is left out, and nothing else breaks.
function attempt(what, action) {
  try {
    return action()
  } catch (error) {
    console.debug(`FLUX Fast Path: ${what} is not available here`, error)
    return undefined
  }
}

const setting = (id) => attempt(id, () => app.extensionManager?.setting?.get?.(id) ?? app.ui?.settings?.getSettingValue?.(id))
const texts = () => textsFor(setting('Comfy.Locale') ?? navigator.language)
const panel = createPanel({ texts, refresh })
const nodes = createNodes({ app, api, attempt })

async function refresh() {
  arrived = []
  try {
    const response = await api.fetchApi('/flux_fast_path/reports')
    if (!response.ok) throw new Error(`status ${response.status}`)
    const answer = readAnswer(await response.json())
    reports = arrived.reduce(withReport, answer.reports)
    if (answer.version) badge.label = `FLUX Fast Path v${answer.version}`
    panel.update({ version: answer.version, reports, failed: false })
  } catch (error) {
    console.debug('FLUX Fast Path: no reports from the server', error)
    panel.update({ failed: true })
  }
}

function onReport(event) {
  attempt('the report', () => {
    const report = readReport(event?.detail)
    if (!report) return
    reports = withReport(reports, report)
    arrived = withReport(arrived, report)
    panel.update({ reports, failed: false })
    announce(report)
  })
}

// One toast for all parts that were switched off and that this browser has not heard of yet.
function announce(report) {
  const seen = readSeen()
  const fresh = report.disabled.filter((item) => !seen.includes(seenKey(report, item)))
  if (!fresh.length) return
  writeSeen([...seen, ...fresh.map((item) => seenKey(report, item))])
  if (setting(TOAST) === false) return
  const { say, op } = texts()
  const parts = [...new Set(fresh.map(op))]
  const reasons = [...new Set(fresh.map((item) => item.reason))]
  const summary = say(parts.length > 1 ? 'toastMany' : 'toastOne', { count: parts.length })
  const what = say('off', { op: parts.join(say('and')), reason: reasons.join('; ') })
  // Tier high without its kernel draws the lossless image: another one than it would have.
  const detail = say(report.high ? 'toastHigh' : 'toastUnaffected', { what })
  attempt('the toast', () => app.extensionManager.toast.add({ severity: 'warn', summary, detail, life: 10000 }))
}

const seenKey = (report, item) => `${report.gpu}/${item.op}/${item.signature}`

function readSeen() {
  const stored = attempt('local storage', () => JSON.parse(localStorage.getItem(SEEN) ?? '[]'))
  return Array.isArray(stored) ? stored.filter((key) => typeof key === 'string') : []
}

function writeSeen(keys) {
  attempt('local storage', () => localStorage.setItem(SEEN, JSON.stringify(keys.slice(-MAX_SEEN))))
}

function addStyle() {
  const link = document.createElement('link')
  link.rel = 'stylesheet'
  link.href = new URL('./flux_fast_path.css', import.meta.url).href
  document.head.append(link)
}

function addTab() {
  const tab = {
    id: TAB,
    icon: 'pi pi-bolt',
    title: 'FLUX Fast Path',
    label: 'FLUX',
    tooltip: 'FLUX Fast Path',
    type: 'custom',
    render: (container) => attempt('the panel', () => panel.render(container)),
    destroy: () => panel.destroy()
  }
  app.extensionManager.registerSidebarTab(tab)
}

attempt('the extension', () =>
  app.registerExtension({
    name: NAME,
    aboutPageBadges: [badge],
    settings: [
      {
        id: TOAST,
        category: ['FLUX Fast Path', 'Notifications', 'Toast'],
        name: 'Tell me when a part is switched off',
        tooltip: 'Shows one message the first time a part of FLUX Fast Path is switched off on this GPU. This setting never changes an image.',
        type: 'boolean',
        defaultValue: true
      }
    ],
    commands: [
      {
        id: 'FluxFastPath.TogglePanel',
        label: 'FLUX Fast Path: show or hide the panel',
        icon: 'pi pi-bolt',
        function: () => attempt('the panel', () => app.extensionManager.command.execute(`Workspace.ToggleSidebarTab.${TAB}`))
      }
    ],
    setup() {
      attempt('the style sheet', addStyle)
      attempt('the sidebar', addTab)
      attempt('report events', () => api.addEventListener('flux_fast_path.report', onReport))
      attempt('the text of nodes', () => nodes.listen())
      attempt('reconnecting', () => api.addEventListener('reconnected', refresh))
      refresh()
    }
  })
)

// The panel: plain DOM, text nodes only, drawn again whenever the reports change.

function element(tag, className, ...children) {
  const made = document.createElement(tag)
  if (className) made.className = className
  made.append(...children.filter((child) => child !== null && child !== undefined))
  return made
}

const milliseconds = (value) => `${value.toFixed(1)} ms`

// How the time of a call changed: "−15.0 ms", or "+0.3 ms" where a kernel lost, as on small images it can.
const slower = (saved) => saved <= -0.05
const change = (saved) => `${slower(saved) ? '+' : '−'}${milliseconds(Math.abs(saved))}`

export function createPanel({ texts, refresh }) {
  let container = null
  let state = { version: null, reports: [], failed: false }
  // Which runs are open, by key; the newest is open until someone closes it.
  const chosen = new Map()

  const keyOf = (report) => `${report.run} ${report.started}`

  function draw() {
    if (!container) return
    const { say } = texts()
    const button = element('button', 'ffp-refresh', say('refresh'))
    button.type = 'button'
    button.dataset.ffp = 'refresh'
    button.addEventListener('click', refresh)
    const title = element('span', 'ffp-title', say('title'))
    const version = state.version ? element('span', 'ffp-faint', ` ${state.version}`) : null
    const body = state.reports.length
      ? [state.failed ? notice('stale') : null, ...state.reports.map(run)]
      : [notice(state.failed ? 'unavailable' : 'empty')]
    const focused = container.contains(document.activeElement) ? document.activeElement.dataset.ffp : undefined
    container.replaceChildren(element('div', 'ffp', element('header', '', title, version, button), ...body))
    // Whoever works with the keyboard stays where they were.
    if (focused) [...container.querySelectorAll('[data-ffp]')].find((e) => e.dataset.ffp === focused)?.focus({ preventScroll: true })
  }

  function notice(key) {
    const made = element('p', 'ffp-empty', texts().say(key))
    made.setAttribute('role', 'status')
    return made
  }

  function run(report, index) {
    const { say } = texts()
    const head = summary(report)
    head.dataset.ffp = keyOf(report)
    const details = element('details', 'ffp-run', head, ...content(report))
    details.open = chosen.get(keyOf(report)) ?? index === 0
    // Not "toggle": that event also follows the line above.
    head.addEventListener('click', () => chosen.set(keyOf(report), !details.open))
    details.setAttribute('aria-label', `${say('run')} ${report.run}`)
    return details
  }

  function summary(report) {
    const { say } = texts()
    const ended = ['running', 'interrupted', 'error'].includes(report.outcome) ? report.outcome : null
    const name = ended ? say(ended) : say(report.fused ? 'fused' : 'aside')
    const pill = element('span', `ffp-pill ${ended === 'error' || !report.fused ? 'ffp-off' : 'ffp-on'}`, name)
    const heading = [`${say('run')} ${report.run}`, tier(report)]
    if (report.saved !== null && report.fused) heading.push(say('perCall', { time: change(report.saved) }))
    const last = heading.pop()
    // The pill never stands in a line of its own.
    return element('summary', '', heading.map((part) => `${part} · `).join(''), element('span', 'ffp-together', `${last} `, pill))
  }

  function content(report) {
    const { say } = texts()
    if (!report.fused) {
      const reason = element('p', 'ffp-reason', report.reason ?? say('aside'))
      return [reason, claim(report, 'unaffected', 'ffp-faint'), facts(report), ...rest(report)]
    }
    return [claim(report, report.high?.mounted ? 'close' : 'identical', ''), facts(report), bars(report), ...rest(report)]
  }

  // Of an image that there is none of yet, or that never came, nothing can be said.
  function claim(report, key, className) {
    return report.outcome === 'finished' && report.steps !== 0 ? element('p', className, texts().say(key)) : null
  }

  function rest(report) {
    const { say, op } = texts()
    // One part can fail for several signatures, which mean nothing to people who paint.
    const off = [...new Set(report.disabled.map((item) => say('off', { op: op(item), reason: item.reason })))]
    const versions = [report.core && `ComfyUI ${report.core}`, report.torch && `PyTorch ${report.torch}`, report.started.replace('T', ' ')]
    return [
      high(report),
      items(say('disabled'), off),
      items(say('notes'), report.notes),
      element('p', 'ffp-faint', versions.filter(Boolean).join(' · '))
    ]
  }

  function facts(report) {
    const { say } = texts()
    const rows = [
      [say('model'), [report.model, report.dtype].filter(Boolean).join(', ')],
      [say('gpu'), report.gpu],
      [say('tier'), tier(report)],
      [say('blocks'), blocks(report)],
      [say('steps'), report.steps],
      [say('perStep'), report.msPerStep === null ? null : milliseconds(report.msPerStep)],
      [say('saved'), saved(report)]
    ]
    const known = rows.filter(([, value]) => value !== null && value !== '')
    return element('dl', 'ffp-facts', ...known.flatMap(([name, value]) => [element('dt', '', name), element('dd', '', String(value))]))
  }

  const tier = (report) => texts().say(`tier_${report.tier}`)

  function blocks(report) {
    if (!report.blocks) return null
    return report.mounted === null ? report.blocks : `${report.mounted} / ${report.blocks}`
  }

  function saved(report) {
    if (report.saved !== null) return spared(report.saved)
    return report.fused ? texts().say('notTimed') : null
  }

  const spared = (value) => (slower(value) ? texts().say('slower', { time: change(value) }) : milliseconds(Math.abs(value)))

  function bars(report) {
    const { say, op } = texts()
    const shown = report.ops.filter((item) => item.sites > 0)
    if (!shown.length) return null
    const longest = Math.max(...shown.map((item) => item.saved ?? 0), 0.001)
    const rows = shown.map((item) => {
      const bar = element('span', `ffp-bar ffp-${item.state === 'disabled' ? 'off' : 'on'}`)
      bar.style.width = `${Math.max(0, ((item.saved ?? 0) / longest) * 100)}%`
      const name = say(`state_${item.state}`)
      const state = item.reason && ['refused', 'partly'].includes(item.state) ? say('because', { state: name, reason: item.reason }) : name
      const value = item.saved === null ? state : `${spared(item.saved)} · ${state}`
      return element(
        'div',
        'ffp-row',
        element('span', 'ffp-name', `${op(item)} · ${item.sites} ${say('kind')}`),
        element('span', 'ffp-track', bar),
        element('span', 'ffp-value', value)
      )
    })
    return element('div', 'ffp-bars', element('p', 'ffp-faint', say('savedBars')), ...rows)
  }

  function high(report) {
    if (!report.high) return null
    const { say } = texts()
    const where = report.high.mounted ? say('highMounted', report.high) : say('highAside')
    const error = report.high.error === null ? '' : ` · ${say('relativeError')} ${report.high.error.toPrecision(2)}`
    return items(`${say('high')}: ${where}${error}`, report.high.reasons, true)
  }

  function items(title, lines, evenEmpty = false) {
    if (!lines.length && !evenEmpty) return null
    return element('div', 'ffp-items', element('p', '', title), element('ul', '', ...lines.map((line) => element('li', '', line))))
  }

  return {
    // ComfyUI may call this again with the same element.
    render(where) {
      container = where
      draw()
    },
    destroy() {
      container = null
    },
    update(next) {
      state = { ...state, ...next }
      draw()
    }
  }
}

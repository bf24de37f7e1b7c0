// Reads what the server sends. Nothing unchecked leaves this file: a report becomes a fixed shape or null.

const MAX_TEXT = 400
const MAX_ITEMS = 64
const KEEP = 20

const isObject = (value) => typeof value === 'object' && value !== null && !Array.isArray(value)
const number = (value) => (typeof value === 'number' && Number.isFinite(value) ? value : null)
const text = (value) => (typeof value === 'string' && value !== '' ? value.slice(0, MAX_TEXT) : null)
const list = (value, read) =>
  Array.isArray(value)
    ? value
        .slice(0, MAX_ITEMS)
        .map(read)
        .filter((item) => item !== null)
    : []

function readOp(value) {
  if (!isObject(value) || !text(value.op)) return null
  return {
    op: text(value.op),
    label: text(value.label) ?? text(value.op),
    sites: number(value.sites) ?? 0,
    state: text(value.state) ?? 'idle',
    reason: text(value.reason),
    saved: number(value.saved_ms_per_step)
  }
}

const readDisabled = (ops) => (value) => {
  if (!isObject(value) || !text(value.op)) return null
  const label = ops.find((op) => op.op === value.op)?.label ?? text(value.op)
  return { op: text(value.op), label, signature: text(value.signature) ?? '', reason: text(value.reason) ?? '' }
}

function readHigh(value) {
  if (!isObject(value)) return null
  return {
    mounted: value.state === 'mounted',
    sites: number(value.sites) ?? 0,
    of: number(value.of) ?? 0,
    error: number(value.max_relative_error),
    reasons: list(value.reasons, text)
  }
}

function readBlocks(value) {
  if (!isObject(value)) return 0
  return Object.values(value).reduce((sum, count) => sum + (number(count) ?? 0), 0)
}

export function readReport(value) {
  if (!isObject(value) || number(value.run) === null) return null
  const ops = list(value.ops, readOp)
  return {
    run: number(value.run),
    started: text(value.started) ?? '',
    outcome: text(value.outcome) ?? '',
    fused: value.state === 'fused',
    reason: text(value.reason),
    model: text(value.model),
    gpu: text(value.gpu),
    dtype: text(value.dtype),
    core: text(value.core),
    torch: text(value.torch),
    tier: value.tier === 'high' ? 'high' : 'lossless',
    high: readHigh(value.high),
    blocks: readBlocks(value.blocks),
    mounted: number(value.blocks_mounted),
    steps: number(value.steps),
    seconds: number(value.seconds),
    msPerStep: number(value.ms_per_step),
    saved: number(value.saved_ms_per_step),
    ops,
    disabled: list(value.disabled, readDisabled(ops)),
    notes: list(value.notes, text)
  }
}

// What GET /flux_fast_path/reports answers: {"schema": 1, "version": "0.1.0", "reports": [newest, …]}.
export function readAnswer(value) {
  if (!isObject(value)) return { version: null, reports: [] }
  return { version: text(value.version), reports: list(value.reports, readReport) }
}

// `reports` with `report` first; an earlier state of the same run goes.
export function withReport(reports, report) {
  const others = reports.filter((other) => other.run !== report.run || other.started !== report.started)
  return [report, ...others].slice(0, KEEP)
}

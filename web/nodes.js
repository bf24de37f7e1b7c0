// Our own nodes in the graph: large enough to read, and their text where the front end would lose it: after a reload when the run comes
// from the cache, and in a subgraph that was closed while it ran. The text itself is ComfyUI's (progress_text), shown by ComfyUI.

// Least width and height of a new node: the title whole, the node's line not cut.
const LEAST = {
  FluxFastPath: [300, 160],
  FluxQualityTier: [300, 160],
  FluxFastPathReport: [340, 260],
  FluxQualityCompare: [300, 260],
  FluxLatentCompare: [300, 240]
}

const MARKUP = /[&<>_*`~\\[\]|]/g

// As nodes/status.py does it for both renderers.
export const asShown = (text) => text.replace(MARKUP, (sign) => `&#${sign.charCodeAt(0)};`).replaceAll('\n', '  \n')

const typeOf = (node) => node?.comfyClass ?? node?.type
const isOurs = (node) => Object.hasOwn(LEAST, typeOf(node) ?? '')

export function createNodes({ app, api, attempt }) {
  const texts = new WeakMap()
  let showing = false

  // "5:2" is node 2 in the subgraph of node 5.
  function nodeAt(id) {
    let graph = app.rootGraph ?? app.graph
    let node = null
    for (const part of String(id).split(':')) {
      node = graph?.getNodeById?.(part)
      graph = node?.subgraph
    }
    return node
  }

  function show(node) {
    const text = texts.get(node)
    // The front end looks a plain id up in the graph that is open.
    if (!text || !node.graph || node.graph !== app.canvas?.graph) return
    showing = true
    try {
      api.dispatchCustomEvent('progress_text', { nodeId: String(node.id), text })
    } finally {
      showing = false
    }
  }

  function onProgressText({ detail }) {
    if (showing || typeof detail?.text !== 'string') return
    const node = nodeAt(detail.nodeId)
    if (isOurs(node)) texts.set(node, detail.text)
  }

  function onExecuted(node, output) {
    const text = output?.text?.[0]
    if (typeof text !== 'string') return
    texts.set(node, asShown(text))
    show(node)
  }

  return {
    created(node) {
      if (!isOurs(node)) return
      const [width, height] = LEAST[typeOf(node)]
      // A workflow's own sizes come after this.
      if (node.size[0] < width || node.size[1] < height) node.setSize([Math.max(node.size[0], width), Math.max(node.size[1], height)])
      const before = node.onExecuted
      node.onExecuted = function (output, ...rest) {
        const result = before?.call(this, output, ...rest)
        attempt('the text of a node', () => onExecuted(this, output))
        return result
      }
    },
    listen() {
      api.addEventListener('progress_text', (event) => attempt('the text of a node', () => onProgressText(event)))
      // After the front end's own work on the graph that was opened.
      const opened = (event) => setTimeout(() => attempt('the text of a node', () => event.detail?.newGraph?.nodes?.forEach(show)))
      app.canvas.canvas.addEventListener('litegraph:set-graph', opened)
    }
  }
}

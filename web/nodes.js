// The text on our own nodes where the front end would lose it: after a reload when the run comes from the cache, and in a subgraph that was closed
// while it ran. The text itself is ComfyUI's (progress_text), shown by ComfyUI.

const OURS = ['FluxFastPath', 'FluxQualityTier', 'FluxFastPathReport', 'FluxQualityCompare', 'FluxLatentCompare']

const MARKUP = /[&<>_*`~\\[\]|]/g

// As nodes/status.py does it for both renderers.
export const asShown = (text) => text.replace(MARKUP, (sign) => `&#${sign.charCodeAt(0)};`).replaceAll('\n', '  \n')

const isOurs = (node) => OURS.includes(node?.comfyClass ?? node?.type)

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

  // Sent for a node whose output comes from the cache too.
  function onExecuted({ detail }) {
    const node = nodeAt(detail?.display_node ?? detail?.node)
    const text = detail?.output?.text?.[0]
    if (!isOurs(node) || typeof text !== 'string') return
    texts.set(node, asShown(text))
    show(node)
  }

  return {
    listen() {
      api.addEventListener('progress_text', (event) => attempt('the text of a node', () => onProgressText(event)))
      api.addEventListener('executed', (event) => attempt('the text of a node', () => onExecuted(event)))
      // After the front end's own work on the graph that was opened.
      const opened = (event) => setTimeout(() => attempt('the text of a node', () => event.detail?.newGraph?.nodes?.forEach(show)))
      app.canvas.canvas.addEventListener('litegraph:set-graph', opened)
    }
  }
}

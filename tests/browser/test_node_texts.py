"""What stands on our nodes: for the one who queued the prompt, whole, and still there after a reload or in a subgraph that was closed."""

import pytest
from flux_fast_path.nodes import status
from made_up_report import FUSED

pytestmark = pytest.mark.browser

RENDERERS = pytest.mark.parametrize("renderer", ["classic", "nodes2"])
OURS = ["FluxFastPath", "FluxQualityTier", "FluxFastPathReport", "FluxQualityCompare", "FluxLatentCompare"]
AWKWARD = "f.<locals>.MyLinear of __init__ stays <b>bold</b>; C:\\Users\\_x\\*y*, `z` & ~~that~~ [a](b)\na second line"
# What a person reads on a node, in whichever renderer.
READ = "() => [...document.querySelectorAll('.comfy-markdown-content, .dom-widget span, .lg-node')].map(e => e.innerText).join('\\n')"


def put(front, *types):
    script = "types => { app.graph.clear(); types.forEach((t, i) => { const n = LiteGraph.createNode(t); app.graph.add(n); n.pos = [i * 420, 100] }) }"
    front.page.evaluate(script, list(types))


def send_text(front, text):
    front.page.evaluate("t => app.graph.nodes.forEach(n => app.api.dispatchCustomEvent('progress_text', { nodeId: String(n.id), text: t }))", text)


def open_subgraph(front):
    front.page.evaluate("() => { const n = app.graph.nodes.find(n => n.subgraph); app.canvas.openSubgraph(n.subgraph, n) }")


def open_texts(front):
    """Texts of the nodes in the graph that is open, by type."""
    script = "() => app.canvas.graph.nodes.map(n => [n.type, n.widgets?.find(w => w.name === '$$node-text-preview')?.value ?? ''])"
    return {kind: text for kind, text in front.page.evaluate(script) if kind in OURS}


@RENDERERS
def test_what_looks_like_markup_is_read_as_it_was_written(front, renderer):
    put(front, "FluxFastPath")
    front.enlarge("FluxFastPath", 420, 260)
    send_text(front, status.as_shown(AWKWARD))
    front.fit()
    read = front.page.evaluate(READ)
    for line in AWKWARD.splitlines():
        assert line in read
    front.screenshot(f"markup-{renderer}")


def test_our_script_writes_a_text_as_the_server_does(front):
    texts = [AWKWARD, FUSED["text"], "", "plain"]
    script = "async texts => { const { asShown } = await import('/extensions/flux-fast-path/nodes.js'); return texts.map(asShown) }"
    assert front.page.evaluate(script, texts) == [status.as_shown(text) for text in texts]


@RENDERERS
def test_a_reloaded_page_shows_the_texts_of_a_run_from_the_cache(front, renderer):
    front.load_api("flux_quality_compare")
    front.page.evaluate("() => app.graph.nodes.forEach(n => n.widgets?.forEach(w => { if (w.name === 'control_after_generate') w.value = 'fixed' }))")
    front.run()
    text = front.wait_for_text("FluxFastPathReport", "· high")
    saved = front.page.evaluate("() => app.graph.serialize()")
    front.open()
    front.load(saved)
    assert front.node_text("FluxFastPathReport") == ""
    outcome = front.run()
    cached = next(data["nodes"] for kind, data in outcome["status"]["messages"] if kind == "execution_cached")
    assert len(cached) == len(saved["nodes"]), "the prompt was not the same as before"
    assert front.wait_for_text("FluxFastPathReport", "· high") == text
    front.wait_for_text("FluxQualityCompare", "Identical")
    front.wait_for_text("FluxLatentCompare", "Bit-identical")
    front.fit()
    front.screenshot(f"cached-{renderer}")


@RENDERERS
def test_a_subgraph_that_was_closed_during_the_run_shows_its_texts_when_it_is_opened(front, renderer):
    front.load_api("flux_fast_path")
    front.page.evaluate(
        """() => {
            app.canvas.deselectAll()
            const inside = ['FluxFastPath', 'FluxQualityTier', 'KSampler', 'FluxFastPathReport']
            app.graph.nodes.filter(n => inside.includes(n.type)).forEach(n => app.canvas.select(n))
        }"""
    )
    front.page.evaluate("() => app.extensionManager.command.execute('Comfy.Graph.ConvertToSubgraph')")
    front.page.wait_for_function("() => app.graph.nodes.some(n => n.subgraph)")
    front.run()
    open_subgraph(front)
    front.page.wait_for_timeout(1000)
    texts = open_texts(front)
    assert "The image is unaffected" in texts["FluxFastPathReport"] and "unaffected" in texts["FluxFastPath"] and texts["FluxQualityTier"]
    front.fit()
    front.screenshot(f"subgraph-opened-{renderer}")


def test_another_browser_with_nodes_of_the_same_ids_is_told_nothing(front, chromium):
    other = type(front)(chromium.new_context().new_page(), front.server).open()
    other.load_api("flux_fast_path")
    front.load_api("flux_fast_path")
    front.run()
    front.wait_for_text("FluxFastPathReport", "The image is unaffected")
    other.page.wait_for_timeout(500)
    assert other.node_text("FluxFastPath") == other.node_text("FluxFastPathReport") == ""
    assert "Run" in other.panel().inner_text(), "the panel lists what the server did, for everybody"
    other.page.context.close()

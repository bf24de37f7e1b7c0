"""What a person sees in the graph: nodes found by name, examples that load, workflows that run and tell of it, in both renderers."""

import copy
import itertools
import json

import comfy_server
import pytest

pytestmark = pytest.mark.browser

EXAMPLES = sorted(path.stem for path in (comfy_server.PACK / "example_workflows").glob("*.json"))
DISPLAY_NAMES = {
    "FluxFastPath": "FLUX Fast Path",
    "FluxQualityTier": "FLUX Quality Tier",
    "FluxFastPathReport": "FLUX Fast Path Report",
    "FluxQualityCompare": "FLUX Quality Compare",
    "FluxLatentCompare": "FLUX Latent Compare",
}
RENDERERS = pytest.mark.parametrize("renderer", ["classic", "nodes2"])


def example(name):
    return json.loads((comfy_server.PACK / "example_workflows" / f"{name}.json").read_text(encoding="utf-8"))


def reports_in(outcome):
    """What an API user finds in the history of a prompt."""
    return [json.loads(text) for output in outcome["outputs"].values() for text in output.get("flux_fast_path_report", [])]


def unknown_types(front):
    return front.page.evaluate("() => app.graph.nodes.filter(n => !LiteGraph.registered_node_types[n.type]).map(n => n.type)")


def overlapping(front):
    """Pairs of nodes that cover each other, as the frontend draws them: larger than the file says where their content asks for it."""
    boxes = front.page.evaluate("() => app.graph.nodes.map(n => { n.updateArea?.(); return [n.id, n.type, ...n.boundingRect] })")
    pairs = itertools.combinations(boxes, 2)
    return [(a[:2], b[:2]) for a, b in pairs if all(a[i] < b[i] + b[i + 2] and b[i] < a[i] + a[i + 2] for i in (2, 3))]


@pytest.mark.parametrize("query, expected", [("flux fast", "FluxFastPath"), ("flux quality", "FluxQualityTier"), ("fast path status", "FluxFastPathReport"), ("psnr", "FluxQualityCompare"), ("bit identical", "FluxLatentCompare")])
def test_nodes_are_found_by_their_aliases_and_added(front, query, expected):
    front.page.evaluate("() => app.graph.clear()")
    front.page.mouse.dblclick(800, 850)
    front.page.get_by_role("combobox").last.fill(query)
    result = front.page.get_by_test_id("result-item").filter(has_text=DISPLAY_NAMES[expected]).first
    result.wait_for()
    front.screenshot(f"search-{query.replace(' ', '-')}")
    result.click()
    # The new node follows the cursor until a click places it.
    front.page.mouse.click(700, 500)
    front.page.wait_for_function("type => app.graph.nodes.some(n => n.type === type)", arg=expected)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_opens_from_the_template_browser_with_no_missing_node(front, name):
    front.page.evaluate("() => app.extensionManager.command.execute('Comfy.BrowseTemplates')")
    front.page.get_by_role("dialog").get_by_placeholder("Search").first.fill(name)
    card = front.page.get_by_test_id(f"template-workflow-{name}")
    card.wait_for()
    front.screenshot(f"template-{name}")
    card.click()
    front.page.wait_for_function("count => app.graph.nodes.length === count", arg=len(example(name)["nodes"]))
    assert unknown_types(front) == []
    assert "missing node" not in front.page.locator("body").inner_text().lower()


@RENDERERS
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_keeps_every_widget_value_and_link(front, renderer, name):
    workflow = example(name)
    front.load(workflow, name)
    front.fit()
    front.screenshot(f"example-{name}-{renderer}")
    assert unknown_types(front) == []
    loaded = front.page.evaluate("() => app.graph.serialize()")
    assert len(loaded["links"]) == len(workflow["links"])
    values = {node["id"]: node.get("widgets_values") or [] for node in loaded["nodes"]}
    assert values == {node["id"]: node.get("widgets_values", []) for node in workflow["nodes"]}
    assert overlapping(front) == []


@RENDERERS
def test_the_tiny_workflow_runs_and_node_text_and_panel_tell_of_it(front, renderer):
    front.load_api("flux_fast_path")
    outcome = front.run()
    assert outcome["status"]["status_str"] == "success"
    (report,) = reports_in(outcome)
    assert report["state"] == "stepped_aside"
    text = front.wait_for_text("FluxFastPathReport", "The image is unaffected")
    assert report["reason"] in text
    assert front.wait_for_text("FluxFastPath", "unaffected")
    panel = front.panel()
    panel.get_by_text("stepped aside").first.wait_for()
    assert report["reason"] in panel.inner_text()
    front.page.locator(".flux-fast-path-tab-button").click()
    front.enlarge("FluxFastPath", 280, 160)
    front.enlarge("FluxFastPathReport", 280, 260)
    front.fit()
    front.screenshot(f"tiny-run-{renderer}")


@RENDERERS
def test_text_from_the_server_is_visible_on_the_node(front, renderer):
    front.load_api("flux_fast_path")
    front.run()
    front.wait_for_text("FluxFastPathReport", "The image is unaffected")
    front.fit()
    assert front.page.get_by_text("The image is unaffected").first.is_visible()


def test_the_compare_nodes_show_their_result(front):
    front.load_api("flux_quality_compare")
    outcome = front.run()
    assert outcome["status"]["status_str"] == "success"
    assert "Identical: every bit" in front.wait_for_text("FluxQualityCompare", "1 image, 64 × 64")
    assert "Bit-identical" in front.wait_for_text("FluxLatentCompare", "1 × 16 × 8 × 8")
    front.wait_for_text("FluxFastPathReport", "· high")
    assert [report["tier"] for report in reports_in(outcome)] == ["high"], "the report is that of the wired branch"
    front.enlarge("PreviewImage", 500, 300)
    front.fit()
    front.screenshot("quality-compare")


def test_the_kontext_workflow_runs(front):
    front.load_api("flux_kontext_fast_path")
    assert front.run()["status"]["status_str"] == "success"


@pytest.mark.parametrize("locale, words", [("en", "How to use it"), ("zh", "使用方法"), ("ru", "How to use it")])
def test_the_help_panel_shows_the_page_in_comfyuis_language(front, locale, words):
    front.server.set(Comfy__Locale=locale)
    front.open()
    front.page.evaluate("() => { app.graph.clear(); app.graph.add(LiteGraph.createNode('FluxFastPath')) }")
    front.fit()
    title = """() => {
        const [x, y] = app.canvas.ds.convertOffsetToCanvas([app.graph.nodes[0].pos[0] + 60, app.graph.nodes[0].pos[1] - 12])
        const canvas = app.canvas.canvas.getBoundingClientRect()
        return [x + canvas.left, y + canvas.top]
    }"""
    front.page.mouse.click(*front.page.evaluate(title))
    front.page.get_by_test_id("info-button").click()
    front.page.get_by_role("heading", name=words).wait_for()
    front.screenshot(f"help-{locale}")
    # Where a language has no page of its own, the frontend finds that out by asking.
    front.complaints[:] = [text for text in front.complaints if not text.endswith(f"/docs/FluxFastPath/{locale}.md)") or locale == "zh"]


@pytest.mark.parametrize("node_type", sorted(DISPLAY_NAMES))
def test_every_node_has_a_help_page(front, node_type):
    for page, name in ((f"{node_type}.md", DISPLAY_NAMES[node_type]), (f"{node_type}/zh.md", "FLUX ")):
        answer = front.page.evaluate("path => fetch(path).then(r => r.ok ? r.text() : '')", f"/extensions/flux-fast-path/docs/{page}")
        assert answer.startswith(f"# {name}")


def test_switching_the_renderer_live_keeps_the_text_and_complains_of_nothing(front):
    front.load_api("flux_fast_path")
    front.run()
    text = front.wait_for_text("FluxFastPathReport", "The image is unaffected")
    for on in (True, False):
        front.page.evaluate("on => app.extensionManager.setting.set('Comfy.VueNodes.Enabled', on)", on)
        front.page.wait_for_timeout(1000)
        assert front.node_text("FluxFastPathReport") == text
    front.page.evaluate("() => app.graph.nodes.forEach(node => node.collapse())")
    front.page.evaluate("() => { app.canvas.ds.scale = 0.1; app.canvas.setDirty(true, true) }")
    front.page.wait_for_timeout(500)


def test_an_old_workflow_with_fewer_widget_values_still_loads(front):
    workflow = copy.deepcopy(example("flux_quality_compare"))
    for node in workflow["nodes"]:
        if node["type"] in DISPLAY_NAMES:
            node.pop("widgets_values", None)
    front.load(workflow)
    values = front.page.evaluate(
        "types => Object.fromEntries(app.graph.nodes.filter(n => types.includes(n.type)).map(n => [n.type, n.widgets?.map(w => w.value) ?? []]))",
        list(DISPLAY_NAMES),
    )
    assert values["FluxFastPath"] == [True]
    assert values["FluxQualityTier"] == ["lossless"]
    assert values["FluxQualityCompare"] == [10]


@RENDERERS
def test_a_subgraph_that_holds_our_nodes_runs(front, renderer):
    front.load_api("flux_fast_path")
    front.page.evaluate(
        """() => {
            const inside = app.graph.nodes.filter(n => ['FluxFastPath', 'FluxQualityTier', 'KSampler', 'FluxFastPathReport'].includes(n.type))
            app.canvas.deselectAll()
            inside.forEach(n => app.canvas.select(n))
        }"""
    )
    front.page.evaluate("() => app.extensionManager.command.execute('Comfy.Graph.ConvertToSubgraph')")
    front.page.wait_for_function("() => !app.graph.nodes.some(n => n.type === 'FluxFastPath')")
    outcome = front.run()
    assert outcome["status"]["status_str"] == "success"
    assert reports_in(outcome)
    front.fit()
    front.screenshot(f"subgraph-{renderer}")

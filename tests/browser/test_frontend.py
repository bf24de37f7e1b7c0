"""What a person sees: nodes found by name, examples that load, status on nodes and in the panel, in both renderers."""

import copy
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
FUSED = {
    "schema": 1,
    "version": "0.1.0",
    "run": 1003,
    "started": "2026-09-01T12:00:00",
    "seconds": 2.7,
    "outcome": "finished",
    "state": "fused",
    "reason": None,
    "model": "Flux",
    "gpu": "Test GPU",
    "dtype": "bfloat16",
    "core": "0.29.0",
    "torch": "2.11.0",
    "tier": "lossless",
    "high": None,
    "blocks": {"double": 19, "single": 38},
    "steps": 20,
    "ops": [
        {"op": "residual_gate", "label": "residual gates", "sites": 114, "launches": 2280, "state": "proven", "saved_ms_per_step": 3.0},
        {"op": "qk_norm_rope", "label": "QK norm and RoPE", "sites": 76, "launches": 1520, "state": "proven", "saved_ms_per_step": 12.0},
        {"op": "gelu_concat", "label": "GELU and join", "sites": 38, "launches": 0, "state": "disabled", "saved_ms_per_step": None},
    ],
    "saved_ms_per_step": 15.0,
    "ms_per_step": 134.3,
    "disabled": [{"op": "gelu_concat", "signature": "bf16 4608x15360", "reason": "3 values differ"}],
    "notes": ["double_blocks.3.img_mlp: another pack replaced its forward"],
    "text": "57/57 blocks",
}


def example(name):
    return json.loads((comfy_server.PACK / "example_workflows" / f"{name}.json").read_text(encoding="utf-8"))


def wait_for_queue(front, running):
    for _ in range(1200):
        if bool(front.server.get("/queue")["queue_running"]) == running:
            return
        front.page.wait_for_timeout(100)
    raise AssertionError(f"the queue never was {'running' if running else 'empty'}")


def unknown_types(front):
    return front.page.evaluate("() => app.graph.nodes.filter(n => !LiteGraph.registered_node_types[n.type]).map(n => n.type)")


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


@RENDERERS
def test_the_tiny_workflow_runs_and_node_text_and_panel_tell_of_it(front, renderer):
    front.load_api("flux_fast_path")
    outcome = front.run()
    assert outcome["status"]["status_str"] == "success"
    report = next(output["flux_fast_path_report"] for output in outcome["outputs"].values() if "flux_fast_path_report" in output)[0]
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
    front.enlarge("PreviewImage", 500, 300)
    front.fit()
    front.screenshot("quality-compare")


def test_the_kontext_workflow_runs(front):
    front.load_api("flux_kontext_fast_path")
    assert front.run()["status"]["status_str"] == "success"


def test_the_panel_shows_what_was_fused_and_what_was_switched_off(front):
    front.send_report(FUSED)
    text = front.panel().inner_text()
    for words in ("Run 1003", "Test GPU", "Flux, bfloat16", "134.3 ms", "15.0 ms", "residual gates · 114 places", "12.0 ms · proven"):
        assert words in text
    assert "GELU and join (bf16 4608x15360): 3 values differ" in text
    assert "another pack replaced its forward" in text
    widths = front.page.locator(".ffp-bar").evaluate_all("bars => bars.map(bar => bar.style.width)")
    assert widths == ["25%", "100%", "0%"]
    front.screenshot("panel")


def test_a_report_that_is_updated_replaces_itself_and_keeps_what_is_open(front):
    front.send_report({**FUSED, "run": 2001, "outcome": "running"})
    front.send_report({**FUSED, "run": 2002})
    panel = front.panel()
    panel.locator("summary", has_text="Run 2001 ").click()
    front.send_report({**FUSED, "run": 2002, "saved_ms_per_step": 16.0})
    shown = panel.locator("summary", has_text="16 ms/step")
    assert shown.count() == 1
    assert panel.locator("details[open] summary", has_text="Run 2001 ").count() == 1


def test_the_first_time_a_part_is_switched_off_one_toast_says_so(front):
    toasts = front.page.locator(".p-toast-message", has_text="FLUX Fast Path switched one part off")
    front.send_report(FUSED)
    toasts.first.wait_for()
    assert "The image is unaffected" in toasts.first.inner_text()
    front.screenshot("toast")
    front.send_report({**FUSED, "run": 1004})
    front.page.wait_for_timeout(500)
    assert toasts.count() == 1


def test_the_toast_can_be_switched_off(front):
    front.page.evaluate("() => app.extensionManager.setting.set('FluxFastPath.Toast', false)")
    try:
        front.send_report(FUSED)
        front.page.wait_for_timeout(1000)
        assert front.page.locator(".p-toast-message", has_text="FLUX Fast Path").count() == 0
    finally:
        front.page.evaluate("() => app.extensionManager.setting.set('FluxFastPath.Toast', true)")


MALFORMED = [None, 7, "text", [], {}, {"run": "1"}, {"run": 5, "ops": "no", "disabled": [None, 3, {"op": 4}], "high": [], "blocks": 3, "notes": [{}]}]


@pytest.mark.parametrize("payload", MALFORMED, ids=json.dumps)
def test_a_malformed_report_harms_nothing(front, payload):
    front.send_report(payload)
    front.send_report(FUSED)
    assert "Run 1003" in front.panel().inner_text()


@pytest.mark.parametrize("answer", [{"status": 404}, {"status": 200, "body": "not json"}, {"status": 200, "body": '{"reports": 3}'}], ids=["404", "text", "shape"])
def test_a_server_without_our_route_harms_nothing(front, answer):
    front.page.route("**/flux_fast_path/reports", lambda route: route.fulfill(**answer))
    front.page.reload()
    front.page.wait_for_function("() => document.querySelector('.flux-fast-path-tab-button')")
    assert "FLUX Fast Path" in front.panel().inner_text()
    front.load_api("flux_fast_path")
    assert front.run()["status"]["status_str"] == "success"


def test_markup_in_a_report_is_shown_as_text(front):
    front.send_report({**FUSED, "notes": ["<img src=x onerror=alert(1)>"]})
    assert front.panel().get_by_text("<img src=x").count() == 1
    assert front.page.locator(".ffp img").count() == 0


def test_the_panel_and_the_nodes_speak_chinese_when_comfyui_does(front):
    front.server.set(Comfy__Locale="zh")
    front.open()
    front.send_report(FUSED)
    assert "每步节省" in front.panel().inner_text() and "残差门控" in front.panel().inner_text()
    title = front.page.evaluate("() => { const n = LiteGraph.createNode('FluxFastPath'); app.graph.add(n); return n.title }")
    assert title == "FLUX 快速通道"
    front.screenshot("panel-zh")


def test_the_settings_and_the_about_page_name_the_pack(front):
    front.page.evaluate("() => app.extensionManager.command.execute('Comfy.ShowSettingsDialog')")
    dialog = front.page.get_by_role("dialog")
    dialog.get_by_text("FLUX Fast Path").first.click()
    dialog.get_by_text("Tell me when a part is switched off").wait_for()
    front.screenshot("settings")
    dialog.get_by_text("About", exact=True).click()
    dialog.get_by_text("FLUX Fast Path v").wait_for()
    front.screenshot("about")


def test_the_panel_opens_by_command(front):
    front.page.evaluate("() => app.extensionManager.command.execute('FluxFastPath.TogglePanel')")
    front.page.locator(".ffp").wait_for()


@pytest.mark.parametrize("node_type", sorted(DISPLAY_NAMES))
def test_every_node_has_a_help_page(front, node_type):
    front.page.evaluate("type => { const n = LiteGraph.createNode(type); app.graph.add(n); app.canvas.select(n) }", node_type)
    front.page.evaluate("() => app.extensionManager.command.execute('Comfy.Canvas.FitView')")
    answer = front.page.evaluate("path => fetch(path).then(r => r.ok ? r.text() : '')", f"/extensions/flux-fast-path/docs/{node_type}.md")
    assert answer.startswith(f"# {DISPLAY_NAMES[node_type]}")


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


def test_reloading_the_page_while_it_samples_shows_the_run_afterwards(front):
    front.load_api("flux_fast_path")
    front.page.evaluate("() => { app.graph.nodes.find(n => n.type === 'KSampler').widgets.find(w => w.name === 'steps').value = 100 }")
    before = {report["run"] for report in front.server.get("/flux_fast_path/reports")["reports"]}
    front.page.evaluate("() => app.queuePrompt(0)")
    wait_for_queue(front, running=True)
    front.open()
    wait_for_queue(front, running=False)
    newest = front.server.get("/flux_fast_path/reports")["reports"][0]
    assert newest["run"] not in before and newest["outcome"] == "finished"
    front.panel().get_by_text(f"Run {newest['run']}").first.wait_for()


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
    assert any("flux_fast_path_report" in output for output in outcome["outputs"].values())
    front.fit()
    front.screenshot(f"subgraph-{renderer}")

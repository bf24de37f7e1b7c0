"""What a person sees around the graph: the panel, the toast, the settings, and what a report does to them."""

import json
import re

import pytest
from made_up_report import FUSED

pytestmark = pytest.mark.browser


def wait_for_queue(front, running):
    for _ in range(1200):
        if bool(front.server.get("/queue")["queue_running"]) == running:
            return
        front.page.wait_for_timeout(100)
    raise AssertionError(f"the queue never was {'running' if running else 'empty'}")


def test_the_panel_shows_what_was_fused_and_what_was_switched_off(front):
    front.load_api("flux_fast_path")  # ComfyUI's default workflow misses its model here, and shows it in red
    front.send_report(FUSED)
    text = front.panel().inner_text()
    for words in ("Run 1003 · lossless · −15.0 ms per call", "Bit-identical", "Test GPU", "Flux, bfloat16", "57 / 57", "134.3 ms", "residual gates · 114 places", "6.0 ms · proven"):
        assert words in text
    assert re.search(r"Model calls\s+20\s+Time per model call\s+134.3 ms\s+Saved per model call\s+15.0 ms\s", text)
    assert "GELU + concat: its bits differ from core's on this GPU" in text
    assert FUSED["disabled"][0]["signature"] not in text
    assert "hooks of another pack and stays as it is" in text
    widths = front.page.locator(".ffp-bar").evaluate_all("bars => bars.map(bar => bar.style.width)")
    assert [round(float(width.rstrip("%"))) for width in widths] == [50, 80, 100, 21, 0]
    front.screenshot("panel")


def test_a_report_that_is_updated_replaces_itself_and_keeps_what_is_open(front):
    front.send_report({**FUSED, "run": 2001, "outcome": "running"})
    front.send_report({**FUSED, "run": 2002})
    panel = front.panel()
    panel.locator("summary", has_text="Run 2001 ").click()
    front.send_report({**FUSED, "run": 2002, "saved_ms_per_step": 16.0})
    shown = panel.locator("summary", has_text="−16.0 ms per call")
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


def test_several_parts_that_are_switched_off_at_once_are_counted_in_one_toast(front):
    off = FUSED["disabled"][0]
    front.send_report({**FUSED, "disabled": [off, {**off, "signature": "another"}, {**off, "op": "residual_gate"}]})
    toasts = front.page.locator(".p-toast-message", has_text="FLUX Fast Path switched 2 parts off")
    toasts.first.wait_for()
    assert "GELU + concat, residual gates: its bits differ from core's on this GPU." in toasts.first.inner_text()
    assert front.page.locator(".p-toast-message").count() == 1


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


def test_a_keyboard_stays_where_it_was_when_a_report_comes(front):
    front.send_report({**FUSED, "run": 2001})
    panel = front.panel()
    panel.locator("summary", has_text="Run 2001 ").focus()
    focused = "() => document.activeElement.innerText"
    for run in (2002, 2003):
        front.send_report({**FUSED, "run": run})
        assert front.page.evaluate(focused).startswith("Run 2001 ")
    panel.get_by_role("button", name="Refresh").focus()
    front.send_report({**FUSED, "run": 2004})
    assert front.page.evaluate(focused) == "Refresh"


def test_refresh_says_that_the_server_did_not_answer_while_runs_are_listed(front):
    front.send_report(FUSED)
    panel = front.panel()
    front.page.route("**/flux_fast_path/reports", lambda route: route.abort())
    panel.get_by_role("button", name="Refresh").click()
    panel.get_by_text("The server did not answer: the runs below are those known before.").wait_for()
    assert "Run 1003" in panel.inner_text()
    front.page.unroute("**/flux_fast_path/reports")
    panel.get_by_role("button", name="Refresh").click()
    panel.get_by_text("The server did not answer").wait_for(state="detached")


def test_the_pill_never_stands_alone_and_bars_are_light_in_a_light_theme(front):
    front.page.evaluate("() => app.extensionManager.setting.set('Comfy.ColorPalette', 'light')")
    try:
        front.send_report(FUSED)
        panel = front.panel()
        head = panel.locator("summary", has_text="Run 1003")
        for width in (400, 300, 240):
            panel.evaluate("(panel, width) => { panel.style.width = `${width}px` }", width)
            time, pill = head.get_by_text("−15.0 ms per call").bounding_box(), head.locator(".ffp-pill").bounding_box()
            assert pill["x"] > time["x"] and time["y"] <= pill["y"] + pill["height"] / 2 <= time["y"] + time["height"]
        panel.evaluate("panel => { panel.style.width = '' }")
        assert panel.locator(".ffp-track").first.evaluate("track => getComputedStyle(track).backgroundColor") == "rgba(128, 128, 128, 0.25)"
        front.screenshot("panel-light")
    finally:
        front.page.evaluate("() => app.extensionManager.setting.set('Comfy.ColorPalette', 'dark')")


def details(front, report):
    """What the panel says of a run, opened."""
    front.send_report(report)
    run = front.panel().locator("details", has_text=f"Run {report['run']} ")
    if run.get_attribute("open") is None:
        run.locator("summary").click()
    return run.inner_text()


@pytest.mark.parametrize("outcome, words", [("running", "running"), ("interrupted", "interrupted"), ("error", "error")])
@pytest.mark.parametrize("state", ["fused", "stepped_aside"])
def test_of_a_run_that_did_not_finish_nothing_is_claimed_of_its_image(front, state, outcome, words):
    text = details(front, {**FUSED, "outcome": outcome, "state": state, "reason": "a made-up reason" if state == "stepped_aside" else None})
    assert words in text and "Bit-identical" not in text and "unaffected" not in text


def test_a_run_that_stepped_aside_says_why_and_that_the_image_is_unaffected(front):
    reason = "FLUX Fast Path is off and the tier is lossless"
    text = details(front, {**FUSED, "state": "stepped_aside", "reason": reason, "ops": [], "disabled": [], "notes": [], "blocks_mounted": 0, "saved_ms_per_step": None})
    assert "stepped aside" in text and reason in text and "The image is unaffected" in text and "Bit-identical" not in text


def test_tier_high_is_called_checked_and_a_loss_of_time_is_called_one(front):
    gemm = {"op": "linear_gelu", "label": "GELUs in the GEMM", "sites": 76, "launches": 1520, "state": "bounded", "saved_ms_per_step": -0.3}
    high = {"state": "mounted", "sites": 76, "of": 76, "reasons": [], "max_relative_error": 0.0029}
    text = details(front, {**FUSED, "tier": "high", "high": high, "ops": [gemm], "disabled": [], "saved_ms_per_step": -0.3, "blocks_mounted": 55})
    for words in ("Run 1003 · high · +0.3 ms per call", "not bit-identical", "55 / 57", "+0.3 ms (slower) · checked: differs by rounding only"):
        assert words in text
    assert "proven" not in text and "−" not in text and "-0.3" not in text
    front.screenshot("panel-high")


def test_a_part_that_was_left_to_comfyui_says_why(front):
    why = "the operands are not contiguous"
    ops = [{**FUSED["ops"][0], "state": "partly", "reason": why}, {**FUSED["ops"][1], "state": "refused", "saved_ms_per_step": None, "reason": why}]
    text = details(front, {**FUSED, "ops": ops, "disabled": []})
    assert f"3.0 ms · partly: {why}" in text and f"left to ComfyUI: {why}" in text


def test_the_panel_and_the_nodes_speak_chinese_when_comfyui_does(front):
    front.server.set(Comfy__Locale="zh")
    front.open()
    front.send_report(FUSED)
    text = front.panel().inner_text()
    for words in ("FLUX 快速通道", "运行 1003 · 无损", "模型调用次数", "每次模型调用节省", "残差门控"):
        assert words in text
    title = front.page.evaluate("() => { const n = LiteGraph.createNode('FluxFastPath'); app.graph.add(n); return n.title }")
    assert title == "FLUX 快速通道"
    front.screenshot("panel-zh")


def test_readers_of_traditional_chinese_see_one_language(front):
    """Neither the nodes nor the panel are translated into it."""
    front.server.set(Comfy__Locale="zh-TW")
    front.open()
    front.send_report(FUSED)
    text = front.panel().inner_text()
    title = front.page.evaluate("() => { const n = LiteGraph.createNode('FluxFastPath'); app.graph.add(n); return n.title }")
    assert title == "FLUX Fast Path" and text.startswith(title) and "Model calls" in text


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

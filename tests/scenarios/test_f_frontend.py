"""Kind F: what people see. Text on the node by core's own means, a panel that is optional, scripts that touch nothing of other packs."""
import json
import re
import sys
import types
from pathlib import Path

import comfy_harness as harness
import pytest
import torch
from flux_fast_path.nodes import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS, status

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((ROOT / "web").glob("**/*.js"))
WORKFLOWS = sorted((ROOT / "example_workflows").glob("*.json"))


class Server:
    """What core's PromptServer shows to packs."""

    def __init__(self, error=None):
        self.texts, self.events, self.error, self.client_id = [], [], error, "tab"
        self.routes = types.SimpleNamespace(get=lambda path: lambda handler: self.texts.append(("route", path)))

    def send_progress_text(self, text, node_id, sid):
        if self.error:
            raise self.error("no client is connected")
        self.texts.append((node_id, text))

    def send_sync(self, event, data, sid=None):
        if self.error:
            raise self.error("no client is connected")
        self.events.append((event, json.loads(json.dumps(data, allow_nan=False))))


@pytest.fixture
def server(monkeypatch):
    def put(instance):
        monkeypatch.setitem(sys.modules, "server", types.SimpleNamespace(PromptServer=types.SimpleNamespace(instance=instance)))
        return instance
    return put


@pytest.mark.comfyui
def test_the_node_says_what_happened_by_cores_own_text(scene, server):
    """B45: shown in both renderers, by no drawing of ours."""
    told = server(Server())
    model = scene.load()
    mine = scene.ours(model)
    before = len(told.texts)
    scene.sample(mine)
    assert before >= 1 and all(node == "7" for node, _ in told.texts)
    assert re.search(r"5/5 blocks|nothing fused|Stepped aside", told.texts[-1][1]), told.texts
    assert [e for e, _ in told.events] and all(e == status.EVENT for e, _ in told.events)
    assert told.events[-1][1]["outcome"] == "finished" and told.events[-1][1]["steps"] == 2


@pytest.mark.comfyui
@pytest.mark.parametrize("instance", [None, Server(RuntimeError), Server(TypeError), object()], ids=["none", "raises", "old", "a stranger"])
def test_sampling_never_depends_on_the_server(scene, server, instance):
    """B45, B47"""
    server(instance)
    scene.same(scene.load())


@pytest.mark.comfyui
def test_a_publisher_that_fails_fails_alone(scene, monkeypatch):
    """B45"""
    monkeypatch.setattr(status, "publish_report", lambda report: 1 / 0)
    monkeypatch.setattr(status, "_server_instance", lambda: 1 / 0)
    model = scene.load()
    wanted = scene.sample(model)
    monkeypatch.setattr(status, "show_text", lambda *args: None)
    harness.assert_bits_equal(scene.sample(scene.ours(model)), wanted)


@pytest.mark.comfyui
def test_an_interrupted_run_is_not_an_error_on_screen(scene, server):
    """B11, B45"""
    told = server(Server())
    mine = scene.ours(scene.load()).clone()

    def interrupt(args, extra):
        raise scene.core.comfy.model_management.InterruptProcessingException

    mine.set_model_patch_replace(interrupt, "dit", "double_block", 1)
    with pytest.raises(scene.core.comfy.model_management.InterruptProcessingException):
        scene.sample(mine)
    assert "nterrupted" in told.texts[-1][1] and "rror" not in told.texts[-1][1] and told.events[-1][1]["outcome"] == "interrupted"


def test_reports_are_json_that_a_browser_reads(server):
    """B47: NaN and foreign objects become something that a parser takes."""
    told = server(Server())
    status.publish_report({"run": 987654, "started": "x", "a": float("nan"), "b": {1, 2}, "c": (torch.float16, Path("p")), "d": {1: float("inf")}})
    assert told.events[0][1] == {"run": 987654, "started": "x", "a": None, "b": [1, 2], "c": ["torch.float16", "p"], "d": {"1": None}}
    with status._lock:
        status._reports.popleft()


def test_node_ids_and_words_are_what_workflows_store():
    """CONVENTIONS: ids are permanent; every input has a tooltip."""
    assert {"FluxFastPath", "FluxQualityTier", "FluxFastPathReport", "FluxQualityCompare"} <= set(NODE_CLASS_MAPPINGS) == set(NODE_DISPLAY_NAME_MAPPINGS)
    for name, node in NODE_CLASS_MAPPINGS.items():
        assert node.CATEGORY.startswith("model_patches/flux") and len(node.DESCRIPTION) > 40 and hasattr(node, node.FUNCTION), name
        assert len(node.RETURN_TYPES) == len(getattr(node, "OUTPUT_TOOLTIPS", node.RETURN_TYPES))
        for group in ("required", "optional"):
            for key, spec in node.INPUT_TYPES().get(group, {}).items():
                assert isinstance(spec, tuple) and spec[1].get("tooltip"), f"{name}.{key} has no tooltip"


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.name)
def test_our_scripts_touch_only_what_is_public(path):
    """B45, B47: public imports, no canvas drawing, no prototype of another's, no global handlers."""
    text = path.read_text(encoding="utf-8")
    imported = re.findall(r"""(?:from|import)\s*\(?\s*['"]([^'"]+)['"]""", text)
    assert all(i in ("../../scripts/app.js", "../../scripts/api.js") or i.startswith("./") for i in imported), imported
    for word in ("LiteGraph", "LGraphCanvas", ".prototype", "onDrawForeground", "onDrawBackground", "beforeRegisterNodeDef", "nodeCreated", "innerHTML", "document.write", "scripts/ui", "widgets_values", "eval("):
        assert word not in text, f"{path.name} uses {word}"


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda p: p.name)
def test_example_workflows_hold_only_nodes_that_exist(path):
    """B47"""
    graph = json.loads(path.read_text(encoding="utf-8"))
    used = {node["type"] for node in graph["nodes"]}
    assert used & set(NODE_CLASS_MAPPINGS) and {t for t in used if t.startswith("Flux") and t in NODE_DISPLAY_NAME_MAPPINGS or t.startswith("FluxFast")} <= set(NODE_CLASS_MAPPINGS)
    assert path.with_suffix(".jpg").is_file()

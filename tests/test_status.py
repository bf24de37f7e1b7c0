"""Status reaches people when there is a server, and never gets in the way when there is none."""

import html
import json
import math
import subprocess
import sys
import types

import pytest
from flux_fast_path.nodes import status

pytestmark = pytest.mark.usefixtures("no_reports")


class Server:
    """What status.py uses of ComfyUI's PromptServer."""

    def __init__(self):
        self.texts, self.events, self.handlers = [], [], {}
        self.routes, self.client_id, self.receivers = self, "tab", []

    def send_progress_text(self, text, node_id, sid=None):  # the signature of core 0.3.64, 0.20.1 and 0.29.0
        self.texts.append((text, node_id))
        self.receivers.append(sid)

    def send_sync(self, event, data):
        self.events.append((event, data))

    def get(self, path):
        return lambda handler: self.handlers.setdefault(path, []).append(handler)


class BrokenServer:
    def __getattr__(self, name):
        raise RuntimeError(f"no {name} today")


def running(monkeypatch, instance):
    module = types.ModuleType("server")
    module.PromptServer = type("PromptServer", (), {"instance": instance})
    monkeypatch.setitem(sys.modules, "server", module)
    return instance


def test_nothing_happens_and_nothing_fails_outside_comfyui(monkeypatch):
    monkeypatch.setitem(sys.modules, "server", None)
    status.show_text("3", "hello")
    status.publish_report({"run": 1})
    assert status.register_routes() is False
    assert status.latest_reports() == [{"run": 1}]


def test_a_broken_server_is_tolerated(monkeypatch):
    running(monkeypatch, BrokenServer())
    status.show_text("3", "hello")
    status.publish_report({"run": 1})
    assert status.register_routes() is False
    assert status.latest_reports() == [{"run": 1}]


def test_a_server_module_without_a_prompt_server_is_tolerated(monkeypatch):
    monkeypatch.setitem(sys.modules, "server", types.ModuleType("server"))
    status.show_text("3", "hello")
    assert status.register_routes() is False


def test_text_goes_to_the_node_that_asked(monkeypatch):
    server = running(monkeypatch, Server())
    status.show_text(12, "57/57 blocks")
    status.show_text(None, "nobody")
    assert server.texts == [("57/57 blocks", "12")]


def test_text_goes_to_the_browser_that_queued_the_prompt_and_to_no_other(monkeypatch):
    server = running(monkeypatch, Server())
    status.show_text(12, "57/57 blocks")
    assert server.receivers == ["tab"]
    server.client_id = None  # queued by a program: nobody is looking, and None would mean everybody
    status.show_text(12, "57/57 blocks")
    assert server.receivers == ["tab"]


def test_text_that_looks_like_markup_is_escaped_as_both_renderers_read_it(monkeypatch):
    server = running(monkeypatch, Server())
    status.show_text(12, "f.<locals>.__init__ at C:\\_x & `y` | [a](b) ~~z~~ · 114 gates: −27.1 ms/step (2×)")
    ((shown, _),) = server.texts
    assert html.unescape(shown) == "f.<locals>.__init__ at C:\\_x & `y` | [a](b) ~~z~~ · 114 gates: −27.1 ms/step (2×)"
    assert not set(shown) & set("<>_`\\[]~|") and "&lt" not in shown.replace("&#", "")
    status.show_text(12, "57/57 blocks · 114 gates · proven on NVIDIA H200 · −27.1 ms/step")
    assert server.texts[1][0] == "57/57 blocks · 114 gates · proven on NVIDIA H200 · −27.1 ms/step"


def test_lines_stay_lines_in_the_renderer_that_reads_markdown(monkeypatch):
    server = running(monkeypatch, Server())
    status.show_text(12, "first\nsecond")
    assert server.texts == [("first  \nsecond", "12")]


def test_a_report_is_kept_and_sent_to_every_browser(monkeypatch):
    server = running(monkeypatch, Server())
    status.publish_report({"run": 1, "tier": "lossless"})
    assert server.events == [("flux_fast_path.report", {"run": 1, "tier": "lossless"})]


def test_only_the_last_twenty_reports_are_kept_newest_first():
    for run in range(1, 26):
        status.publish_report({"run": run})
    assert [report["run"] for report in status.latest_reports()] == list(range(25, 5, -1))


def test_a_later_report_of_the_same_run_replaces_the_earlier_one():
    status.publish_report({"run": 1, "started": "t", "outcome": "running"})
    status.publish_report({"run": 1, "started": "t", "outcome": "finished"})
    assert [report["outcome"] for report in status.latest_reports()] == ["finished"]


def test_a_published_report_cannot_be_changed_afterwards():
    report = {"run": 1, "notes": []}
    status.publish_report(report)
    report["notes"].append("late")
    assert status.latest_reports()[0]["notes"] == []


def test_what_is_published_can_be_read_by_a_browser():
    status.publish_report({"run": 1, "a": math.nan, "b": [math.inf, 0.5], "c": (1, None, True), "d": {3: BrokenServer}})
    text = json.dumps(status.latest_reports()[0], allow_nan=False)
    assert json.loads(text)["b"] == [None, 0.5] and json.loads(text)["c"] == [1, None, True]


def test_the_route_is_added_once_and_answers_with_version_and_reports(monkeypatch):
    pytest.importorskip("aiohttp")
    server = running(monkeypatch, Server())
    assert status.register_routes() is True
    assert status.register_routes() is False
    (handler,) = server.handlers["/flux_fast_path/reports"]
    status.publish_report({"run": 4})
    with pytest.raises(StopIteration) as answered:
        handler(None).send(None)
    answer = json.loads(answered.value.value.body)
    assert answer["schema"] == 1 and answer["reports"] == [{"run": 4}]
    assert answer["version"].count(".") == 2


def executing(monkeypatch, prompt):
    module = types.ModuleType("comfy_execution.utils")
    module.get_executing_context = lambda: prompt and types.SimpleNamespace(prompt_id=prompt, node_id="3", list_index=0)
    monkeypatch.setitem(sys.modules, "comfy_execution.utils", module)


def test_a_report_names_the_prompt_that_it_belongs_to(monkeypatch):
    server = running(monkeypatch, Server())
    executing(monkeypatch, "first")
    status.publish_report({"run": 1})
    assert status.latest_reports() == [{"run": 1, "prompt": "first"}] == [server.events[0][1]]


def test_in_a_thread_without_a_context_the_servers_prompt_counts(monkeypatch):
    running(monkeypatch, Server()).last_prompt_id = "second"
    executing(monkeypatch, None)
    assert status.current_prompt() == "second"
    monkeypatch.setitem(sys.modules, "comfy_execution.utils", None)
    assert status.current_prompt() == "second"
    running(monkeypatch, BrokenServer())
    assert status.current_prompt() is None


def test_importing_status_does_not_import_comfyuis_server():
    code = "import sys; import flux_fast_path.nodes.status as s; s.register_routes(); sys.exit('server' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd="/").returncode == 0

"""The real server and the real frontend, in a real browser. COMFYUI_PATH names the checkout; screenshots go to FLUX_FAST_PATH_SCREENSHOTS."""

import itertools
import json
import os
import sys
from pathlib import Path

import pytest

sys.path.append(os.path.dirname(os.path.abspath(__file__)))

import comfy_server  # noqa: E402

HERE = Path(__file__).parent
SWITCHES = (
    "--no-sandbox --headless --disable-gpu --disable-background-networking --disable-component-update --disable-sync --no-first-run "
    "--disable-quic"
)
SEEDS = itertools.count(1000)
OURS = "/extensions/flux-fast-path/"
# The default workflow comes last.
READY = "() => document.querySelector('.flux-fast-path-tab-button') && window.app?.graph?.nodes?.length > 0"


def pytest_collection_modifyitems(items):
    reason = comfy_server.why_not()
    for item in items:
        if HERE in Path(str(item.path)).parents and item.get_closest_marker("browser") and reason:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    running = comfy_server.Server(os.environ["COMFYUI_PATH"], tmp_path_factory.mktemp("comfyui"))
    try:
        running.wait()
        yield running
    finally:
        running.stop()


@pytest.fixture(scope="session")
def chromium():
    playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=comfy_server.chromium(), args=SWITCHES.split())
        yield browser
        browser.close()


class Front:
    """One open page, and what a person does with it."""

    def __init__(self, page, server):
        self.page, self.server, self.complaints = page, server, []
        page.set_default_timeout(60_000)  # the first opening of the template browser takes long on a small machine
        page.on("console", self._heard)
        page.on("pageerror", lambda error: self._note(f"{error}\n{getattr(error, 'stack', '')}"))
        # Nothing here leaves this machine.
        page.route("**/*", lambda route: route.continue_() if self._local(route.request.url) else route.abort())

    def _local(self, url):
        return url.startswith((self.server.url, "data:", "blob:"))

    def _heard(self, message):
        if message.type in ("error", "warning"):
            self._note(f"{message.type}: {message.text} ({message.location.get('url')})")

    def _note(self, text):
        if OURS in text or "FLUX Fast Path:" in text:
            self.complaints.append(text)

    def open(self):
        self.page.goto(self.server.url, timeout=90_000)
        self.page.wait_for_function(READY, timeout=90_000)
        # The frontend goes on arranging itself after the default workflow is there; a person would not be faster.
        self.page.wait_for_load_state("networkidle")
        self.page.wait_for_timeout(2000)
        return self

    def load(self, workflow, name="test"):
        self.page.evaluate("([w, n]) => app.loadGraphData(w, true, true, n)", [workflow, name])
        self.page.wait_for_function("count => app.graph.nodes.length === count", arg=len(workflow["nodes"]))

    def load_api(self, name):
        workflow = json.loads((comfy_server.PACK / "tests" / "workflows" / f"{name}.json").read_text())
        # A seed that no test used before: what ComfyUI has cached it does not run, and does not tell of.
        seed = next(SEEDS)
        for node in workflow.values():
            if node["class_type"] == "KSampler":
                node["inputs"]["seed"] = seed
        self.page.evaluate("([w, n]) => app.loadApiJson(w, n)", [workflow, name])
        self.page.wait_for_function("count => app.graph.nodes.length === count", arg=len(workflow))

    def run(self):
        """Queues the graph and waits for its end; returns its entry in the history."""
        before = set(self.server.get("/history"))
        self.page.evaluate("() => app.queuePrompt(0)")
        for _ in range(240):
            history = self.server.get("/history")
            ended = [key for key in history if key not in before]
            if ended:
                return history[ended[0]]
            self.page.wait_for_timeout(250)
        raise AssertionError("the prompt did not end:\n" + self.server.tail())

    def node_text(self, node_type):
        """The text that the server showed on the first node of this type."""
        script = "type => app.graph.nodes.find(n => n.type === type)?.widgets?.find(w => w.name === '$$node-text-preview')?.value ?? ''"
        return self.page.evaluate(script, node_type)

    def wait_for_text(self, node_type, part):
        self.page.wait_for_function(
            """([type, part]) => app.graph.nodes.find(n => n.type === type)?.widgets
            ?.find(w => w.name === '$$node-text-preview')?.value?.includes(part)""",
            arg=[node_type, part],
            timeout=60_000,
        )
        return self.node_text(node_type)

    def panel(self):
        panel = self.page.locator(".ffp")
        if not panel.count():
            self.page.locator(".flux-fast-path-tab-button").click()
            panel.wait_for()
        return panel

    def send_report(self, report):
        self.page.evaluate("r => app.api.dispatchCustomEvent('flux_fast_path.report', r)", report)

    def enlarge(self, node_type, width, height):
        script = "([type, size]) => app.graph.nodes.find(n => n.type === type)?.setSize(size)"
        self.page.evaluate(script, [node_type, [width, height]])

    def fit(self):
        self.page.evaluate("() => app.extensionManager.command.execute('Comfy.Canvas.FitView')")
        self.page.wait_for_timeout(1500)

    def screenshot(self, name):
        folder = os.environ.get("FLUX_FAST_PATH_SCREENSHOTS")
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self.page.wait_for_timeout(800)
            self.page.screenshot(path=str(Path(folder) / f"{name}.png"))


@pytest.fixture
def front(server, chromium, request):
    """An open page with classic rendering; parametrize `renderer` indirectly for Nodes 2.0."""
    renderer = request.node.callspec.params.get("renderer", "classic") if hasattr(request.node, "callspec") else "classic"
    server.set(Comfy__VueNodes__Enabled=renderer == "nodes2", Comfy__Locale="en")
    context = chromium.new_context(viewport={"width": 1600, "height": 1000})
    page = Front(context.new_page(), server)
    yield page.open()
    context.close()
    assert page.complaints == []

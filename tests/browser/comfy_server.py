"""Starts the real ComfyUI on the CPU, in a directory of its own, with this pack in custom_nodes."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import comfy_harness

PACK = Path(__file__).parents[2]
FOLDER = "flux-fast-path"
NOT_SHIPPED = shutil.ignore_patterns(".*", "tests", "bench", "*.egg-info", "__pycache__", "build", "dist")
SETTINGS = {
    "Comfy.TutorialCompleted": True,
    "Comfy.Locale": "en",
    "Comfy.Minimap.Visible": False,
    "Comfy.Graph.CanvasInfo": False,
    # Text stays readable in screenshots of a whole graph.
    "LiteGraph.Canvas.MinFontSizeForLOD": 0,
}


class Server:
    def __init__(self, comfyui, base):
        self.base, self.log = base, base / "server.log"
        self._lay_out(Path(comfyui))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        options = ["--cpu", "--base-directory", str(base), "--disable-api-nodes", "--port", str(self.port)]
        options += ["--database-url", "sqlite:///:memory:"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen([sys.executable, "main.py", *options], cwd=comfyui, stdout=log, stderr=subprocess.STDOUT)

    def _lay_out(self, comfyui):
        nodes = self.base / "custom_nodes"
        shutil.copytree(PACK, nodes / FOLDER, ignore=NOT_SHIPPED)
        shutil.copy(PACK / "tests" / "workflows" / "tiny_nodes.py", nodes)
        models = self.base / "models" / "diffusion_models"
        models.mkdir(parents=True)
        comfy_harness.write_tiny_flux_checkpoint(models / "tiny_flux.safetensors")
        (self.base / "input").mkdir()
        shutil.copy(comfyui / "input" / "example.png", self.base / "input")
        user = self.base / "user" / "default"
        user.mkdir(parents=True)
        (user / "comfy.settings.json").write_text(json.dumps(SETTINGS))

    def wait(self, seconds=180):
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self.process.poll() is not None:
                break
            try:
                return self.get("/object_info")
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        raise RuntimeError("ComfyUI did not start:\n" + self.tail())

    def get(self, path):
        with urllib.request.urlopen(self.url + path, timeout=30) as answer:
            return json.load(answer)

    def set(self, **settings):
        """Settings by id, with __ for a dot; the browser reads them when it loads the page."""
        for name, value in settings.items():
            data = json.dumps(value).encode()
            request = urllib.request.Request(f"{self.url}/settings/{name.replace('__', '.')}", data, {"Content-Type": "application/json"})
            urllib.request.urlopen(request, timeout=30).close()

    def tail(self, lines=40):
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def stop(self):
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def why_not():
    """Why the browser tests cannot run here, or None."""
    if not os.environ.get("COMFYUI_PATH"):
        return "COMFYUI_PATH names no ComfyUI checkout"
    if not (Path(os.environ["COMFYUI_PATH"]) / "main.py").exists():
        return f"no main.py in COMFYUI_PATH={os.environ['COMFYUI_PATH']}"
    if not chromium():
        return "no Chromium found (CHROMIUM may name one)"
    return None


def chromium():
    named = os.environ.get("CHROMIUM")
    found = [named] if named else map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))
    return next((path for path in found if path), None)

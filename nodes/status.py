"""Tells people what happened: text on a node, an event for our panel, a route for everyone else.

The only file that talks to ComfyUI's server. Everything here works, and says nothing, when there is no server, no
browser, or a server that fails: a picture never depends on it.
"""

import logging
import math
import sys
import threading
import weakref
from collections import deque

log = logging.getLogger("flux_fast_path")

EVENT = "flux_fast_path.report"
ROUTE = "/flux_fast_path/reports"
KEEP = 20

_reports = deque(maxlen=KEEP)
# Written by the thread that samples, read by the thread that answers HTTP.
_lock = threading.Lock()
_routed = weakref.WeakSet()


def show_text(node_id, text):
    """Shows `text` on the node, in both renderers, with no JavaScript of ours."""
    instance = _server_instance()
    if instance is None or node_id is None:
        return
    try:
        # Nodes 2.0 reads Markdown, where a line ends with two spaces; the classic renderer does not show them.
        instance.send_progress_text(str(text).replace("\n", "  \n"), str(node_id))
    except Exception as error:
        log.debug("could not show text on node %s: %s", node_id, error)


def publish_report(report):
    """Keeps a copy of `report` and sends it to every open browser. A later report of the same run replaces the earlier."""
    copy = plain(report)
    with _lock:
        for index, kept in enumerate(_reports):
            if _same_run(kept, copy):
                del _reports[index]
                break
        _reports.appendleft(copy)
    instance = _server_instance()
    if instance is None:
        return
    try:
        instance.send_sync(EVENT, copy)
    except Exception as error:
        log.debug("could not send the report: %s", error)


def latest_reports():
    """The last reports, newest first."""
    with _lock:
        return list(_reports)


def register_routes():
    """Adds GET /flux_fast_path/reports, once per server. Does nothing unless ComfyUI's server is already running."""
    # Importing `server` here would start ComfyUI's own set-up in programs that only wanted our kernels.
    instance = getattr(getattr(sys.modules.get("server"), "PromptServer", None), "instance", None)
    if instance is None or instance in _routed:
        return False
    try:
        from aiohttp import web

        from .. import __version__

        async def reports(request):
            return web.json_response({"schema": 1, "version": __version__, "reports": latest_reports()})

        instance.routes.get(ROUTE)(reports)
    except Exception as error:
        log.debug("could not add %s: %s", ROUTE, error)
        return False
    _routed.add(instance)
    return True


def plain(value):
    """A copy of `value` that any JSON parser reads: a browser refuses NaN and Infinity, so they become None."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return [plain(item) for item in value]
    return str(value)


def _same_run(a, b):
    return a.get("run") is not None and a.get("run") == b.get("run") and a.get("started") == b.get("started")


def _server_instance():
    try:
        from server import PromptServer

        return getattr(PromptServer, "instance", None)
    except Exception:
        # Not inside ComfyUI, or another program's module of that name.
        return None

"""Tells people what happened: text on a node, an event for our panel, a route for everyone else.

The only file that talks to ComfyUI's server. Everything here works, and says nothing, when there is no server, no
browser, or a server that fails: a picture never depends on it.
"""

import logging
import math
import re
import sys
import threading
import weakref
from collections import deque

log = logging.getLogger("flux_fast_path")

EVENT = "flux_fast_path.report"
ROUTE = "/flux_fast_path/reports"
KEEP = 20
# What Markdown or HTML would take for markup, wherever it stands in a line.
_MARKUP = re.compile(r"[&<>_*`~\\\[\]|]")

_reports = deque(maxlen=KEEP)
# Written by the thread that samples, read by the thread that answers HTTP.
_lock = threading.Lock()
_routed = weakref.WeakSet()


def show_text(node_id, text):
    """Shows `text` on the node, in both renderers, with no JavaScript of ours; only where the prompt came from."""
    instance = _server_instance()
    if instance is None or node_id is None:
        return
    try:
        # Without a receiver it would go to every browser, onto whatever nodes have the same ids there.
        client = getattr(instance, "client_id", None)
        if client is not None:
            instance.send_progress_text(as_shown(text), str(node_id), sid=client)
    except Exception as error:
        log.debug("could not show text on node %s: %s", node_id, error)


def as_shown(text):
    """`text` for both renderers: Nodes 2.0 reads Markdown with HTML in it, the classic one HTML. web/nodes.js has the same."""
    # Entities are the one form that both show as the character; a backslash would stay visible in the classic one.
    escaped = _MARKUP.sub(lambda found: f"&#{ord(found.group())};", str(text))
    # A line of Markdown ends with two spaces.
    return escaped.replace("\n", "  \n")


def publish_report(report):
    """Keeps a copy of `report` and sends it to every open browser. A later report of the same run replaces the earlier.

    The copy's `prompt` is the prompt that is being executed, where that is known.
    """
    copy = plain(report)
    prompt = current_prompt()
    if prompt is not None:
        copy["prompt"] = prompt
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


def current_prompt():
    """The id of the prompt that is being executed, or None where nobody knows."""
    try:
        context = getattr(sys.modules.get("comfy_execution.utils"), "get_executing_context", lambda: None)()
        # A thread that somebody started to sample in has no context.
        prompt = getattr(context, "prompt_id", None) or getattr(_server_instance(), "last_prompt_id", None)
        return None if prompt is None else str(prompt)
    except Exception as error:
        log.debug("could not ask for the prompt: %s", error)
        return None


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

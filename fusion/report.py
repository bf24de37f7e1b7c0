"""What one sampling run did, kept as plain data: counts, proofs, and a reason for everything that stepped aside.

`Run.to_dict()` is the report that the nodes, the panel and the API show. Its keys are append-only:

    schema                1
    version               version of this pack
    token                 identifies the node application that made the run
    run                   number of the run in this process, from 1
    started               local time, ISO 8601 to the second
    seconds               wall time of the run
    outcome               "running" | "finished" | "interrupted" | "error"
    state                 "fused" | "stepped_aside"
    reason                why it stepped aside (whole run), else None
    model, gpu, dtype     "Flux", "NVIDIA H200" (or "2 × NVIDIA H200"), "bfloat16"; None until known
    core, torch           "0.29.0", "2.11.0+cu130"
    tier                  "lossless" | "high": what was asked for
    high                  None, or {"state": "mounted" | "stepped_aside", "sites": int, "of": int, "reasons": [str],
                          "max_relative_error": float | None}
    blocks                {"double": 19, "single": 38}
    blocks_mounted        blocks that were ours during the last call; others were left to another pack (see notes)
    steps                 calls of the model
    ops                   one per kind of fused operation, in a fixed order:
                          {"op": "residual_gate", "label": "residual gates", "sites": 114, "launches": 2280,
                           "state": "proven" | "disabled" | "partly" | "idle", "saved_ms_per_step": 3.1}
    saved_ms_per_step     sum over ops; from event times of eager and fused on this GPU at first sight, None if not timed
    ms_per_step           wall time of the run / steps, None before the first step has ended
    disabled              [{"op", "signature", "reason"}]: operations that failed their proof on this GPU
    notes                 [str]: leaves left to core (hooks, another pack), each with its reason
    text                  one line for the node: "57/57 blocks · 114 gates · proven on NVIDIA H200 · −27 ms/step"
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter

import torch

from ..kernels.proof import REGISTRY

SCHEMA = 1
OPS = ("residual_gate", "layer_norm_modulate", "qk_norm_rope", "head_concat", "gelu_concat", "linear_gelu", "column_copy")
_numbers = itertools.count(1)


def _launches() -> dict:
    """Launch counts now, by plan. Plans are kept as keys: a run is the difference of two such counts."""
    return {plan: plan.launches for op in REGISTRY.values() for plan in list(op.plans.values())}


class Run:
    """Counts of one sampling run. Cheap to keep: everything is derived from the kernels' own counters when somebody asks."""

    def __init__(self, token: str, tier: str = "lossless"):
        self.number, self.token, self.tier = next(_numbers), token, tier
        self.started, self._clock, self.seconds = time.strftime("%Y-%m-%dT%H:%M:%S"), time.perf_counter(), 0.0
        self.outcome, self.reason, self.phase = "running", None, None
        self.model = self.dtype = None
        self.devices: list = []  # core can split one run over several GPUs, a thread each
        self._lock = threading.Lock()
        self.blocks, self.sites, self.steps, self.fused_steps, self.mounted = {"double": 0, "single": 0}, {}, 0, 0, 0
        self.notes: dict[str, None] = {}  # a set that keeps its order
        self.high = None
        self._before = _launches()

    def count_call(self) -> None:
        """One call of the model begins."""
        with self._lock:
            self.steps += 1

    def describe(self, model: str, device: torch.device, dtype: str) -> None:
        """What that call runs on."""
        with self._lock:
            self.model, self.dtype = model, dtype
            if device not in self.devices:
                self.devices.append(device)

    def count_fused(self) -> bool:
        """One call of the model has ended with the leaves mounted; whether it was the run's first."""
        with self._lock:
            self.fused_steps += 1
            return self.fused_steps == 1

    def step_aside(self, reason: str) -> None:
        self.reason = reason

    def note(self, text: str) -> None:
        self.notes[text] = None

    def end(self, outcome: str) -> None:
        self.outcome, self.seconds = outcome, time.perf_counter() - self._clock

    def launches(self) -> list[tuple]:
        """(plan, launches in this run) for every plan of this run's devices that was used."""
        now = _launches()
        return [(plan, count - self._before.get(plan, 0)) for plan, count in now.items() if plan.device in self.devices or not self.devices]

    def _ops(self) -> list[dict]:
        found, used = [], self.launches()
        for name in OPS:
            if not self.sites.get(name):
                continue
            mine = [(plan, count) for plan, count in used if plan.op == name]
            launches = sum(count for _, count in mine)
            timed = [(plan, count) for plan, count in mine if count and plan.eager_us is not None]
            saved = sum((plan.eager_us - plan.fused_us) * count for plan, count in timed) / 1e3 / max(self.fused_steps, 1) if timed else None
            disabled = any(v.state == "disabled" and v.op == name for v in self._verdicts())
            state = ("partly" if disabled else "proven") if launches else "disabled" if disabled else "idle"
            found.append({
                "op": name, "label": REGISTRY[name].label, "sites": self.sites[name], "launches": launches, "state": state,
                "saved_ms_per_step": None if saved is None else round(saved, 3),
            })
        return found

    def _verdicts(self):
        return [v for op in REGISTRY.values() for (device, *_), v in list(op.verdicts.items()) if device in self.devices]

    def to_dict(self) -> dict:
        """The report. See the module for its keys."""
        from .. import __version__

        ops = self._ops()
        errors = [error for device, error in REGISTRY["linear_gelu"].errors.items() if device in self.devices]
        high = self.high and {**self.high, "max_relative_error": max(errors, default=None)}
        saved = [op["saved_ms_per_step"] for op in ops if op["saved_ms_per_step"] is not None]
        seconds = self.seconds or time.perf_counter() - self._clock
        report = {
            "schema": SCHEMA, "version": __version__, "run": self.number, "token": self.token, "started": self.started,
            "seconds": round(seconds, 3), "outcome": self.outcome, "state": "stepped_aside" if self.reason else "fused", "reason": self.reason,
            "model": self.model, "gpu": gpu_names(self.devices), "dtype": self.dtype, "core": core_version(), "torch": torch.__version__,
            "tier": self.tier, "high": high, "blocks": dict(self.blocks), "blocks_mounted": self.mounted, "steps": self.steps, "ops": ops,
            "saved_ms_per_step": round(sum(saved), 2) if saved else None,
            "ms_per_step": round(seconds * 1e3 / self.steps, 2) if self.steps else None,
            "disabled": [{"op": v.op, "signature": v.signature, "reason": v.reason} for v in self._verdicts() if v.state == "disabled"],
            "notes": list(self.notes),
        }
        report["text"] = self.phase or text(report)
        return report


def gpu_names(devices) -> str | None:
    """ "NVIDIA H200", "2 × NVIDIA H200", "NVIDIA H200 + NVIDIA L4", "CPU"; None before the first call of the model."""
    names = Counter(torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper() for device in devices)
    return " + ".join(name if count == 1 else f"{count} × {name}" for name, count in names.items()) or None


def core_version() -> str | None:
    """ComfyUI's version, or None outside ComfyUI."""
    import sys

    return getattr(sys.modules.get("comfyui_version"), "__version__", None)


def text(report: dict) -> str:
    """One line for the node: what happened, why, and what it means for the picture."""
    if report["state"] == "stepped_aside":
        return f"Stepped aside: {report['reason']}. Image unaffected."
    if not report["steps"]:
        return "Interrupted before the first step." if report["outcome"] == "interrupted" else "Waiting for the first step."
    if not report["ops"] and not report["high"]:
        return "lossless: nothing to mount, core runs as it is. Image unaffected."
    blocks, gates = sum(report["blocks"].values()), next((op for op in report["ops"] if op["op"] == "residual_gate"), None)
    parts = [f"{report['blocks_mounted']}/{blocks} blocks"]
    if gates and gates["launches"]:
        parts.append(f"{gates['sites']} gates")
    parts.append(f"proven on {report['gpu']}" if any(op["launches"] for op in report["ops"]) else f"nothing fused on {report['gpu']}")
    if report["saved_ms_per_step"] is not None:
        parts.append(f"−{report['saved_ms_per_step']:.1f} ms/step")
    if report["disabled"]:
        parts.append(f"{len(report['disabled'])} operation(s) off: {report['disabled'][0]['reason']}; image unaffected")
    if report["high"]:
        high = report["high"]
        parts.append(f"high: {high['sites']}/{high['of']} sites, not bit-exact" if high["sites"] else f"high stepped aside: {high['reasons'][0]}")
    if report["outcome"] == "interrupted":
        parts.append("interrupted")
    return " · ".join(parts)

"""What one sampling run did, kept as plain data: counts, proofs, and a reason for everything that stepped aside.

`Run.to_dict()` is the report that the nodes, the panel and the API show; where the prompt is known, nodes/status.py adds its id as `prompt`. The keys are
append-only:

    schema                1
    version               version of this pack
    token, lineage        identify the node application that made the run, and those of our nodes before it on the same model
    run                   number of the run in this process, from 1
    started               local time, ISO 8601 to the second
    seconds               wall time of the run
    outcome               "running" | "finished" | "interrupted" | "error"
    state                 "fused" | "stepped_aside"
    reason                why the whole run stepped aside, else None
    model, gpu, dtype     "Flux", "NVIDIA H200" (or "2 × NVIDIA H200"), "bfloat16"; None until known
    core, torch           "0.29.0", "2.11.0+cu130"
    tier                  "lossless" | "high": what was asked for
    high                  None, or {"state": "mounted" | "stepped_aside", "sites": int, "of": int, "reasons": [str],
                          "max_relative_error": float | None}
    blocks                {"double": 19, "single": 38}
    blocks_mounted        blocks that ran with fused operations, in the call that had most of them; others were skipped, or left to core (see notes)
    steps                 calls of the model
    ops                   one per kind of fused operation, in a fixed order:
                          {"op": "residual_gate", "label": "residual gates", "sites": 114, "launches": 2280,
                           "state": "proven" | "bounded" | "disabled" | "partly" | "refused" | "idle", "saved_ms_per_step": 3.1,
                           "reason": None or why some or all of its calls ran as core runs them}
                          "bounded": not exact, checked against its rounding bound (tier "high" only)
                          "refused": never run, since the operands are not what the kernel takes
    saved_ms_per_step     sum over ops; from event times of eager and fused on this GPU at first sight, None if not timed
    ms_per_step           wall time since the first call of the model began; both over all steps, the last one as far as it went
    disabled              [{"op", "signature", "reason"}]: operations of this run that failed their proof on this GPU
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
SKIPPED = "a cache answered in its place, or another pack has its own way through the blocks"
NO_CALL = "No call of the model came through here: nothing was sampled, or another pack calls the model in its own way."
OPS = ("residual_gate", "layer_norm_modulate", "qk_norm_rope", "head_concat", "gelu_concat", "linear_gelu", "column_copy")
_numbers = itertools.count(1)


def _counts() -> dict:
    """(launches, declined) now, by plan. Plans are kept as keys: a run is the difference of two such counts."""
    return {plan: (plan.launches, plan.declined) for op in REGISTRY.values() for plan in list(op.plans.values())}


class Run:
    """Counts of one sampling run. Cheap to keep: everything is derived from the kernels' own counters when somebody asks."""

    def __init__(self, token: str, lineage=(), direct: bool = False):
        self.number, self.token, self.lineage, self.direct, self.tier = next(_numbers), token, list(lineage), direct, "lossless"
        self.started, self._clock, self.seconds = time.strftime("%Y-%m-%dT%H:%M:%S"), time.perf_counter(), 0.0
        self._first_call = None  # when the first call of the model began: before it, core loads the model
        self.outcome, self.reason, self.phase, self._aside, self._skipped = "running", None, None, 0, 0
        self._missing, self._busy, self._began = 0.0, 0.0, 0.0  # parts of calls that did not come to their end; time inside direct calls
        self.model = self.dtype = None
        self.devices: list = []  # core can split one run over several GPUs, a thread each
        self._lock = threading.Lock()
        self.blocks, self.sites, self.steps, self.fused_steps, self.mounted = {"double": 0, "single": 0}, {}, 0, 0, 0
        self.notes: dict[str, None] = {}  # a set that keeps its order
        self.high = None
        self._before, self._after = _counts(), None

    def count_call(self) -> None:
        """One call of the model begins."""
        with self._lock:
            self.steps += 1
            self._began = time.perf_counter()
            self._first_call = self._first_call or self._began

    def describe(self, model: str, device: torch.device, dtype: str) -> None:
        """What that call runs on."""
        with self._lock:
            self.model, self.dtype = model, dtype
            if device not in self.devices:
                self.devices.append(device)

    def expect(self, blocks: dict, sites: dict) -> None:
        """The model of this call has these, as long as none ran with more: a guider may bring a second model into the run."""
        with self._lock:
            if not self.mounted:
                self.blocks, self.sites = blocks, sites

    def count_blocks(self, entered: int, blocks: dict, sites: dict, ended: bool) -> None:
        """So many of the model's blocks ran with leaves of ours in one call, which may have broken off."""
        with self._lock:
            if entered > self.mounted:
                self.mounted, self.blocks, self.sites = entered, blocks, sites
            if not ended:
                self._missing += 1 - entered / max(sum(blocks.values()), 1)

    def count_fused(self) -> bool:
        """One call of the model has ended with the leaves mounted; whether it was the run's first."""
        with self._lock:
            self.fused_steps += 1
            return self.fused_steps == 1

    def step_aside(self, reason: str) -> None:
        """One call of the model runs as core runs it."""
        with self._lock:
            self.reason, self._aside = reason, self._aside + 1

    def skip(self) -> None:
        """One call of the model ran no block."""
        with self._lock:
            self._skipped += 1

    def note(self, text: str) -> None:
        self.notes[text] = None

    def note_high(self, found: dict) -> None:
        """What tier "high" found in one call: mounted in any of them counts, since the image then is not lossless."""
        with self._lock:
            was = self.high or found
            reasons = list(dict.fromkeys((*was["reasons"], *found["reasons"])))
            mounted = was if was["sites"] >= found["sites"] else found
            self.high = {**mounted, "reasons": reasons}

    def end(self, outcome: str) -> None:
        now = time.perf_counter()
        self._busy += now - self._began if self.direct else 0
        self.outcome, self.seconds, self._after = outcome, self._busy if self.direct else now - self._clock, _counts()

    def _calls(self) -> float:
        """Calls of the model, the last one as far as it went."""
        return max(self.steps - self._missing, 0.0)

    def _ms_per_step(self, seconds: float) -> float | None:
        calls = self._calls()
        if not calls:
            return None
        taken = self._busy if self.direct else self._clock + seconds - self._first_call
        return round(taken * 1e3 / calls, 2) if taken else None

    def plans(self) -> list[tuple]:
        """(plan, launches, declined) in this run for every plan of this run's devices."""
        found = []
        for plan, counts in (self._after or _counts()).items():
            if plan.device in self.devices or not self.devices:
                found.append((plan, *(now - then for now, then in zip(counts, self._before.get(plan, (0, 0))))))
        return found

    def _ops(self) -> list[dict]:
        found, used, off, calls = [], self.plans(), {v.op for v in self._disabled()}, self._calls()
        for name in OPS:
            if not self.sites.get(name):
                continue
            mine = [entry for entry in used if entry[0].op == name]
            launches, declined = (sum(entry[i] for entry in mine) for i in (1, 2))
            timed = [(plan, count) for plan, count, _ in mine if count and plan.eager_us is not None]
            saved = sum((plan.eager_us - plan.fused_us) * count for plan, count in timed) / 1e3 / calls if timed and calls else None
            good = "proven" if REGISTRY[name].exact else "bounded"
            if name in off:
                state = "partly" if launches else "disabled"
            else:
                state = ("partly" if declined else good) if launches else "refused" if declined else "idle"
            found.append({
                "op": name, "label": REGISTRY[name].label, "sites": self.sites[name], "launches": launches, "state": state,
                "saved_ms_per_step": None if saved is None else round(saved, 3),
                "reason": next((plan.reason for plan, _, count in mine if count and plan.reason), None),
            })
        return found

    def _disabled(self) -> list:
        """Verdicts against operations that this run wanted, on its devices and in its dtype."""
        verdicts = [(key, v) for op in REGISTRY.values() for key, v in list(op.verdicts.items()) if v.state == "disabled" and self.sites.get(v.op)]
        return [v for (device, dtype, *_), v in verdicts if device in self.devices and str(dtype)[6:] == self.dtype]

    def to_dict(self) -> dict:
        """The report. See the module for its keys."""
        from .. import __version__

        ops = self._ops()
        errors = [error for device, error in REGISTRY["linear_gelu"].errors.items() if device in self.devices]
        high = self.high and {**self.high, "max_relative_error": max(errors, default=None)}
        saved = [op["saved_ms_per_step"] for op in ops if op["saved_ms_per_step"] is not None]
        seconds = self.seconds or time.perf_counter() - self._clock
        reason, notes = self.reason, list(self.notes)
        if reason and self.fused_steps:
            notes.append(f"{self._aside} of {self.steps} model calls ran as core runs them: {reason}")
            reason = None
        if self._skipped and (self.fused_steps or reason):
            notes.append(f"{self._skipped} of {self.steps} model calls ran no block: {SKIPPED}")
        elif self._skipped:
            reason = f"no block ran: {SKIPPED}"
        report = {
            "schema": SCHEMA, "version": __version__, "run": self.number, "token": self.token, "lineage": self.lineage, "started": self.started,
            "seconds": round(seconds, 3), "outcome": self.outcome, "state": "stepped_aside" if reason else "fused", "reason": reason,
            "model": self.model, "gpu": gpu_names(self.devices), "dtype": self.dtype, "core": core_version(), "torch": torch.__version__,
            "tier": self.tier, "high": high, "blocks": dict(self.blocks), "blocks_mounted": self.mounted, "steps": self.steps, "ops": ops,
            "saved_ms_per_step": round(sum(saved), 2) if saved else None,
            "ms_per_step": self._ms_per_step(seconds),
            "disabled": [{"op": v.op, "signature": v.signature, "reason": v.reason} for v in self._disabled()],
            "notes": notes,
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
        effect = {"interrupted": "The run was interrupted.", "error": "The run ended with an error."}.get(report["outcome"], "Image unaffected.")
        return f"Stepped aside: {report['reason']}. {effect}"
    if not report["steps"]:
        early = {"interrupted": "Interrupted before the first step.", "error": "Ended with an error before the first step.", "finished": NO_CALL}
        return early.get(report["outcome"], "Waiting for the first step.")
    blocks, gates = sum(report["blocks"].values()), next((op for op in report["ops"] if op["op"] == "residual_gate"), None)
    parts = [f"{report['blocks_mounted']}/{blocks} blocks"]
    if gates and gates["launches"]:
        parts.append(f"{gates['sites']} gates")
    if any(op["launches"] for op in report["ops"]):
        exact = any(op["state"] in ("proven", "partly") for op in report["ops"])
        parts.append(f"{'proven' if exact else 'checked'} on {report['gpu']}")
    else:
        parts.append(f"nothing fused on {report['gpu']}")
    if report["saved_ms_per_step"] is not None:
        parts.append(f"{signed(-report['saved_ms_per_step'])} ms/step")
    if report["disabled"]:
        count = len({item["op"] for item in report["disabled"]})
        runs_on = "core's own runs there" if report["high"] else "image unaffected"
        parts.append(f"{count} operation{'s' if count > 1 else ''} off: {report['disabled'][0]['reason']}; {runs_on}")
    if report["high"]:
        high = report["high"]
        parts.append(f"high: {high['sites']}/{high['of']} sites, not bit-exact" if high["sites"] else f"high stepped aside: {high['reasons'][0]}")
    if report["outcome"] in ("interrupted", "error"):
        parts.append("interrupted" if report["outcome"] == "interrupted" else "ended with an error")
    return " · ".join(parts)


def signed(value: float) -> str:
    """With a sign that is as wide as a digit: −27.1, +0.3."""
    return f"{'−' if value < 0 else '+'}{abs(value):.1f}"

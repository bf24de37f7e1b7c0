"""One model call with the fast path on: leaves mounted, core's own forward run, leaves restored, whatever happens.

`apply` puts one keyed wrapper on a clone of the model. The wrapper resolves everything from the live model at call time, since
torch.compile, hooks and multi-GPU cores run another module object than the one that the node saw.
"""

from __future__ import annotations

import logging
import uuid
import weakref
from contextlib import contextmanager

import torch

from ..kernels import build
from . import recognise, surroundings
from .mounting import KINDS, current_plan, forget, mounted, plan_for
from .report import Run
from .shared import Q_AND_K, by_others
from .sites import Plan
from .standin import is_touched
from .table import register_comfy_kitchen

log = logging.getLogger("flux_fast_path")

KEY = "flux_fast_path"  # of our wrappers and of our plain-data options
OUTER_SAMPLE, APPLY_MODEL, DIFFUSION_MODEL = "outer_sample", "apply_model", "diffusion_model"  # comfy.patcher_extension.WrappersMP


def plan_or_reason(base_model, x, dtype: torch.dtype, transformer_options: dict, say_building=lambda: None) -> tuple[Plan | None, str | None]:
    """The plan for this model call, or why it runs as core runs it. `dtype` is what the model computes in; `say_building()` is told of a wait."""
    if torch.compiler.is_compiling() or "torch.compile" in transformer_options.get("wrappers", {}).get(APPLY_MODEL, {}):
        return None, "the model is compiled with torch.compile"
    diffusion_model = getattr(base_model, "diffusion_model", None)
    reason = recognise.why_not_code(diffusion_model)
    if reason:
        return None, reason
    reason = surroundings.why_not(x.device.type)
    if reason:
        return None, reason
    if not build.is_settled(x.device, dtype):
        say_building()
    reason = why_not_device(x.device, dtype)
    if reason:
        return None, reason
    plan = current_plan(diffusion_model)
    reason = recognise.why_not_structure(diffusion_model) if plan is None else None
    return (None, reason) if reason else (plan or plan_for(diffusion_model), None)


def why_not_device(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why nothing can be fused there, or None. Builds the kernels on first use."""
    return build.unavailable(device, dtype)


def compute_dtype(base_model) -> torch.dtype:
    """What the model computes in; core 0.3.64 has no `get_dtype_inference`."""
    return base_model.manual_cast_dtype or base_model.get_dtype()


def ending_of(error: BaseException) -> str:
    """The outcome of a run that ended with this error. Core's interrupt is no Exception, and its class differs between cores."""
    return "interrupted" if type(error).__name__ in ("InterruptProcessingException", "KeyboardInterrupt") else "error"


class Application:
    """One application of a node to a model: what its wrappers share. Holds no model and no tensor."""

    def __init__(self, token: str, publish, options: dict):
        self.token, self.publish, self.options, self.run = token, publish, options, None
        self.models = weakref.WeakSet()  # that a run has called

    def __deepcopy__(self, memo):
        return self  # core 0.3.64 deep-copies options, wrappers' owners included; a copy would report to nobody

    def tell(self, run: Run) -> None:
        try:
            if run.outcome != "running" and not (run.direct and run.steps > 1):  # of calls without the sampler, one line says enough
                log.info("FLUX Fast Path: %s", run.to_dict()["text"])
            self.publish(run, self.options["nodes"])
        except Exception:  # the picture never depends on whether somebody could be told about it
            log.debug("publishing the report failed", exc_info=True)

    def outer_sample(self, executor, *args, **kwargs):
        """Core's OUTER_SAMPLE wrapper. Runs before the model is loaded, so it only frames the run."""
        run = self.run = Run(self.token, self.options["lineage"])
        with self.framed(run):
            return executor(*args, **kwargs)

    @contextmanager
    def framed(self, run: Run):
        """End the run as what is inside ends."""
        try:
            yield
        except BaseException as error:
            self.end(run, ending_of(error))
            raise
        self.end(run, "finished")

    def end(self, run: Run, outcome: str) -> None:
        run.end(outcome)
        for model in list(self.models):
            forget(model)
        self.tell(run)

    def apply_model(self, executor, x, t, c_concat=None, c_crossattn=None, control=None, transformer_options={}, *args, **kwargs):  # noqa: B006 core's own default
        """Core's APPLY_MODEL wrapper."""
        call = (x, t, c_concat, c_crossattn, control, transformer_options, *args)
        if self.run is not None and self.run.outcome == "running":
            return self.model_call(self.run, executor, call, kwargs)
        # Somebody calls the model without the sampler: such calls, one after the other, make a run of their own.
        run = self.run = self.run if self.run is not None and self.run.direct else Run(self.token, self.options["lineage"], direct=True)
        with self.framed(run):
            return self.model_call(run, executor, call, kwargs)

    def model_call(self, run: Run, executor, call: tuple, conditions: dict):
        """One call of the model, with the leaves mounted or as core runs it. `call`: APPLY_MODEL's positional arguments."""
        x, transformer_options = call[0], call[5]
        options = options_in(transformer_options) or self.options  # another pack may have made options of its own
        run.tier = options.get("tier", "lossless")
        run.count_call()
        try:
            base = executor.class_obj
            dtype = compute_dtype(base)
            run.describe(type(base.diffusion_model).__name__, x.device, str(dtype)[6:])
            plan, reason = plan_or_reason(base, x, dtype, transformer_options, lambda: self.say_building(run))
            if plan is not None:
                self.models.add(base.diffusion_model)
                kinds, *sharing = choices(base.diffusion_model, plan, transformer_options, conditions, run)
                kinds, sites = with_tier(kinds, options, plan, x.device, dtype, run)
                run.expect(plan.blocks, sites)
                reason = None if kinds else nothing_to_mount(run)
        except Exception as error:  # an object that only resembles a model: whatever it is, core knows how to run it
            log.debug("the model could not be examined", exc_info=True)
            reason = f"the model could not be examined ({type(error).__name__})"
        run.phase = None
        if reason:
            run.step_aside(reason)
            return executor(*call, **conditions)
        register_comfy_kitchen()
        with mounted(plan, kinds, *sharing, note=run.note, device=x.device) as mine:
            if mine is None:
                run.step_aside("another thread is using this model now")
                return executor(*call, **conditions)
            ended = False
            try:
                result = executor(*call, **conditions)
                ended = True
            finally:
                run.count_blocks(mine.entered, plan.blocks, sites, ended)
        if mine.entered:
            if run.count_fused():
                self.tell(run)
        elif mine.refused:
            run.step_aside(mine.refused)
        else:
            run.skip()
        return result

    def say_building(self, run: Run) -> None:
        run.phase = "Building kernels…"
        self.tell(run)


def with_tier(kinds: frozenset, options: dict, plan: Plan, device, dtype, run: Run) -> tuple[frozenset, dict]:
    """(`kinds` as far as our nodes asked for them: those of the fast path, those of the tier; the sites that they have)."""
    sites = plan.sites
    if not options.get("fast_path"):  # only the tier's node is in the graph
        kinds, sites = frozenset(), {}
    if run.tier == "high":
        kinds, sites, found = with_high(kinds, sites, plan, device, dtype)
        run.note_high(found)
    return kinds, sites


def nothing_to_mount(run: Run) -> str:
    """Why a call whose fast path is off has nothing else either."""
    return "FLUX Fast Path is off and the tier is lossless" if run.high is None else f"FLUX Fast Path is off, and tier high stepped aside: {run.high['reasons'][0]}"


def with_high(kinds: frozenset, sites: dict, plan: Plan, device, dtype) -> tuple[frozenset, dict, dict]:
    """`kinds` and `sites` with those of tier "high" that can mount, and what the report says of the tier."""
    chosen, found = plan.high.choose(device, dtype)
    sites = {**sites, "linear_gelu": found["sites"]}
    if "high_single" in chosen:
        # Its own forward replaces the lossless one of linear1, and needs the GELU's leaf to pass the activated columns on.
        kinds = (kinds - {"single_projection"}) | {"gelu"}
        sites.update(gelu_concat=0, column_copy=plan.blocks["single"])
    return kinds | chosen, sites, found


def choices(diffusion_model, plan: Plan, transformer_options: dict, conditions: dict, run: Run) -> tuple[frozenset, bool, bool]:
    """(kinds to mount, whether attention may be asked for another memory order, whether silu(vec) may be shared) for one call."""
    patched, own_attention, read = by_others(transformer_options, conditions.get("attention_mask"))
    kinds = KINDS
    if read:
        kinds = kinds - Q_AND_K
        run.note("q and k run as core runs them: a patch of another node reads or replaces them")
    if not recognise.is_own_rope(plan.attention()):
        kinds = kinds - Q_AND_K
        run.note("q and k run as core runs them: another pack has replaced the rotation (RoPE)")
    known_loop = "forward_orig" not in diffusion_model.__dict__ and recognise.loop_digest(type(diffusion_model)) in recognise.KNOWN_LOOPS
    # Inside this call others may still come in between the model and its blocks, or between a block and its Modulation.
    wrappers = transformer_options.get("wrappers") or {}
    alone = not wrappers.get(DIFFUSION_MODEL) and not any(found for key, found in (wrappers.get(APPLY_MODEL) or {}).items() if key != KEY)
    watched = (*diffusion_model.double_blocks, *diffusion_model.single_blocks, *plan.modulations)
    return kinds, not own_attention, not patched and known_loop and alone and plan.alone and not any(map(is_touched, watched))


def why_not_apply(model) -> str | None:
    """Why the model that a node was given is not worth a wrapper, or None.

    Only its family is asked: blocks may be compiled or patched by another branch just now, and a node's output is cached.
    """
    try:
        return recognise.why_not_family(model.get_model_object("diffusion_model"))
    except Exception as error:  # an object that only resembles a ModelPatcher
        return f"{type(model).__name__} holds no diffusion model ({type(error).__name__})"


def options_in(transformer_options: dict) -> dict:
    """What our nodes have written there; nothing, where another pack keeps something else under our key."""
    found = transformer_options.get(KEY)
    return found if isinstance(found, dict) else {}


def is_applied(model) -> bool:
    """Whether one of our nodes has shaped this model already."""
    options = getattr(model, "model_options", None)
    return isinstance(options, dict) and KEY in (options.get("transformer_options") or {})


def apply(model, publish=lambda run, nodes: None, node=None, **options):
    """A clone of `model` (a ModelPatcher) with the wrapper on; applying it again replaces, so twice equals once.

    `options` (fast_path: bool, tier: str) are merged into the clone's plain-data options, so that our nodes work in any order. `node` is the
    id of the node on screen; `publish(run, nodes)` is told of progress, with the ids of all our nodes that shaped this model.
    """
    clone = model.clone()
    transformer_options = clone.model_options.setdefault("transformer_options", {})
    before = options_in(transformer_options)
    nodes = [n for n in before.get("nodes", []) if n != node] + [node]
    lineage = [*before.get("lineage", []), *filter(None, [before.get("token")])]
    token = uuid.uuid4().hex
    options = transformer_options[KEY] = {**before, **options, "nodes": nodes, "token": token, "lineage": lineage}
    application = Application(token, publish, options)
    for kind, wrapper in ((OUTER_SAMPLE, application.outer_sample), (APPLY_MODEL, application.apply_model)):
        clone.remove_wrappers_with_key(kind, KEY)
        clone.add_wrapper_with_key(kind, KEY, wrapper)
    return clone

"""`sampler`: a whole run of the sampler with and without our nodes; latents are compared by hash, over repeats and between arms."""

import hashlib
import random
import time

import torch

from ..fusion import session
from ..kernels import build
from ..nodes import NODE_CLASS_MAPPINGS
from . import timing
from .progress import say
from .subject import GIB, left_behind


def defaults(options, device) -> dict:
    """Size, text, steps and repeats: the command line's, else 1024², 512, 20, 10 (--quick: 4 steps, 4 repeats; CPU: tiny)."""
    cpu, sizes = device.type != "cuda", options.sizes or ()
    usual = 64 if cpu else 1024
    return {
        "pixels": usual if usual in sizes or not sizes else sizes[0],
        "text": (options.text or [16 if cpu else 512])[-1], "batch": options.batch[0],
        "steps": options.steps or (2 if cpu else 4 if options.quick else 20), "repeats": max(2, options.repeats or (3 if cpu else 4 if options.quick else 10)),
    }


def with_node(model, name: str, **widgets):
    """The MODEL that a node of ours returns, or why there is no such node."""
    node = NODE_CLASS_MAPPINGS.get(name)
    if node is None:
        return f"this version of the pack has no node {name}"
    return getattr(node(), node.FUNCTION)(model, **widgets)[0]


def arms_of(subject) -> dict:
    """Name -> (MODEL or reason, whether it claims the plain latents' bits)."""
    plain = subject.patcher
    fast = with_node(plain, "FluxFastPath")
    high = "nothing can be fused here" if build.unavailable(subject.device, subject.dtype) else with_node(fast, "FluxQualityTier", quality="high")
    return {"plain": (plain, False), "FLUX Fast Path": (fast, True), "FLUX Quality Tier: high": (high, False)}


def conditioning(subject, text: int, seed: int) -> list:
    """One CONDITIONING of random numbers, as CLIPTextEncode and FluxGuidance would shape it."""
    params, generator = subject.transformer.params, torch.Generator().manual_seed(seed)
    context, pooled = (torch.randn(1, *shape, generator=generator) for shape in ((text, params.context_in_dim), (params.vec_in_dim,)))
    return [[context, {"pooled_output": pooled, "guidance": 3.5}]]


def sample(subject, model, p: dict):
    latent = torch.zeros(p["batch"], 16, p["pixels"] // 8, p["pixels"] // 8)
    if subject.core is None:
        conditions = model.random_conditions(p["batch"], p["text"], seed=3)
        return model.sample(latent, p["steps"], conditions, seed=42)
    positive = conditioning(subject, p["text"], 3)
    with torch.inference_mode():
        return subject.core.nodes.common_ksampler(model, 42, p["steps"], 1.0, "euler", "simple", positive, positive, {"samples": latent})[0]["samples"]


def report_of(model):
    """What the wrapper on this clone recorded of its last run."""
    wrappers = model.get_wrappers("outer_sample", session.KEY)
    run = getattr(getattr(wrappers[0], "__self__", None), "run", None) if wrappers else None
    return run.to_dict() if run else None


def make_room(subject) -> None:
    """Core counts weights that it has not loaded itself as still to come; give it a card with room for that, or the weights on the host."""
    if subject.core is None or subject.checkpoint or subject.device.type != "cuda":
        return
    weights = sum(p.numel() * p.element_size() for p in subject.transformer.parameters())
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info(subject.device)[0] < 1.2 * weights + 4 * GIB:
        say("moving the weights to the host, for core to load them as it does after reading a file")
        subject.patcher.model.to("cpu")
        torch.cuda.empty_cache()


def ballast(device, leave_free):
    """A tensor that leaves `leave_free` GiB of the card free; nothing where that is not asked for."""
    if leave_free is None or device.type != "cuda":
        return None
    torch.cuda.empty_cache()
    surplus = torch.cuda.mem_get_info(device)[0] - int(leave_free * GIB)
    return torch.empty(surplus, dtype=torch.uint8, device=device) if surplus > 0 else None


def words_of(subject, held, options) -> str:
    """The sampler and how memory is managed."""
    if subject.core is None:
        return "the Euler sampler of bench/reference_patcher.py"
    memory = "dynamic VRAM" if getattr(subject.patcher, "is_dynamic", lambda: False)() else "classic patcher"
    free = f", {options.leave_free:g} GiB of the card left free" if held is not None else ""
    return f"ComfyUI {subject.core.version_text}'s common_ksampler, {memory}{free}"


def run(subject, options, gpu) -> dict:
    started, p, rng = time.perf_counter(), defaults(options, subject.device), random.Random(options.seed)
    make_room(subject)
    held = ballast(subject.device, options.leave_free)
    sampler = words_of(subject, held, options)
    section = {"subject": subject.words, "sampler": f"{sampler}, euler, {p['steps']} steps, cfg 1", **p, "arms": {}, "clocks_before": gpu.clocks()}
    arms = {}
    for name, (model, claims) in arms_of(subject).items():
        reason = model if isinstance(model, str) else None
        section["arms"][name] = {"claims": claims, "skipped": reason, "seconds": [], "hashes": [], "finite": None}
        if reason is None:
            arms[name] = model
    for i in range(p["repeats"]):
        say(f"{p['pixels']} x {p['pixels']}, {p['steps']} steps: repeat {i + 1} of {p['repeats']}{' (not counted)' if i == 0 else ''}")
        for name in rng.sample(sorted(arms), len(arms)):
            timing.synchronise(subject.device)
            begun = time.perf_counter()
            latents = sample(subject, arms[name], p)
            timing.synchronise(subject.device)
            arm = section["arms"][name]
            arm["seconds"].append(time.perf_counter() - begun)
            latents = latents.detach().to("cpu").contiguous()
            arm["hashes"].append(hashlib.sha256(latents.view(torch.uint8).numpy().tobytes()).hexdigest()[:16])
            arm["finite"] = bool(torch.isfinite(latents).all())
    want = section["arms"]["plain"]["hashes"][0]
    for name, model in arms.items():
        arm = section["arms"][name]
        arm["identical"], arm["unique_hashes"] = set(arm["hashes"]) == {want}, len(set(arm["hashes"]))
        arm["spread"] = timing.spread(arm["seconds"][1:])  # the first one loads, builds and proves
        report = report_of(model)
        arm["report"] = report and report["text"]
        arm["launches"] = report and {op["op"]: op["launches"] for op in report["ops"]}
    section["identical"] = all(a["identical"] for a in section["arms"].values() if a["claims"] and not a["skipped"])
    section["fused"] = bool(sum((section["arms"]["FLUX Fast Path"].get("launches") or {}).values()))
    section["not_fused"] = build.unavailable(subject.device, subject.dtype)
    section["left_behind"], section["clocks_after"] = left_behind(subject.transformer), gpu.clocks()
    section["seconds"] = time.perf_counter() - started
    del held
    return section

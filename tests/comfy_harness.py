"""Real ComfyUI in this process: load a tiny FLUX.1 through the stock nodes, sample it through the stock sampler, look for anything left behind.

Environment: COMFYUI_PATH (a checkout of 0.3.64 or newer) and FLUX_FAST_PATH_COMFY_ARGS (extra command-line switches for core, e.g.
"--disable-dynamic-vram" or "--bf16-unet"). One process holds one core with one set of switches.
"""
import contextlib
import os
from types import SimpleNamespace

import torch
from flux_fast_path.bench import checkpoint, comfy_core
from safetensors.torch import load_file, save_file

CONTEXT_DIM, POOLED_DIM = 64, 32   # the tiny checkpoint's; core reads both from the tensors


def why_not():
    reason = comfy_core.why_not()
    return reason and f"{reason}: no ComfyUI checkout to test against"


def import_comfy():
    return comfy_core.import_core(dynamic_vram=True)


def write_tiny_flux_checkpoint(path, seed=0, dtype=torch.bfloat16, hidden=256, depth=2, single=3, guidance=True):
    """A FLUX.1 file, small and random. Returns the path as a string."""
    return checkpoint.write(path, "tiny", dtype, seed, hidden_size=hidden, num_heads=hidden // 128, depth=depth, depth_single_blocks=single,
                            context_in_dim=CONTEXT_DIM, vec_in_dim=POOLED_DIM, guidance_embed=guidance)


def write_tiny_lora(path, seed=0, rank=4, hidden=256, amount=0.5, dtype=torch.bfloat16):
    """A LoRA in the kohya format on Linears we read from, write around, or never touch. Returns the path as a string."""
    mlp = 4 * hidden
    targets = {"double_blocks_0_img_attn_qkv": (3 * hidden, hidden), "double_blocks_1_txt_mlp_0": (mlp, hidden), "double_blocks_0_img_mod_lin": (6 * hidden, hidden),
               "single_blocks_0_linear1": (3 * hidden + mlp, hidden), "single_blocks_2_linear2": (hidden, hidden + mlp)}
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, (rows, columns) in targets.items():
        tensors[f"lora_unet_{name}.lora_down.weight"] = (torch.randn(rank, columns, generator=generator) * columns ** -0.5).to(dtype)
        tensors[f"lora_unet_{name}.lora_up.weight"] = (torch.randn(rows, rank, generator=generator) * amount * rank ** -0.5).to(dtype)
        tensors[f"lora_unet_{name}.alpha"] = torch.tensor(float(rank))
    save_file(tensors, str(path))
    return str(path)


def _register(kind, path):
    folder, name = os.path.split(os.path.abspath(path))
    core = import_comfy()
    core.folder_paths.add_model_folder_path(kind, folder, is_default=True)
    found = core.folder_paths.get_full_path(kind, name)
    if found is None or not os.path.samefile(found, path):
        raise RuntimeError(f"core finds {found} where {path} was meant")
    return name


@contextlib.contextmanager
def _widths_from_the_file(path):
    """0.3.64 recognises FLUX.1 by its keys but takes dev's widths for granted. Only those numbers are corrected, while a tiny file loads."""
    import comfy.model_detection as detection
    original = detection.detect_unet_config

    def detect(*args, **kwargs):
        config = original(*args, **kwargs)
        if config and config.get("image_model") == "flux":
            hidden, context = load_file(path)["txt_in.weight"].shape
            config.update(hidden_size=hidden, context_in_dim=context, num_heads=hidden // sum(config["axes_dim"]))
        return config

    detection.detect_unet_config = detect
    try:
        yield
    finally:
        detection.detect_unet_config = original


def load_flux(path, weight_dtype="default", compute_dtype=None):
    """Through core's UNETLoader. `weight_dtype` as in its menu: default, fp8_e4m3fn, fp8_e4m3fn_fast, fp8_e5m2.

    On a CPU core computes FLUX in float32 whatever the file and the switches say. `compute_dtype` asks for another through core's own
    `set_model_compute_dtype`, on the model returned: torch.bfloat16 makes a CPU compute as a graphics card would.
    """
    core = import_comfy()
    name = _register("diffusion_models", path)
    with torch.inference_mode(), _widths_from_the_file(path) if core.version < (0, 4) else contextlib.nullcontext():
        model = core.nodes.UNETLoader().load_unet(name, weight_dtype)[0]
    if compute_dtype is not None:
        model.set_model_compute_dtype(compute_dtype)
    return model


def load_lora(model, path, strength=1.0):
    """Through core's LoraLoaderModelOnly; at strength 0 core returns the very model it was given."""
    name = _register("loras", path)
    with torch.inference_mode():
        return import_comfy().nodes.LoraLoaderModelOnly().load_lora_model_only(model, name, strength)[0]


def conditioning(seed, text_tokens=16, batch=1, guidance=3.5, context_dim=CONTEXT_DIM, pooled_dim=POOLED_DIM, **extra):
    """One CONDITIONING of random numbers, as CLIPTextEncode and FluxGuidance would shape it; `extra` goes in as is (reference_latents, ...)."""
    generator = torch.Generator().manual_seed(seed)
    context, pooled = (torch.randn(*shape, generator=generator) for shape in ((batch, text_tokens, context_dim), (batch, pooled_dim)))
    return [[context, {"pooled_output": pooled, "guidance": guidance, **extra}]]


def sample(model, seed=0, steps=4, width=64, height=64, text_tokens=16, batch=1, cfg=1.0, guidance=3.5, negative=False, latent=None, extra=None,
           sampler_name="euler", scheduler="simple", denoise=1.0):
    """The final latent, from core's common_ksampler under inference mode as a prompt runs it.

    Width and height are pixels, a multiple of 8. `negative=True` gives the negative prompt its own text; raise `cfg` for core to run it.
    `latent` replaces the empty one; `extra` is a dict merged into the positive conditioning.
    """
    core = import_comfy()
    weight = model.model.diffusion_model
    dims = dict(context_dim=weight.params.context_in_dim, pooled_dim=weight.params.vec_in_dim)
    positive = conditioning(seed + 1, text_tokens, guidance=guidance, **dims, **(extra or {}))
    other = conditioning(seed + 2 if negative else seed + 1, text_tokens, guidance=guidance, **dims)
    if latent is None:
        latent = torch.zeros(batch, 16, height // 8, width // 8)
    with torch.inference_mode():
        return core.nodes.common_ksampler(model, seed, steps, cfg, sampler_name, scheduler, positive, other, {"samples": latent}, denoise=denoise)[0]["samples"]


# ---- what must not be left behind ------------------------------------------------------------------------------------------------------

# Set by core itself on a module when it loads, offloads or patches weights; none of them is ours.
CORE_ATTRIBUTES = {"comfy_cast_weights", "prev_comfy_cast_weights", "comfy_patched_weights", "weight_function", "bias_function", "weight_lowvram_function",
                   "bias_lowvram_function", "comfy_force_cast_weights", "training", "seed_key"}
CORE_PREFIXES = ("_v", "_pin", "pin_", "_prefetch", "dynamic_")   # dynamic VRAM's own
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks", "_load_state_dict_pre_hooks")


def _modules(model):
    root = getattr(model, "model", model)   # a patcher holds a model; a bare module is taken as it is
    return {name: module for name, module in root.named_modules() if name == "" or "diffusion_model" in name or root is model}


def _ours(thing):
    """True for what our fast path defines, whatever name the pack was imported under; the reference model in bench/ is not meant."""
    return bool({"fusion", "kernels"} & set(str(getattr(thing, "__module__", "")).split(".")))


def snapshot(model):
    """Per module path: the object, its class, its attribute names, its parameter and buffer names, its number of hooks."""
    return {name: SimpleNamespace(module=m, cls=type(m), attributes=frozenset(m.__dict__), parameters=tuple(m._parameters), buffers=tuple(m._buffers),
                                  children=tuple((k, id(c)) for k, c in m._modules.items()), hooks=tuple(len(getattr(m, h, ())) for h in _HOOKS))
            for name, m in _modules(model).items()}


def assert_untouched(model, before=None):
    """Nothing of ours is on any module: no instance `forward`, no class or value from our package; against `before`, nothing new at all."""
    problems, after = [], snapshot(model)
    for name, now in after.items():
        where = name or type(now.module).__name__
        if "forward" in now.module.__dict__:
            problems.append(f"{where} has an instance forward")
        problems += [f"{where} is now a {now.cls.__qualname__}"] if _ours(now.cls) else []
        problems += [f"{where}.{k} is {v!r}" for k, v in now.module.__dict__.items() if _ours(v) or _ours(type(v))]
        if before is None:
            continue
        was = before.get(name)
        if was is None or was.module is not now.module:
            problems.append(f"{where} is another module than before")
            continue
        problems += [f"{where}: {what} changed from {getattr(was, what)} to {getattr(now, what)}"
                     for what in ("cls", "parameters", "buffers", "children", "hooks") if getattr(was, what) != getattr(now, what)]
        problems += [f"{where} gained attribute {a}" for a in sorted(now.attributes - was.attributes - CORE_ATTRIBUTES)
                     if not a.startswith(CORE_PREFIXES)]
    problems += [f"{name} is gone" for name in (before or {}) if name not in after]
    assert not problems, "left behind on the shared model:\n  " + "\n  ".join(problems)


def comfy_globals_snapshot():
    """Every function of the core and torch classes FLUX runs through, by name; take one before and one after, and compare with ==."""
    import comfy.ldm.flux.layers
    import comfy.ldm.flux.math
    import comfy.ldm.flux.model
    import comfy.ldm.modules.attention
    import comfy.model_base
    import comfy.model_management
    import comfy.model_patcher
    import comfy.ops
    import comfy.patcher_extension
    import comfy.samplers
    found = {}

    def collect(owner, prefix, depth):
        for name, value in list(vars(owner).items()):
            if isinstance(value, type) and depth:
                found[f"{prefix}.{name}"] = value
                if str(value.__module__).startswith("comfy"):
                    collect(value, f"{prefix}.{name}", depth - 1)
            elif callable(value) or isinstance(value, (staticmethod, classmethod, property)):
                found[f"{prefix}.{name}"] = value

    core = comfy
    for module in (core.ldm.flux.layers, core.ldm.flux.math, core.ldm.flux.model, core.ldm.modules.attention, core.model_base, core.model_management,
                   core.model_patcher, core.ops, core.patcher_extension, core.samplers):
        collect(module, module.__name__, 3)
    for owner in (torch.nn.Module, torch.nn.Linear, torch.nn.LayerNorm, torch.nn.RMSNorm, torch.nn.GELU, torch.nn.functional):
        collect(owner, owner.__name__, 0)
    return found


def assert_globals_unchanged(before):
    after = comfy_globals_snapshot()
    changed = sorted(k for k in set(before) | set(after) if before.get(k) is not after.get(k))
    assert not changed, f"globals of core or torch changed: {changed}"


def assert_bits_equal(a, b, what="result"):
    """Same shape, same dtype, same bits: NaN equals the same NaN, -0.0 differs from 0.0."""
    assert a.shape == b.shape and a.dtype == b.dtype, f"{what}: {tuple(a.shape)} {a.dtype} against {tuple(b.shape)} {b.dtype}"
    as_bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    x, y = (t.detach().cpu().contiguous().view(as_bits) for t in (a, b))
    different = int((x != y).sum())
    if different:
        gap = (a.detach().cpu().double() - b.detach().cpu().double()).abs().nan_to_num(0.0)
        raise AssertionError(f"{what}: {different} of {x.numel()} values differ, by up to {gap.max().item():.3e}")

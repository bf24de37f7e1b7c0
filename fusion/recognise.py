"""Which models the fast path knows, decided by structure and by the source of the code that will run. A reason for every other one."""

from __future__ import annotations

import hashlib
import inspect
import io
import sys
import tokenize

import torch

from .classes import is_own_code
from .watch import kitchen_of

# Digest of core's block code -> where it was read. Deferring an operation is safe only in code that is known not to write to an operand
# between asking for the operation and using it, so a block whose code is not listed here runs as core runs it.
KNOWN_BLOCKS: dict[str, str] = {
    "2135924629cfba42": "ComfyUI 0.3.64",
    "7b286b3e0b7dcb7d": "ComfyUI after #10547 (November 2025)",
    "ba6b1ef7cb09c3a7": "ComfyUI after #10737",
    "e7f37ed850c1edc0": "ComfyUI after #10746",
    "86cca41b734180e9": "ComfyUI 0.3.72",
    "8be4e481b0de5a4f": "ComfyUI 0.3.76",
    "ce68acba9069ebd4": "ComfyUI after #12432 (February 2026)",
    "56bd5214f9c63d0f": "ComfyUI after #12500",
    "5965e64d19662619": "ComfyUI after #12861",
    "17e0764f35c1ebf8": "ComfyUI 0.17 to 0.33 (0.20.1 and 0.29.0 checked)",
    "3d4aa01d77194071": "bench/reference_flux.py",
}
# The same for what q, k and v pass through on their way out of a block, and for the layer after the blocks.
KNOWN_ATTENTIONS: dict[str, str] = {
    "9c335959f89e70e8": "ComfyUI 0.3.64",
    "e13619910e202a7c": "ComfyUI after #10547 (November 2025)",
    "26e1256861d580ae": "ComfyUI 0.3.70 to 0.33",
    "47730f958ab838ca": "bench/reference_flux.py",
}
KNOWN_LAST_LAYERS: dict[str, str] = {
    "2a3d40d338f55d3f": "ComfyUI 0.3.64 to 0.33",
    "b292c7268367717c": "bench/reference_flux.py",
}
# The same for the loop over the blocks: in these, no block's vec is written to, so one silu(vec) serves all Modulations of a call.
KNOWN_LOOPS: dict[str, str] = {
    "d73d761689d22605": "ComfyUI 0.3.64",
    "ab052906ef04eb8a": "ComfyUI 0.17 to 0.33",
    "fde1a9ac126cebf6": "bench/reference_flux.py",
}

_digests: dict[tuple, tuple] = {}  # ids of code objects -> (digest, the code objects, kept so that ids stay theirs)


def _source_tokens(function) -> str:
    """The function's source without comments and layout. The code object is asked, since a wrapper would answer with what it wraps."""
    source = inspect.getsource(function.__code__)
    drop = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    lines = source.splitlines(keepends=True)
    margin = len(lines[0]) - len(lines[0].lstrip())
    readable = io.StringIO("".join(line[margin:] if line.strip() else "\n" for line in lines)).readline
    return " ".join(token.string for token in tokenize.generate_tokens(readable) if token.type not in drop)


def _is_from_its_file(function) -> bool:
    """Whether the code that runs is in the file whose source `digest` reads: a code object can name any file."""
    names = function.__globals__
    pending = [names["__loader__"].get_code(names["__name__"])]
    while pending:
        code = pending.pop()
        if code == function.__code__:
            return True
        pending += [c for c in code.co_consts if isinstance(c, type(code))]
    return False


def digest(*functions) -> str | None:
    """A digest of the functions' source, the same on every Python; None when a source cannot be read."""
    codes = tuple(getattr(f, "__code__", None) for f in functions)
    if None in codes:
        return None  # no Python function; remembering it could keep alive what it holds
    key = tuple(map(id, codes))
    if key not in _digests:
        try:
            text = "\n".join(_source_tokens(f) for f in functions)
            found = hashlib.sha256(text.encode()).hexdigest()[:16] if all(map(_is_from_its_file, functions)) else None
        except (OSError, TypeError, AttributeError, KeyError, ImportError, SyntaxError, tokenize.TokenError):
            found = None
        _digests[key] = found, codes
    return _digests[key][0]


def block_digest(double: type, single: type) -> str | None:
    """Digest of all code between a block's entry and the operations that the fast path defers."""
    names = double.forward.__globals__
    return digest(double.forward, single.forward, names.get("apply_mod"), names["Modulation"].forward, names["QKNorm"].forward)


def loop_digest(model: type) -> str | None:
    """Digest of the code that calls the blocks: `forward_orig` in core, `forward` in the reference model."""
    return digest(getattr(model, "forward_orig", model.forward))


_STREAM = "{0}_mod.lin {0}_norm1 {0}_norm2 {0}_attn.qkv {0}_attn.norm.query_norm {0}_attn.norm.key_norm {0}_attn.proj {0}_mlp.0 {0}_mlp.1 {0}_mlp.2"
DOUBLE_CHILDREN = tuple(_STREAM.format("img").split() + _STREAM.format("txt").split())
SINGLE_CHILDREN = ("modulation.lin", "pre_norm", "norm.query_norm", "norm.key_norm", "linear1", "linear2", "mlp_act")


def _child(module, path: str):
    """The submodule at a dotted path, or None."""
    for name in path.split("."):
        module = module._modules.get(name) if isinstance(module, torch.nn.Module) else None
    return module


def is_compiled(diffusion_model) -> bool:
    """Whether torch.compile has wrapped the model, been called on it in place, or made one of its functions."""
    if type(diffusion_model).__name__ == "OptimizedModule" or getattr(diffusion_model, "_compiled_call_impl", None) is not None:
        return True
    own = getattr(diffusion_model, "__dict__", {})
    return any(hasattr(own.get(name), "_torchdynamo_orig_callable") for name in ("forward", "forward_orig"))


def is_own_rope(attention) -> bool:
    """Whether the rotation that `attention` calls is the one it was written with: another one gets tensors, as it may expect."""
    names, kitchen = attention.__globals__, kitchen_of(attention)
    found = [names[name] for name in ("apply_rope", "apply_rope1") if name in names]
    if not all(getattr(f, "__globals__", None) is names and digest(f) is not None for f in found):
        return False
    below = [names.get(f"q_{name}", getattr(kitchen, name, None)) for name in ("apply_rope", "apply_rope1")]
    return all(f is None or _is_comfy_kitchens(f) for f in below)


def _is_comfy_kitchens(function) -> bool:
    home = str(getattr(function, "__module__", None))
    return home.partition(".")[0] == "comfy_kitchen" and (not hasattr(function, "__code__") or is_own_code(function, home))


def why_not_family(diffusion_model) -> str | None:
    """Why the fast path will never do anything for this model, or None if it is of FLUX.1's family."""
    if not isinstance(diffusion_model, torch.nn.Module):
        return f"{type(diffusion_model).__name__} is not a torch module"
    if type(diffusion_model).__name__ == "OptimizedModule":  # torch.compile's, for as long as that lasts
        diffusion_model = getattr(diffusion_model, "_orig_mod", diffusion_model)
    if type(diffusion_model).__name__ != "Flux":
        return f"{type(diffusion_model).__name__} is not FLUX.1"
    params = getattr(diffusion_model, "params", None)
    for flag in ("global_modulation", "mlp_silu_act", "yak_mlp"):
        if getattr(params, flag, False):
            return f"not FLUX.1: a FLUX variant with {flag}"
    return None


def why_not_model(diffusion_model) -> str | None:
    """Why the fast path leaves this model alone as it stands now, or None if it is FLUX.1 (dev, schnell, Kontext, Fill, Redux, fine-tunes)."""
    return why_not_code(diffusion_model) or why_not_structure(diffusion_model)


def why_not_code(diffusion_model) -> str | None:
    """The part that can change between two calls without any module being another: what runs, by class and by source."""
    reason = why_not_family(diffusion_model) or ("the model is compiled with torch.compile" if is_compiled(diffusion_model) else None)
    if reason:
        return reason
    doubles, singles = getattr(diffusion_model, "double_blocks", ()), getattr(diffusion_model, "single_blocks", ())
    if not len(doubles) or not len(singles):
        return "not FLUX.1: it has no double or no single blocks (or another pack has put others in their place)"
    for kind, blocks in (("double", doubles), ("single", singles)):
        if len({type(b) for b in blocks}) != 1:
            return f"its {kind} blocks are of different classes (another pack replaced some)"
        if any(b._compiled_call_impl is not None for b in blocks) or type(blocks[0]).__name__ == "OptimizedModule":
            return "its blocks are compiled with torch.compile"
    final = getattr(diffusion_model, "final_layer", None)
    try:
        names = type(doubles[0]).forward.__globals__
        known = (
            block_digest(type(doubles[0]), type(singles[0])) in KNOWN_BLOCKS
            and digest(names["attention"]) in KNOWN_ATTENTIONS
            and (final is None or digest(type(final).forward) in KNOWN_LAST_LAYERS)
        )
    except (AttributeError, KeyError):
        known = False
    if known:
        return None
    changed = _changed_at_run_time(type(diffusion_model), type(doubles[0]), type(singles[0]), None if final is None else type(final))
    return f"core version not recognised: {changed or 'the code of its FLUX blocks is not one that was checked'}"


def _package_of(module: str) -> str:
    return module.rpartition(".")[0]


def _package(cls: type) -> str:
    return _package_of(cls.__module__)


def _changed_at_run_time(model: type, double: type, single: type, final) -> str | None:
    """What another pack has put in the place of core's blocks, or of a function that they are recognised by, where that can be told."""
    packages = {_package(base) for base in model.__mro__ if base is not object}
    for kind, cls in (("double", double), ("single", single)):
        if _package(cls) not in packages:
            return f"its {kind} blocks are {cls.__qualname__} of {cls.__module__}"
    names = vars(sys.modules.get(double.__module__, object))
    classes = [cls for cls in (double, single, names.get("Modulation"), names.get("QKNorm"), final) if isinstance(cls, type)]
    functions = [(f"{cls.__name__}.forward", cls.__dict__.get("forward"), cls.__module__) for cls in classes]
    for name in ("apply_mod", "attention"):
        if name in names:
            functions.append((name, names[name], getattr(names[name], "__module__", None)))
    for name, function, module in functions:
        if not hasattr(sys.modules.get(module), "__file__"):
            return None  # made at run time, all of it: there is no file to compare with
        if not is_own_code(function, module) or function.__code__.co_name != name.rpartition(".")[2] or _package_of(module) not in packages:
            return f"another pack has changed its {name}"
    return None


def why_not_structure(diffusion_model) -> str | None:
    """The part that holds for as long as the blocks and what hangs on them are the same objects, so it is asked when a plan is made."""
    for kind, blocks, children in (("double", diffusion_model.double_blocks, DOUBLE_CHILDREN), ("single", diffusion_model.single_blocks, SINGLE_CHILDREN)):
        for block in blocks:
            if any(type(m).__name__ == "OptimizedModule" for m in block.modules()):
                return "parts of its blocks are compiled with torch.compile"
            missing = next((path for path in children if _child(block, path) is None), None)
            if missing:
                return f"not FLUX.1: a {kind} block has no {missing}"
    return None

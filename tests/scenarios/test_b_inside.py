"""Kind B: what other packs do inside our call, between the model and its blocks, where a look at the call's beginning cannot see it."""
import contextlib
import copy
import gc
import weakref

import pytest
import torch
from comfy_harness import assert_bits_equal
from flux_fast_path.kernels import qk_norm_rope as qk
from torch.overrides import TorchFunctionMode

pytestmark = pytest.mark.comfyui

INNER = ("diffusion_model", "apply_model")  # wrappers that core runs inside ours when they are added after it


@pytest.fixture
def layouts_as_on_a_gpu(monkeypatch):
    """The reference lays q and k out as the kernel does, so that attention really gets another memory order on a CPU too."""
    reference = qk.qk_norm_rope_reference

    def laid_out(streams, pe, eps, rope, token_major):
        found = reference(streams, pe, eps, rope, token_major)
        return tuple(r.transpose(1, 2).contiguous().transpose(1, 2) for r in found) if token_major else found

    monkeypatch.setattr(qk.QkNormRope, "reference", staticmethod(laid_out))


def both(scene, change, kind="diffusion_model"):
    """(the model with a wrapper that changes what is inside, the same with our node around it). `change(kwargs)` may be a context."""

    def wrapper(executor, *args, **kwargs):
        options = next(a for a in (*reversed(args), kwargs.get("transformer_options")) if isinstance(a, dict) and "sample_sigmas" in a)
        own = dict(options)
        args = tuple(own if a is options else a for a in args)
        kwargs = {k: own if v is options else v for k, v in kwargs.items()}
        around = change(own, args, kwargs)
        with around or contextlib.nullcontext():
            return executor(*args, **kwargs)

    model = scene.load()
    return scene.wrapped(model, wrapper, kind), scene.wrapped(scene.ours(model), wrapper, kind)


def add_patch(options, args, kwargs):
    def patch(q, k, v, pe=None, attn_mask=None, extra_options=None):
        assert all(type(t) is torch.Tensor for t in (q, k, v))
        return {"q": q * 1.5}

    options["patches"] = {"attn1_patch": [patch]}


def override_attention(options, args, kwargs):
    def override(func, q, k, v, heads, **other):
        return func(q.view(q.shape[0], q.shape[1], -1).view(q.shape) * 1.5, k, v, heads, **other)  # contiguous in core

    options["optimized_attention_override"] = override


def write_vec(options, args, kwargs):
    def replaced(values, extra):
        values["vec"].mul_(1.25)
        return extra["original_block"](values)

    options["patches_replace"] = {"dit": {("double_block", 1): replaced, ("single_block", 0): replaced}}


class Louder(TorchFunctionMode):
    """Another pack's mode, which changes what a torch function gives."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        return found * 1.5 if func is torch.nn.functional.layer_norm else found


def enter_mode(options, args, kwargs):
    return Louder()


def enter_autocast(options, args, kwargs):
    return torch.autocast("cuda" if torch.cuda.is_available() else "cpu", torch.float16)


@pytest.mark.parametrize("kind", INNER)
@pytest.mark.parametrize("change", [add_patch, override_attention, write_vec, enter_mode, enter_autocast])
def test_what_a_wrapper_inside_ours_changes_is_changed_with_us_too(scene, layouts_as_on_a_gpu, kind, change):
    """B05, B09, B25"""
    if scene.core.version < (0, 4) and change in (add_patch, enter_autocast):
        pytest.skip("this core has no attention patches for FLUX, and does not run under autocast")
    plain = scene.sample(scene.load())
    other, mine = both(scene, change, kind)
    wanted = scene.sample(other)
    assert not torch.equal(wanted, plain), "the change does nothing, so the test proves nothing"
    assert_bits_equal(scene.sample(mine), wanted)


# --- leaves that become others after a first run with us ---


def louder(cls):
    """A subclass whose result is half again as large."""

    def forward(self, *args, **kwargs):
        found = cls.forward(self, *args, **kwargs)
        if torch.is_tensor(found):
            return found * 1.5
        if hasattr(found[0], "shift"):
            found[0].shift = found[0].shift * 1.5
            return found
        return found[0] * 1.5, found[1]

    return type(f"Louder{cls.__name__}", (cls,), {"forward": forward})


PATHS = ["double_blocks.0.img_norm1", "double_blocks.1.txt_mod", "double_blocks.0.img_attn.norm", "double_blocks.0.img_attn.norm.query_norm", "single_blocks.1.norm.key_norm",
         "single_blocks.0.pre_norm", "single_blocks.2.mlp_act", "double_blocks.0.img_mlp.1"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("way", ["class", "object patch"])
def test_a_leaf_that_is_another_since_our_last_run_is_theirs(scene, path, way):
    """B09, B19: at any depth, by its class or by core's own object patches."""
    model = scene.load()
    mine = scene.ours(model)
    plain = scene.sample(mine)
    leaf = model.model.diffusion_model.get_submodule(path)
    was = type(leaf)
    if way == "class":
        leaf.__class__ = louder(was)
        other, mine = model, scene.ours(model)
    else:
        new = copy.copy(leaf)
        new.__class__ = louder(was)
        other, mine = model.clone(), mine.clone()
        for patched in (other, mine):
            patched.add_object_patch(f"diffusion_model.{path}", new)
    try:
        wanted = scene.sample(other)
        assert not torch.equal(wanted, plain)
        assert torch.equal(scene.sample(mine), wanted)
    finally:
        if way == "class":
            leaf.__class__ = was
    assert torch.equal(scene.sample(model), plain)


def test_a_gelu_that_is_no_longer_the_tanh_one_is_theirs(scene):
    """B09"""
    model = scene.load()
    plain = scene.sample(scene.ours(model))
    activation = model.model.diffusion_model.single_blocks[0].mlp_act
    activation.approximate = "none"
    try:
        wanted = scene.sample(model)
        assert not torch.equal(wanted, plain) and torch.equal(scene.sample(scene.ours(model)), wanted)
    finally:
        activation.approximate = "tanh"


def test_a_rotation_of_another_pack_gets_tensors(scene, monkeypatch):
    """B03, B09: it may look at what it is given."""
    import comfy.ldm.flux.math as math
    if scene.core.version < (0, 4):
        pytest.skip("this core rotates inside its attention function")
    original = math.apply_rope

    def theirs(xq, xk, freqs_cis):
        assert type(xq) is torch.Tensor and type(xk) is torch.Tensor
        return original(xq * 1.5, xk, freqs_cis)

    model = scene.load()
    with monkeypatch.context() as patch:
        patch.setattr(math, "apply_rope", theirs)
        told = scene.same(model)
        assert any("RoPE" in note for note in told["notes"]) and not scene.calls["qk_norm_rope"]
    scene.sample(scene.ours(model))
    assert scene.calls["qk_norm_rope"]


# --- what must not be kept alive ---


def test_a_module_that_was_patched_in_goes_when_the_patch_does(scene):
    """B09, B31: the plan of our last run holds no blocks."""
    model = scene.load()
    scene.sample(model)  # loading says on each module how its weights are cast
    other = model.clone()
    new = copy.copy(model.model.diffusion_model.single_blocks[0].linear1)  # a deep copy would free core's weight pages a second time
    other.add_object_patch("diffusion_model.single_blocks.0.linear1", new)
    alive = weakref.ref(new)
    del new
    scene.sample(scene.ours(other))
    del other
    scene.sample(model)
    gc.collect()
    assert alive() is None

"""Kind B: code of core or torch that another pack has replaced, before our call or inside it: its effect is the same with us, whatever it looks at."""
import contextlib
import sys

import pytest
import torch
from comfy_harness import assert_bits_equal
from flux_fast_path.fusion.pending import Pending

pytestmark = pytest.mark.comfyui


def louder(found):
    """Half again as much of whatever a replaced function gave."""
    if isinstance(found, torch.Tensor):
        return found * 1.5
    if isinstance(found, (tuple, list)):
        return type(found)(louder(part) for part in found)
    return found if found is None else type(found)(*(louder(getattr(found, name)) for name in ("shift", "scale", "gate")))


def replacement(original):
    """A function in another pack's style: it looks at what it is given, and changes what comes out."""

    def theirs(*args, **kwargs):
        assert not any(isinstance(a, Pending) for a in (*args, *kwargs.values())), "another pack's code was given something that is no tensor"
        return louder(original(*args, **kwargs))

    return theirs


def places(core):
    """Where packs replace things: name -> (owner, attribute)."""
    ops, layers, math, nn = core.comfy.ops.disable_weight_init, sys.modules["comfy.ldm.flux.layers"], sys.modules["comfy.ldm.flux.math"], torch.nn
    found = {f"{cls}.forward": (getattr(layers, cls), "forward") for cls in ("DoubleStreamBlock", "SingleStreamBlock", "Modulation", "QKNorm", "LastLayer")}
    found.update({f"ops.{cls}.{name}": (getattr(ops, cls), name) for cls in ("LayerNorm", "RMSNorm", "Linear") for name in ("forward", "forward_comfy_cast_weights")})
    found.update({f"nn.{cls}.forward": (getattr(nn, cls), "forward") for cls in ("LayerNorm", "RMSNorm", "GELU", "Linear", "Sequential")})
    found.update({"attention": (layers, "attention"), "apply_mod": (layers, "apply_mod"), "apply_rope": (math, "apply_rope"), "Tensor.chunk": (torch.Tensor, "chunk")})
    found["comfy_kitchen.apply_rope"] = (getattr(sys.modules.get("comfy.quant_ops"), "ck", None), "apply_rope")
    return found


NAMES = [
    *(f"{cls}.forward" for cls in ("DoubleStreamBlock", "SingleStreamBlock", "Modulation", "QKNorm", "LastLayer")),
    *(f"ops.{cls}.{name}" for cls in ("LayerNorm", "RMSNorm", "Linear") for name in ("forward", "forward_comfy_cast_weights")),
    *(f"nn.{cls}.forward" for cls in ("LayerNorm", "RMSNorm", "GELU", "Linear", "Sequential")),
    "attention", "apply_mod", "apply_rope", "Tensor.chunk", "comfy_kitchen.apply_rope",
]


@pytest.fixture
def replace(scene, monkeypatch):
    """A context in which the named place holds another pack's function."""

    @contextlib.contextmanager
    def replaced(name):
        owner, attribute = places(scene.core)[name]
        if owner is None or not hasattr(owner, attribute):
            pytest.skip(f"this core has no {name}")
        with monkeypatch.context() as patch:
            patch.setattr(owner, attribute, replacement(getattr(owner, attribute)))
            yield

    return replaced


@pytest.mark.parametrize("name", NAMES)
def test_what_was_replaced_before_our_call_keeps_its_effect(scene, replace, name):
    """B03, B09"""
    model = scene.load()
    plain, mine = scene.sample(model), scene.ours(model)
    assert_bits_equal(scene.sample(mine), plain)
    with replace(name):
        wanted = scene.sample(model)
        assert_bits_equal(scene.sample(mine), wanted)
        if not torch.equal(wanted, plain):
            told = scene.report(mine)
            assert told["reason"] or told["notes"] or name in ("attention", "ops.Linear.forward", "ops.Linear.forward_comfy_cast_weights"), told
    assert_bits_equal(scene.sample(mine), plain)
    assert scene.report(mine)["state"] == "fused" and scene.calls["residual_gate"] == 22


@pytest.mark.parametrize("name", NAMES)
def test_what_is_replaced_inside_our_call_keeps_its_effect(scene, replace, name):
    """B03, B09: a wrapper between us and the model, after we looked at the code."""
    model = scene.load()
    plain = scene.sample(model)
    def wrapper(executor, *args, **kwargs):
        with replace(name):
            return executor(*args, **kwargs)

    wanted = scene.sample(scene.wrapped(model, wrapper))
    assert_bits_equal(scene.sample(scene.wrapped(scene.ours(model), wrapper)), wanted)
    assert_bits_equal(scene.sample(scene.ours(model)), plain)
    assert scene.calls["residual_gate"] == 22


def test_every_place_makes_a_difference_somewhere(scene, replace):
    """So that the tests above prove something: nearly all of these change the picture, the others are ways that this core does not take."""
    model = scene.load()
    plain, without = scene.sample(model), []
    for name in NAMES:
        with contextlib.suppress(pytest.skip.Exception), replace(name):
            without += [name] if torch.equal(scene.sample(model), plain) else []
    assert len(without) <= 8, without
    assert not set(without) & {"DoubleStreamBlock.forward", "SingleStreamBlock.forward", "Modulation.forward", "QKNorm.forward", "LastLayer.forward", "apply_mod", "attention", "ops.LayerNorm.forward"}

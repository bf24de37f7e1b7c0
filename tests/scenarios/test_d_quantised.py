"""Kind D: layers that the file itself stores quantised, in each format that the core knows. They stay core's; everything around them is fused.

A file says which layer is which by a `comfy_quant` tensor beside the weight, by `_quantization_metadata` in its header, or, the oldest way
and the only one of 0.3.64, by a `scaled_fp8` tensor. A GPU without the format's matrix product (nvfp4 and mxfp8 before Blackwell) or a CPU
gets the weight dequantised by core.
"""
import json

import comfy_harness as harness
import pytest
import torch
from comfy_harness import assert_bits_equal
from flux_fast_path.fusion import high
from flux_fast_path.nodes.quality_tier import FluxQualityTier
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.comfyui

# How a test names it -> what the file says of the layer; beside "format" what a converter may choose to add.
FORMATS = {
    "float8_e4m3fn": {"format": "float8_e4m3fn"},
    "float8_e4m3fn-input_scale": {"format": "float8_e4m3fn"},
    "float8_e4m3fn-full_precision": {"format": "float8_e4m3fn", "full_precision_matrix_mult": True},
    "float8_e5m2": {"format": "float8_e5m2"},
    "nvfp4": {"format": "nvfp4"},
    "mxfp8": {"format": "mxfp8"},
    "int8_tensorwise": {"format": "int8_tensorwise"},
    "int8_tensorwise-convrot": {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 256},
    "convrot_w4a4": {"format": "convrot_w4a4", "convrot_groupsize": 256},
    "convrot_w4a4-int8": {"format": "convrot_w4a4", "convrot_groupsize": 256, "linear_dtype": "int8"},
    "scaled_fp8": {"format": "scaled_fp8"},
}
LORA = ("double_blocks.0.img_attn.qkv", "double_blocks.1.txt_mlp.0", "double_blocks.0.img_mod.lin", "single_blocks.0.linear1", "single_blocks.2.linear2")


def known_formats():
    """Format -> how core describes it; empty for a core that has scaled fp8 only."""
    try:
        from comfy.quant_ops import QUANT_ALGOS
    except ImportError:
        return {}
    return QUANT_ALGOS


def quantised(weight, name):
    """(tensors to store, by what follows "weight" in the key; what to say of the layer, or None for scaled fp8)."""
    said = FORMATS[name]
    if name == "scaled_fp8":
        scale = weight.float().abs().max() / 448
        return {"": (weight.float() / scale).to(torch.float8_e4m3fn), "scale_weight": scale}, None
    algorithm = known_formats().get(said["format"])
    if algorithm is None:
        pytest.skip(f"this core does not know {said['format']}")
    from comfy.quant_ops import QuantizedTensor
    options = {"scale": "recalculate", **{k: v for k, v in said.items() if k.startswith("convrot") or k == "linear_dtype"}}
    try:
        stored = QuantizedTensor.from_float(weight, algorithm["comfy_tensor_layout"], **options, **({"per_channel": True} if "convrot" in said else {}))
        stored.dequantize()
    except (NotImplementedError, RuntimeError) as error:  # kitchen's own errors are of these kinds
        pytest.skip(f"comfy_kitchen cannot make or read {name} on a CPU: {error}")
    return stored.state_dict(), said


def skip_what_core_does_not_run(scene, path):
    """A GPU's matrix product can refuse a format in a way that core does not catch (two float8_e5m2 operands on Hopper), and the file reader of
    dynamic VRAM does not know every number format (the scales of mxfp8)."""
    try:
        scene.sample(harness.load_flux(path), steps=1)
    except (RuntimeError, ValueError, KeyError, NotImplementedError) as error:
        pytest.skip(f"core itself does not run this file on this GPU: {type(error).__name__}: {error}")


@pytest.fixture
def store(scene):
    """`store(choose)` writes the tiny checkpoint with each Linear of the blocks in the format that `choose(layer, number)` names, or as it
    is for None; the whole of it for a name. Gives the path; what was chosen is in `store.layers`."""

    def write(choose, header=False):
        tensors, layers = load_file(scene.checkpoint), {}
        names = [n[: -len(".weight")] for n in tensors if "blocks" in n and n.endswith(".weight") and tensors[n].ndim == 2]
        write.layers = {layer: choose if isinstance(choose, str) else choose(layer, i) for i, layer in enumerate(names)}
        for layer, name in write.layers.items():
            if name is None:
                continue
            stored, said = quantised(tensors.pop(f"{layer}.weight"), name)
            for suffix, tensor in stored.items():
                tensors[f"{layer}.{suffix}" if suffix == "scale_weight" else f"{layer}.weight{suffix}"] = tensor.contiguous().clone()
            if name.endswith("input_scale"):
                tensors[f"{layer}.input_scale"] = torch.tensor(0.05)
            if said is None:
                tensors["scaled_fp8"] = torch.zeros(0, dtype=torch.float8_e4m3fn)
            elif header:
                layers[layer] = said
            else:
                tensors[f"{layer}.comfy_quant"] = torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8)
        path = str(scene.folder / "quantised.safetensors")
        save_file(tensors, path, {"_quantization_metadata": json.dumps({"layers": layers})} if header else None)
        if torch.cuda.is_available():
            skip_what_core_does_not_run(scene, path)
        return path

    return write


def assert_stored_as(model, layers):
    """Each layer's weight on the live model is of the format that the file gave it."""
    for layer, name in layers.items():
        weight = model.model.diffusion_model.get_submodule(layer).weight
        if not known_formats():
            assert weight.dtype == torch.float8_e4m3fn, (layer, weight.dtype)  # 0.3.64: one format for all Linears of a model
            continue
        said = name and FORMATS["float8_e4m3fn" if name == "scaled_fp8" else name]["format"]
        wanted = said and known_formats()[said]["comfy_tensor_layout"]
        assert getattr(weight, "_layout_cls", None) == wanted, (layer, name, type(weight))
        for option in set(FORMATS.get(name, ())) & {"convrot", "convrot_groupsize", "linear_dtype"}:
            assert getattr(weight._params, option) == FORMATS[name][option], (layer, name, option)


def bits(model):
    """Name -> (dtype, bytes) of the whole state dict."""
    state = {k: v.detach() for k, v in model.model.state_dict().items() if isinstance(v, torch.Tensor) and not v.is_meta}
    return {k: (v.dtype, v.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()) for k, v in state.items()}


def assert_same_and_kept(scene, model, layers, **kwargs):
    """`scene.same`, and the model's weights are afterwards what they were, in format and in bits."""
    assert_stored_as(model, layers)
    stored = bits(model)
    told = scene.same(model, **kwargs)
    assert_stored_as(model, layers)
    after = bits(model)
    assert after.keys() == stored.keys() and not (changed := [k for k in stored if stored[k] != after[k]]), f"changed: {changed}"
    return told


def fused(scene, model):
    """(how often each operation runs in two steps with our node, the report's notes); the first run tries memory orders and is not counted."""
    mine = scene.ours(model)
    scene.sample(mine)
    scene.sample(mine)
    return dict(scene.calls), scene.report(mine)["notes"]


def test_no_format_of_this_core_is_left_out(scene):
    """B17"""
    assert set(known_formats()) <= {said["format"] for said in FORMATS.values()}


@pytest.mark.parametrize("name", FORMATS)
def test_a_model_in_one_format_has_the_bits_of_core_and_loses_no_fused_operation(scene, store, name):
    """B17: gates, norms, q and k, GELU and concat read what quantised layers return, never their weights."""
    model = scene.load(path=store(name))
    told = assert_same_and_kept(scene, model, store.layers)
    assert told["dtype"] == "bfloat16" and told["blocks_mounted"] == 5 and not told["disabled"]
    if torch.cuda.is_available():
        assert all(op["state"] == "proven" for op in told["ops"] if op["op"] in ("residual_gate", "layer_norm_modulate", "gelu_concat")), told["ops"]
    assert fused(scene, model) == fused(scene, scene.load())


@pytest.mark.parametrize("name", FORMATS)
def test_a_batch_with_a_negative_prompt_has_the_bits_of_core(scene, store, name):
    """B17: formats that quantise activations do so over all rows of the batch at once."""
    scene.same(scene.load(path=store(name)), batch=2, cfg=2.0, negative=True, text_tokens=7, width=96)


MIXTURES = {
    "nvfp4, fp8 and plain in turn": lambda layer, i: ("nvfp4", "float8_e4m3fn", None)[i % 3],
    "nvfp4 with fp8 modulation": lambda layer, i: "float8_e4m3fn" if "mod" in layer else "nvfp4",
    "plain double blocks": lambda layer, i: None if "double" in layer else "float8_e4m3fn",
    "plain up-projections": lambda layer, i: None if layer.endswith(("mlp.0", "linear1")) else "mxfp8",
    "one block in each": lambda layer, i: {"double_blocks.0": "int8_tensorwise", "double_blocks.1": "nvfp4", "single_blocks.0": "float8_e5m2",
                                           "single_blocks.1": "convrot_w4a4"}.get(layer[: len("double_blocks.0")]),
}


@pytest.mark.parametrize("choose", MIXTURES.values(), ids=MIXTURES)
def test_formats_mixed_within_one_model_have_the_bits_of_core(scene, store, choose):
    """B17"""
    model = scene.load(path=store(choose))
    assert len(set(store.layers.values())) > 1
    assert_same_and_kept(scene, model, store.layers)


@pytest.mark.parametrize("name", ["float8_e4m3fn", "nvfp4"])
def test_a_file_that_names_its_formats_in_its_header_has_the_bits_of_one_that_names_them_beside_the_weights(scene, store, name):
    """B17"""
    beside = scene.load(path=store(name))
    wanted = scene.sample(beside)
    header = scene.load(path=store(name, header=True))
    assert_same_and_kept(scene, header, store.layers)
    assert_bits_equal(scene.sample(scene.ours(header)), wanted)


@pytest.mark.parametrize("weight_dtype", ["fp8_e4m3fn", "fp8_e4m3fn_fast", "fp8_e5m2"])
@pytest.mark.parametrize("name", ["float8_e4m3fn", "nvfp4", "scaled_fp8"])
def test_a_quantised_file_loaded_with_another_dtype_from_the_loader_s_menu_has_the_bits_of_core(scene, store, name, weight_dtype):
    """B17: the menu speaks of what is not quantised; 0.3.64 multiplies scaled fp8 as fp8 where it says fast."""
    told = scene.same(scene.load(weight_dtype, path=store(name)))
    assert told["dtype"] == "bfloat16"


# --- with a LoRA ---


@pytest.mark.parametrize("choose", [*FORMATS, MIXTURES["nvfp4, fp8 and plain in turn"]], ids=[*FORMATS, "mixed"])
def test_a_lora_on_quantised_layers_has_the_bits_of_core(scene, store, choose):
    """B17, B07: core dequantises, adds and quantises again, the classic patcher before the first step, dynamic VRAM after the first use of
    each weight. So a first run is compared with a first run, and later ones with later ones."""
    path = store(choose)
    untouched, plain, mine = (scene.load(path=path) for _ in range(3))
    without = scene.sample(untouched)
    assert set(LORA) <= set(store.layers)
    wanted = scene.sample(scene.lora(plain))
    assert not torch.equal(wanted, without), "the LoRA does nothing, so the test proves nothing"
    with_lora = scene.lora(mine)
    assert_bits_equal(scene.sample(scene.ours(with_lora)), wanted, "the first run after loading")
    assert scene.calls["residual_gate"] == 22
    scene.same(with_lora)
    assert_stored_as(with_lora, store.layers)


@pytest.mark.parametrize("name", ["float8_e4m3fn", "nvfp4", "int8_tensorwise", "scaled_fp8"])
def test_a_lora_that_is_taken_off_leaves_the_file_s_bits(scene, store, name):
    """B17, B07"""
    model = scene.load(path=store(name))
    stored, wanted = bits(model), scene.sample(model)
    scene.sample(scene.ours(scene.lora(model)))
    assert scene.calls["residual_gate"] == 22
    assert_bits_equal(scene.sample(scene.ours(model)), wanted)
    assert bits(model) == stored


# --- tier "high" ---


HIGH = [*FORMATS, *MIXTURES]


@pytest.mark.parametrize("name", HIGH)
def test_tier_high_leaves_quantised_layers_to_core_and_says_so(scene, store, name, monkeypatch):
    """B17: a CPU has no tier "high" at all, so there the question of the device is taken as answered, and the layers alone decide."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(high, "why_not_device", lambda device, dtype: None)
    model = scene.load(path=store(MIXTURES.get(name, name)))
    tier = FluxQualityTier().apply(scene.ours(model), "high", unique_id="8")[0]
    told = scene.same(model, ours=tier)
    assert told["tier"] == "high" and told["high"]["state"] == "stepped_aside" and told["high"]["sites"] == 0, told["high"]
    assert [r.split(":")[0] for r in told["high"]["reasons"]] == ["double blocks", "single blocks"]
    assert all("quantised" in reason for reason in told["high"]["reasons"]), told["high"]["reasons"]
    assert told["text"].count("high stepped aside") == 1


def test_tier_high_on_a_cpu_names_the_device_before_the_layers(scene, store):
    """B17"""
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    model = scene.load(path=store("float8_e4m3fn"))
    told = scene.same(model, ours=FluxQualityTier().apply(scene.ours(model), "high", unique_id="8")[0])
    assert told["high"]["state"] == "stepped_aside" and told["high"]["reasons"] == ["no NVIDIA GPU"]

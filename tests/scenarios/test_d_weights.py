"""Kind D: weights. Quantised and streamed weights stay core's business; what we read ourselves goes through core's pair."""
import comfy_harness as harness
import pytest
import torch
from comfy_harness import assert_bits_equal

pytestmark = pytest.mark.comfyui


# --- what core does to weights on their way ---


@pytest.fixture
def freed(scene, monkeypatch):
    """Every weight that core lent is overwritten when it is given back or when the next one is lent, as a streamed buffer would be; counts both."""
    import comfy.ops
    if not hasattr(comfy.ops, "uncast_bias_weight"):
        pytest.skip("this core has no cast/uncast pair: it streams nothing")
    counts, buffer = {"lent": 0, "given back": 0}, []
    cast, uncast = comfy.ops.cast_bias_weight, comfy.ops.uncast_bias_weight

    def lend(module, *args, **kwargs):
        overwrite(buffer)
        lent = cast(module, *args, **kwargs)
        if kwargs.get("offloadable"):
            counts["lent"] += 1
        # A copy each time: what core lends may be its own resident weight, which is not for us to overwrite.
        lent = tuple(t.clone() if isinstance(t, torch.Tensor) else t for t in lent)
        buffer[:] = lent[:2]
        return lent

    def give_back(module, weight, bias, stream):
        counts["given back"] += weight is not None or bias is not None  # FLUX's LayerNorms have neither
        uncast(module, weight, bias, stream)
        overwrite((weight, bias))

    def overwrite(tensors):
        for t in tensors:
            if isinstance(t, torch.Tensor):
                t.fill_(float("nan"))

    monkeypatch.setattr(comfy.ops, "cast_bias_weight", lend)
    monkeypatch.setattr(comfy.ops, "uncast_bias_weight", give_back)
    yield counts
    monkeypatch.undo()


def force_cast(model, names=("",)):
    """Weights go through core's pair whatever their dtype, as they do when they are streamed."""
    for name, module in model.model.diffusion_model.named_modules():
        if hasattr(module, "comfy_cast_weights") and any(n in name for n in names):
            module.comfy_cast_weights = True


def test_a_weight_is_used_only_while_it_is_lent(scene, freed):
    """B13"""
    model = scene.load()
    force_cast(model)
    told = scene.same(model)
    assert freed["lent"] == freed["given back"] > 0 and told["steps"] == 2
    assert torch.isfinite(scene.sample(scene.ours(model))).all()


def test_a_weight_is_given_back_when_a_step_fails(scene, freed):
    """B13, B11"""
    model = scene.load()
    force_cast(model)
    mine, calls = scene.ours(model).clone(), []

    def fail(args, extra):
        out = extra["original_block"](args)
        calls.append(1)
        if len(calls) == 2:
            raise scene.core.comfy.model_management.InterruptProcessingException
        return out

    mine.set_model_patch_replace(fail, "dit", "double_block", 1)
    with pytest.raises(scene.core.comfy.model_management.InterruptProcessingException):
        scene.sample(mine)
    assert freed["lent"] == freed["given back"] > 0


@pytest.mark.parametrize("target", ["query_norm", "key_norm", "qkv", "linear1", "img_mod.lin", "linear2"])
def test_weight_functions_act(scene, target):
    """B13, B07: core keeps LoRA on streamed weights as functions on the module."""
    plain, model = scene.sample(scene.load()), scene.load()
    touched = {name: m for name, m in model.model.diffusion_model.named_modules() if name.endswith(target) and hasattr(m, "weight_function")}
    if not touched:
        pytest.skip("this core's q/k norms are no module of comfy.ops")
    for name in touched:
        model.add_weight_wrapper(f"diffusion_model.{name}.weight", half_again)
    if "norm" in target:  # 0.29's dynamic VRAM has no wrapper for weights this small; what loading finds on a module it clears
        scene.sample(model)
        for module in touched.values():
            module.weight_function = [half_again]
    wanted = scene.sample(model)
    assert not torch.equal(wanted, plain)
    assert_bits_equal(scene.sample(scene.ours(model)), wanted)
    assert scene.calls["residual_gate"] == 22
    for module in touched.values():
        module.weight_function = []


def half_again(weight):
    return weight * 1.5


# --- quantised ---


@pytest.mark.parametrize("weight_dtype", ["fp8_e4m3fn", "fp8_e5m2", "fp8_e4m3fn_fast"])
def test_fp8_storage_with_half_width_compute(scene, weight_dtype):
    """B17"""
    model = scene.load(weight_dtype)
    stored = {k: v.dtype for k, v in model.model.state_dict().items()}
    assert str(model.model.get_dtype()).startswith("torch.float8")
    # Dynamic VRAM keeps the file's dtype on the host and casts on the way.
    assert scene.core.dynamic_vram or any(str(d).startswith("torch.float8") for d in stored.values())
    told = scene.same(model)
    assert told["dtype"] == "bfloat16" and {k: v.dtype for k, v in model.model.state_dict().items()} == stored


def test_fp8_with_a_lora_and_a_batch(scene):
    """B17, B07"""
    model = scene.lora(scene.load("fp8_e4m3fn"))
    if scene.core.dynamic_vram:
        # Core's own first step after loading computes with the LoRA's weight before it is rounded to fp8, every later one with it rounded.
        scene.sample(model, batch=2, cfg=2.0, negative=True)
    scene.same(model, batch=2, cfg=2.0, negative=True)


def test_the_first_run_after_loading_fp8_with_a_lora(scene):
    """B17, B07: dynamic VRAM rounds such weights only after their first use, so the first run has bits of its own, ours included."""
    plain, mine = (scene.lora(scene.load("fp8_e4m3fn")) for _ in range(2))
    wanted = scene.sample(plain)
    assert_bits_equal(scene.sample(scene.ours(mine)), wanted)
    assert scene.calls["residual_gate"] == 22


def test_mixed_layers_within_one_model(scene):
    """B17: some layers stored in fp8, norms in float32, the rest as they were."""
    model = scene.load_unwatched()
    force_cast(model)
    for i, (name, module) in enumerate(model.model.diffusion_model.named_modules()):
        weight = getattr(module, "weight", None)
        if isinstance(module, torch.nn.Linear) and "blocks" in name and i % 2:
            module.weight = torch.nn.Parameter(weight.to(torch.float8_e4m3fn), requires_grad=False)
        elif "query_norm" in name and weight is not None:
            module.weight = torch.nn.Parameter(weight.to(torch.float32), requires_grad=False)
    scene.same(scene.watch(model))


def test_a_file_of_scaled_fp8(scene):
    """B17: weights with a scale of their own; core's layers for it are no plain Linears."""
    from safetensors.torch import load_file, save_file
    tensors = load_file(scene.checkpoint)
    for name in [n for n in tensors if "blocks" in n and n.endswith(".weight") and tensors[n].ndim == 2]:
        scale = tensors[name].float().abs().max() / 448
        tensors[name] = (tensors[name].float() / scale).to(torch.float8_e4m3fn)
        tensors[name.replace(".weight", ".scale_weight")] = scale.reshape(())
    tensors["scaled_fp8"] = torch.zeros(2, dtype=torch.float8_e4m3fn)
    path = scene.folder / "scaled.safetensors"
    save_file(tensors, str(path))
    model = scene.load(path=str(path))
    linear = model.model.diffusion_model.double_blocks[0].img_attn.qkv
    assert type(linear).__qualname__ not in ("disable_weight_init.Linear", "manual_cast.Linear") or scene.core.version < (0, 4)
    scene.same(model)


def test_a_model_in_float32_steps_aside(scene, monkeypatch):
    """B17, DESIGN 5"""
    from flux_fast_path.fusion import session
    from flux_fast_path.kernels import build
    monkeypatch.setattr(session, "why_not_device", lambda device, dtype: build.unavailable(torch.device("cuda", 0), dtype))
    model = harness.load_flux(scene.checkpoint, compute_dtype=torch.float32)
    told = scene.same(scene.watch(model), fused=False)
    assert told["reason"] == "the model computes in float32, not in bfloat16 or float16"


def test_operands_on_two_devices_are_refused_by_every_operation(scene):
    """B29: part of the model elsewhere; every pointer's device is compared before a kernel is prepared."""
    from flux_fast_path.kernels.gelu_concat import gelu_concat
    from flux_fast_path.kernels.head_concat import head_concat
    from flux_fast_path.kernels.layer_norm_modulate import layer_norm_modulate
    from flux_fast_path.kernels.residual_gate import residual_gate
    here, there = (torch.zeros(1, 4, 128, dtype=torch.bfloat16, device=d) for d in ("cpu", "meta"))
    for reason in (residual_gate.why_not(here, there, here, True), residual_gate.why_not(here, here, there[:, :1], True), layer_norm_modulate.why_not(here, there[:, :1], here[:, :1], 1e-6, True),
                   layer_norm_modulate.why_not(here, here[:, :1], there[:, :1], 1e-6, True), gelu_concat.why_not(here, there), head_concat.why_not(here, there, 1)):
        assert reason and ("meta" in reason or "device" in reason)

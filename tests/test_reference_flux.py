"""The reference transformer is core's eager path: same bits where a ComfyUI checkout is at hand, and well-behaved without one."""
import comfy_harness as harness
import pytest
import torch
from comfy_harness import assert_bits_equal
from flux_fast_path.bench.reference_flux import SIZES, example_inputs, reference_flux
from flux_fast_path.bench.reference_patcher import APPLY_MODEL, OUTER_SAMPLE, reference_patcher

# Dtypes and sizes: even, and odd on both axes with a text length that is no multiple of anything.
SHAPES = [pytest.param(64, 64, 16, 1, id="img-16-txt-16"), pytest.param(72, 104, 33, 2, id="odd-latent-txt-33-batch-2"), pytest.param(40, 56, 7, 3, id="txt-7-batch-3")]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def run(model, inputs, **more):
    with torch.inference_mode():
        return model(**inputs, **more)


def test_same_seed_gives_the_same_bits():
    first, second = (reference_flux("tiny", seed=3) for _ in range(2))
    inputs = example_inputs(first, 64, 64, 16, 1, seed=4)
    assert_bits_equal(run(first, inputs), run(second, inputs))
    assert not torch.equal(run(first, inputs), run(reference_flux("tiny", seed=5), inputs))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("height, width, text_tokens, batch", SHAPES)
def test_output_has_the_latents_shape_and_is_finite(height, width, text_tokens, batch, dtype):
    model = reference_flux("tiny", dtype)
    inputs = example_inputs(model, height, width, text_tokens, batch)
    out = run(model, inputs)
    assert out.shape == inputs["x"].shape and out.dtype == dtype and torch.isfinite(out).all()


def test_inputs_are_not_written_to():
    model = reference_flux("tiny")
    inputs = example_inputs(model, 72, 104, 33, 2)
    before = {k: v.clone() for k, v in inputs.items()}
    run(model, inputs)
    for name, value in inputs.items():
        assert_bits_equal(value, before[name], name)


def test_in_place_and_out_of_place_residuals_give_the_same_bits():
    inputs = example_inputs(reference_flux("tiny"), 72, 104, 33, 2)
    assert_bits_equal(run(reference_flux("tiny"), inputs), run(reference_flux("tiny", out_of_place=True), inputs))


@pytest.mark.parametrize("out_of_place", [False, True], ids=["in-place", "out-of-place"])
def test_a_double_block_returns_cores_objects(out_of_place):
    model = reference_flux("tiny", torch.float32, out_of_place=out_of_place)
    img, txt, vec = torch.randn(1, 16, 256), torch.randn(1, 8, 256), torch.randn(1, 256)
    with torch.inference_mode():
        img_out, txt_out = model.double_blocks[0](img=img, txt=txt, vec=vec, pe=None)
        single_out = model.single_blocks[0](img, vec=vec, pe=None)
    assert (img_out is img) == (not out_of_place) and txt_out is txt and single_out is img


def test_rows_of_modulation_reach_their_tokens():
    model = reference_flux("tiny", torch.float32)
    inputs = example_inputs(model, 64, 64, 16, 2)
    all_real = run(model, inputs, modulation_dims=[(0, 16, 0)])
    some_zero = run(model, inputs, modulation_dims=[(0, 8, 0), (8, 16, 1)])
    torch.testing.assert_close(all_real, run(model, inputs), rtol=1e-3, atol=1e-3)
    assert torch.isfinite(some_zero).all() and not torch.equal(some_zero, all_real)


def test_an_attention_mask_changes_the_result():
    model = reference_flux("tiny")
    inputs = example_inputs(model, 64, 64, 16, 1)
    mask = torch.zeros(1, 32, 32, dtype=torch.bfloat16)
    assert_bits_equal(run(model, inputs, attention_mask=mask), run(model, inputs, attention_mask=mask[0]))
    mask[:, 16:, :16] = -1e4
    assert not torch.equal(run(model, inputs, attention_mask=mask), run(model, inputs))


def test_dev_has_flux1_devs_parameters():
    with torch.device("meta"):
        from flux_fast_path.bench.reference_flux import Flux
        model = Flux(dtype=torch.bfloat16, **SIZES["dev"])
    assert sum(p.numel() for p in model.parameters()) == 11_901_408_320
    assert len(model.double_blocks) == 19 and len(model.single_blocks) == 38


def test_the_patcher_samples_deterministically_and_runs_its_wrappers():
    calls = []

    def around_model(executor, *args, **kwargs):
        calls.append(("model", executor.class_obj))
        return executor(*args, **kwargs)

    def around_sampling(executor, *args, **kwargs):
        calls.append(("sampling", executor.class_obj.model_patcher))
        return executor(*args, **kwargs)

    plain = reference_patcher("tiny")
    wrapped = plain.clone()
    wrapped.add_wrapper_with_key(APPLY_MODEL, "test", around_model)
    wrapped.add_wrapper_with_key(OUTER_SAMPLE, "test", around_sampling)
    latent = torch.zeros(1, 16, 8, 8)
    before = harness.snapshot(plain)
    expected = plain.sample(latent, steps=2)
    assert calls == []
    assert_bits_equal(wrapped.sample(latent, steps=2), expected)
    assert calls == [("sampling", wrapped), ("model", plain.model), ("model", plain.model)]
    wrapped.remove_wrappers_with_key(APPLY_MODEL, "test")
    assert wrapped.get_wrappers(APPLY_MODEL, "test") == [] and len(wrapped.get_wrappers(OUTER_SAMPLE, "test")) == 1
    assert wrapped.get_model_object("diffusion_model.double_blocks.0") is plain.model.diffusion_model.double_blocks[0]
    harness.assert_untouched(plain, before)


def test_the_old_cores_patcher_samples_too():
    patcher = reference_patcher("tiny", old_core=True)
    assert not hasattr(patcher.model, "get_dtype_inference")
    assert torch.isfinite(patcher.sample(torch.zeros(2, 16, 8, 8), steps=1)).all()


def test_assert_untouched_sees_an_instance_forward():
    patcher = reference_patcher("tiny")
    before = harness.snapshot(patcher)
    block = patcher.model.diffusion_model.double_blocks[0]
    block.img_norm1.forward = lambda x: x
    block.img_mlp.stray = 1
    with pytest.raises(AssertionError, match="double_blocks.0.img_norm1 has an instance forward(.|\n)*img_mlp gained attribute stray"):
        harness.assert_untouched(patcher, before)


# ---- against core ----------------------------------------------------------------------------------------------------------------------

def core_twin(comfy, model):
    """Core's own Flux holding the reference model's weights."""
    import comfy.ldm.flux.model as core_flux
    params = {k: v for k, v in vars(model.params).items()}
    twin = core_flux.Flux(image_model="flux", dtype=model.dtype, device="cpu", operations=comfy.comfy.ops.disable_weight_init, **params)
    missing = twin.load_state_dict(model.state_dict(), strict=True)
    assert not missing.missing_keys and not missing.unexpected_keys
    return twin.requires_grad_(False).train(False)


def form_of(comfy):
    """The reference options that stand for this core."""
    return dict(old_core=True) if comfy.version < (0, 4) else {}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("height, width, text_tokens, batch", SHAPES)
def test_the_transformer_gives_cores_bits(comfy, height, width, text_tokens, batch, dtype):
    model = reference_flux("tiny", dtype, seed=11, **form_of(comfy))
    inputs = example_inputs(model, height, width, text_tokens, batch, seed=12)
    assert_bits_equal(run(model, inputs), run(core_twin(comfy, model), inputs))


def test_without_guidance_it_gives_cores_bits(comfy):
    model = reference_flux("tiny", seed=11, guidance_embed=False, **form_of(comfy))
    inputs = example_inputs(model, 64, 64, 16, 1)
    assert_bits_equal(run(model, inputs), run(core_twin(comfy, model), inputs))


def test_with_a_mask_and_a_controlnet_it_gives_cores_bits(comfy):
    model = reference_flux("tiny", seed=11, **form_of(comfy))
    inputs = example_inputs(model, 64, 64, 16, 1)
    residual = torch.randn(1, 16, 256, dtype=torch.bfloat16)
    control = {"input": [residual, None], "output": [None, residual[:, :9]]}
    mask = torch.zeros(1, 32, 32, dtype=torch.bfloat16)
    mask[:, :, 3:9] = -1e4
    assert_bits_equal(run(model, inputs, control=control, attention_mask=mask), run(core_twin(comfy, model), inputs, control=control, attention_mask=mask))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_blocks_with_modulation_dims_give_cores_bits(comfy, dtype):
    if comfy.version < (0, 4):
        pytest.skip("0.3.64's apply_mod picks a modulation row without keeping its axis; the reference keeps it, as every later core does")
    model = reference_flux("tiny", dtype, seed=11)
    twin = core_twin(comfy, model)
    generator = torch.Generator().manual_seed(0)
    img, txt, vec = (torch.randn(2, n, 256, generator=generator).to(dtype) for n in (16, 9, 2))
    pe = model.pe_embedder(torch.arange(25).view(1, 25, 1).expand(2, 25, 3).float())
    double = dict(vec=vec, pe=pe, modulation_dims_img=[(0, 5, 0), (5, 16, 1)], modulation_dims_txt=[(0, None, 0)])
    single = dict(vec=vec, pe=pe, modulation_dims=[(0, 9, 0), (9, 14, 0), (14, 25, 1)])
    outputs = []
    with torch.inference_mode():
        for m in (model, twin):
            i, t = m.double_blocks[0](img=img.clone(), txt=txt.clone(), **double)
            outputs.append((i, t, m.single_blocks[0](torch.cat((t, i), 1), **single)))
    for what, ours, cores in zip(("img", "txt", "single"), *outputs):
        assert_bits_equal(ours, cores, what)


def test_module_names_and_classes_are_cores(comfy):
    model = reference_flux("tiny", **form_of(comfy))
    names = {n: type(m).__name__ for n, m in model.named_modules()}
    assert names == {n: type(m).__name__ for n, m in core_twin(comfy, model).named_modules()}


def test_the_reference_model_has_what_cores_has(comfy):
    core_model = comfy.comfy.model_base.BaseModel
    patcher = reference_patcher("tiny", **form_of(comfy))
    for name in ("apply_model", "_apply_model", "get_dtype", "get_dtype_inference"):
        assert hasattr(patcher.model, name) == hasattr(core_model, name), name
    core_patcher = comfy.comfy.model_patcher.ModelPatcher
    for name in ("clone", "add_wrapper_with_key", "remove_wrappers_with_key", "get_wrappers", "set_attachments", "get_attachment", "get_model_object", "model_dtype"):
        assert hasattr(patcher, name) and hasattr(core_patcher, name), name


def test_block_attributes_are_cores(comfy):
    model = reference_flux("tiny", **form_of(comfy))
    twin = core_twin(comfy, model)
    for path in ("double_blocks.0", "single_blocks.0", "double_blocks.0.img_mod", "single_blocks.0.modulation", "double_blocks.0.img_attn"):
        ours, cores = model.get_submodule(path), twin.get_submodule(path)
        plain = {k: v for k, v in vars(cores).items() if not k.startswith("_") and k != "training"}
        assert {k: getattr(ours, k, "absent") for k in plain} == plain, path
    assert set(vars(model.params)) == set(vars(twin.params))

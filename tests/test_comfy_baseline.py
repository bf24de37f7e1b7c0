"""Real ComfyUI without any node of ours: what every comparison in the other suites leans on."""
import comfy_harness as harness
import pytest
import torch
from comfy_harness import assert_bits_equal, load_flux, load_lora, sample

pytestmark = pytest.mark.comfyui


def test_the_stock_loader_recognises_flux1_in_the_tiny_file(comfy, tiny_flux):
    import comfy.ldm.flux.model
    import comfy.model_base
    transformer = tiny_flux.model.diffusion_model
    assert type(tiny_flux.model) is comfy.model_base.Flux and type(transformer) is comfy.ldm.flux.model.Flux
    assert (transformer.hidden_size, transformer.num_heads, len(transformer.double_blocks), len(transformer.single_blocks)) == (256, 2, 2, 3)
    assert transformer.params.guidance_embed


def test_schnell_is_recognised_by_its_missing_guidance(comfy, tmp_path):
    model = load_flux(harness.write_tiny_flux_checkpoint(tmp_path / "tiny_schnell.safetensors", seed=4, depth=1, single=1, guidance=False))
    assert not model.model.diffusion_model.params.guidance_embed
    assert torch.isfinite(sample(model, steps=1)).all()


def test_two_runs_give_the_same_bits(comfy, tiny_flux, tiny_checkpoint):
    first = sample(tiny_flux, seed=5)
    assert first.shape == (1, 16, 8, 8) and torch.isfinite(first).all() and first.std() > 0
    assert_bits_equal(sample(tiny_flux, seed=5), first, "second run of one model")
    assert_bits_equal(sample(load_flux(tiny_checkpoint), seed=5), first, "a model loaded anew")
    assert not torch.equal(sample(tiny_flux, seed=6), first)


@pytest.mark.parametrize("case", [
    pytest.param(dict(batch=2), id="batch-2"),
    pytest.param(dict(batch=3, width=72, height=104, text_tokens=33), id="batch-3-odd"),
    pytest.param(dict(cfg=2.5, negative=True), id="cfg-with-negative"),
    pytest.param(dict(cfg=2.5, negative=True, batch=2, text_tokens=7), id="cfg-batch-2"),
    pytest.param(dict(guidance=1.0, sampler_name="dpmpp_2m", scheduler="normal"), id="dpmpp"),
])
def test_every_kind_of_run_is_deterministic(comfy, tiny_flux, case):
    first = sample(tiny_flux, seed=5, steps=2, **case)
    assert torch.isfinite(first).all()
    assert_bits_equal(sample(tiny_flux, seed=5, steps=2, **case), first)


def test_a_latent_and_extra_conditioning_reach_the_model(comfy, tiny_flux):
    plain = sample(tiny_flux, steps=2)
    latent = torch.randn(1, 16, 8, 8, generator=torch.Generator().manual_seed(1))
    assert not torch.equal(sample(tiny_flux, steps=2, latent=latent, denoise=0.5), plain)
    assert not torch.equal(sample(tiny_flux, steps=2, extra={"reference_latents": [latent]}), plain)


def test_a_lora_changes_the_result_and_is_gone_without_it(comfy, tiny_flux, tiny_lora, caplog):
    plain = sample(tiny_flux, steps=2)
    with_lora = load_lora(tiny_flux, tiny_lora, 1.0)
    changed = sample(with_lora, steps=2)
    assert torch.isfinite(changed).all() and not torch.equal(changed, plain)
    assert not torch.equal(sample(load_lora(tiny_flux, tiny_lora, 0.5), steps=2), changed)
    assert_bits_equal(sample(with_lora, steps=2), changed, "LoRA again")
    assert_bits_equal(sample(tiny_flux, steps=2), plain, "without the LoRA again")
    assert load_lora(tiny_flux, tiny_lora, 0.0) is tiny_flux
    assert "not loaded" not in caplog.text


def test_a_plain_run_leaves_nothing_behind(comfy, tiny_flux, tiny_lora):
    everything = harness.comfy_globals_snapshot()
    before = harness.snapshot(tiny_flux)
    sample(tiny_flux, steps=1)
    harness.assert_untouched(tiny_flux, before)
    sample(load_lora(tiny_flux, tiny_lora), steps=1)
    harness.assert_untouched(tiny_flux, before)
    harness.assert_globals_unchanged(everything)


def test_a_cpu_computes_in_bfloat16_when_asked(comfy, tiny_checkpoint):
    model, seen = load_flux(tiny_checkpoint, compute_dtype=torch.bfloat16), set()

    def look(executor, *args, **kwargs):
        block = executor.class_obj.diffusion_model.double_blocks[0]
        handle = block.img_attn.qkv.register_forward_hook(lambda module, inputs, output: seen.add((inputs[0].dtype, output.dtype)))
        try:
            return executor(*args, **kwargs)
        finally:
            handle.remove()

    model.add_wrapper_with_key("apply_model", "look", look)
    first = sample(model, steps=2)
    assert seen == {(torch.bfloat16, torch.bfloat16)}
    assert_bits_equal(sample(model, steps=2), first)


def test_fp8_storage_runs(comfy, tiny_checkpoint):
    model = load_flux(tiny_checkpoint, "fp8_e4m3fn")
    if not comfy.dynamic_vram:   # dynamic VRAM leaves the file's dtype in place and casts when a weight is asked for
        assert model.model.diffusion_model.double_blocks[0].img_attn.qkv.weight.dtype == torch.float8_e4m3fn
    assert_bits_equal(sample(model, steps=1), sample(model, steps=1))

"""Kind C: what the kernels are given: batches, shapes that change within a session, masks, modulation per token range, object identity."""
from collections import Counter

import comfy_harness as harness
import pytest
import torch

pytestmark = pytest.mark.comfyui


@pytest.mark.parametrize("batch, guidance", [(1, {}), (2, {}), (3, {}), (8, {}), (1, dict(cfg=2.5, negative=True)), (2, dict(cfg=2.5, negative=True)), (4, dict(cfg=2.5, negative=True))], ids=str)
def test_each_batch_size_equals_its_own_baseline(scene, batch, guidance):
    """B15, S2"""
    told = scene.same(scene.load(), batch=batch, width=40, height=56, text_tokens=7, **guidance)
    assert told["steps"] in (2, 4)  # core may run cond and uncond in one call or in two


def test_cond_and_uncond_that_do_not_fit_together_run_apart(scene, monkeypatch):
    """B15: core splits the batch when memory is tight."""
    model = scene.load()
    assert scene.same(model, cfg=2.5, negative=True)["steps"] == 2
    with monkeypatch.context() as tight:
        tight.setattr(scene.core.comfy.model_management, "get_free_memory", lambda dev=None, torch_free_too=False: (1, 1) if torch_free_too else 1)
        if hasattr(model, "get_free_memory"):  # what newer cores ask: it counts weights that could leave the card
            tight.setattr(type(model), "get_free_memory", lambda self, device: 1)
        assert scene.same(model, cfg=2.5, negative=True)["steps"] == 4


def test_prompts_of_different_length_run_apart(scene):
    """B15, B21: core pads or splits; either way each call has its own shapes."""
    import comfy.samplers  # noqa: F401
    model = scene.load()
    scene.same(model, cfg=2.5, negative=True, extra={"pooled_output": torch.ones(1, 32)})


SIZES = [dict(width=64, height=64), dict(width=104, height=72), dict(width=64, height=64, text_tokens=77), dict(width=40, height=200, text_tokens=5), dict(width=24, height=8, text_tokens=1), dict(batch=2), dict(width=128, height=128, text_tokens=33), dict(width=64, height=64)]


def test_shapes_change_within_one_session(scene):
    """B21: sizes, long prompts, Redux's extra tokens, odd token counts, and the first size again."""
    model = scene.load()
    mine = scene.ours(model)
    first = None
    for case in SIZES:
        wanted = scene.sample(model, **case)
        got = scene.sample(mine, **case)
        harness.assert_bits_equal(got, wanted, str(case))
        assert scene.calls["residual_gate"] == 22
        first = got if first is None else first
    harness.assert_bits_equal(got, first, "the first size again")


def test_odd_latents_are_padded_by_core(scene):
    """B21"""
    model = scene.load()
    for shape in ((1, 16, 7, 9), (2, 16, 5, 5), (1, 16, 1, 3)):
        latent = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        scene.same(model, latent=latent, denoise=0.7)


# --- Kontext, Fill, Redux ---


def outcome(scene, model, **kwargs):
    """The latent, or what core raises: index_timestep_zero is FLUX.2's and fails in the blocks of FLUX.1, with and without us."""
    try:
        return scene.sample(model, **kwargs)
    except RuntimeError as error:
        return str(error).splitlines()[0]


@pytest.mark.parametrize("method", [None, "offset", "index", "uxo", "index_timestep_zero"])
@pytest.mark.parametrize("latents, batch", [(1, 1), (2, 1), (1, 2)])
def test_kontext_reference_latents_with_each_method(scene, method, latents, batch):
    """B21, S3: with index_timestep_zero the modulation differs per token range and core writes slice by slice."""
    generator = torch.Generator().manual_seed(4)
    extra = {"reference_latents": [torch.randn(1, 16, 8 - 2 * i, 6 + 2 * i, generator=generator) for i in range(latents)], **({"reference_latents_method": method} if method else {})}
    model = scene.load()
    plain, wanted, mine = scene.sample(model, batch=batch), outcome(scene, model, batch=batch, extra=extra), scene.ours(model)
    got = outcome(scene, mine, batch=batch, extra=extra)
    told = scene.report(mine)
    if isinstance(wanted, str):
        assert got == wanted and method == "index_timestep_zero" and told["outcome"] == "error"
        harness.assert_untouched(model)
        harness.assert_bits_equal(scene.sample(mine, batch=batch), plain, "the next prompt")
        return
    harness.assert_bits_equal(got, wanted)
    assert told["state"] == "fused" and told["steps"] == 2 and scene.calls["residual_gate"] == 22 and not torch.equal(wanted, plain)


@pytest.mark.parametrize("batch", [1, 2])
def test_modulation_that_differs_per_token_range(scene, batch):
    """S3: as HunyuanVideo and FLUX.2 call these very blocks; straight through the block, since FLUX.1's own loop cannot."""
    from flux_fast_path.fusion import session
    model = scene.load()
    transformer = model.model.diffusion_model
    dtype, device = transformer.double_blocks[0].img_attn.qkv.weight.dtype, scene.core.device
    if torch.cuda.is_available():
        with torch.inference_mode():  # as core loads: outside, the weights would be tensors that inference cannot view
            scene.core.comfy.model_management.load_models_gpu([model], force_full_load=True)

    def run():
        g = torch.Generator().manual_seed(5)
        img, txt, vec = (torch.randn(*s, generator=g).to(device, dtype) for s in ((batch, 9, 256), (batch, 4, 256), (batch, 2, 256)))
        with torch.inference_mode():
            img, txt = transformer.double_blocks[0](img=img, txt=txt, vec=vec, pe=None, modulation_dims_img=[(0, 5, 0), (5, 9, 1)], modulation_dims_txt=[(0, None, 0)])
            x = torch.cat((txt, img), 1)
            x = transformer.single_blocks[0](x, vec=vec, pe=None, modulation_dims=[(0, 4, 0), (4, 9, 0), (9, 13, 1)])
            return transformer.final_layer(x, vec, modulation_dims=[(0, 9, 0), (9, 13, 1)])

    if scene.core.version < (0, 4):
        pytest.skip("this core's apply_mod takes one row for the whole batch")
    wanted = run()
    with session.mounted(session.plan_for(transformer)):
        harness.assert_bits_equal(run(), wanted)


def test_reference_latents_come_and_go_in_one_session(scene):
    """B21: Kontext's token count changes between prompts of one loaded model."""
    model = scene.load()
    mine = scene.ours(model)
    reference = {"reference_latents": [torch.randn(1, 16, 8, 8, generator=torch.Generator().manual_seed(4))]}
    for extra in ({}, reference, {}, {**reference, "reference_latents_method": "index"}, reference, {}):
        harness.assert_bits_equal(scene.sample(mine, extra=extra), scene.sample(model, extra=extra), str(list(extra)))


def test_fills_extra_channels_do_not_matter(scene):
    """Fill feeds more input channels; blocks see the same width."""
    from flux_fast_path.bench.reference_flux import reference_flux
    from safetensors.torch import save_file
    fill = reference_flux("tiny", torch.bfloat16, seed=11, in_channels=96)
    path = scene.folder / "fill.safetensors"
    save_file({k.replace("_norm.weight", "_norm.scale"): v.contiguous() for k, v in fill.state_dict().items()}, str(path))
    model = scene.load(path=str(path))
    assert model.model.diffusion_model.img_in.in_features == 384
    generator = torch.Generator().manual_seed(2)
    scene.same(model, extra={"concat_latent_image": torch.randn(1, 16, 8, 8, generator=generator), "concat_mask": torch.ones(1, 1, 64, 64)})


@pytest.mark.parametrize("shape", [(1, 32, 32), (32, 32)], ids=str)
def test_an_attention_mask_changes_the_result_as_it_does_without_us(scene, shape):
    """B15"""
    mask = torch.zeros(32, 32)
    mask[16:, :9] = -1e4
    model, seen = scene.load().clone(), []

    def add_mask(executor, *args, **kwargs):
        seen.append(1)
        return executor(*args, **kwargs, attention_mask=mask.view(shape).to(scene.core.device, torch.bfloat16))

    plain = scene.sample(model)
    model.add_wrapper_with_key("apply_model", "mask", add_mask)
    scene.same(model)
    assert not torch.equal(scene.sample(model), plain) and seen


def test_inpainting_with_a_noise_mask(scene):
    """B15: core's own latent mask, around the model."""
    model, generator = scene.load(), torch.Generator().manual_seed(2)
    latent = {"samples": torch.randn(1, 16, 8, 8, generator=generator), "noise_mask": torch.ones(1, 64, 64).triu()}
    results = []
    for m in (model, scene.ours(model)):
        with torch.inference_mode():
            cond = harness.conditioning(1)
            results.append(scene.core.nodes.common_ksampler(m, 3, 2, 1.0, "euler", "simple", cond, cond, latent, denoise=0.8)[0]["samples"])
    harness.assert_bits_equal(*results)


@pytest.mark.parametrize("sampler", ["euler_ancestral", "dpmpp_2m", "heun", "uni_pc"])
def test_every_sampler_gives_its_own_image(scene, sampler):
    """B23: second-order samplers call the model more than once a step."""
    told = scene.same(scene.load(), sampler_name=sampler, steps=3)
    assert told["steps"] >= 3


# --- facts about core that all this leans on ---


def test_blocks_write_into_what_they_are_given_where_core_does(scene):
    """S1: object identity in and out, and the identity that a caller sees, are core's."""
    model = scene.load()

    def look(log):
        def add(model):
            model = model.clone()

            def replace(args, extra):
                before = {k: args[k] for k in ("img", "txt") if k in args}
                copies = {k: v.clone() for k, v in before.items()}
                out = extra["original_block"](args)
                log.append({k: (out[k] is before[k], torch.equal(before[k], copies[k]), out[k].is_contiguous(), out[k].stride()) for k in before})
                return out

            for kind, index in (("double_block", 0), ("double_block", 1), ("single_block", 1)):
                model.set_model_patch_replace(replace, "dit", kind, index)
            return model
        return add

    plain, fused = [], []
    scene.sample(look(plain)(model))
    scene.sample(look(fused)(scene.ours(model)))
    assert plain == fused and len(plain) == 6 and scene.calls
    newer = scene.core.version >= (0, 4)
    assert plain[0]["img"][0] is newer and plain[0]["txt"][0] and plain[2]["img"][0]


def test_a_gate_is_a_strided_chunk_when_the_batch_is_above_one(scene):
    """S2: a contiguity check passes in every batch-1 test and fails later."""
    model = scene.load()
    block = model.model.diffusion_model.double_blocks[0].cpu()
    with torch.inference_mode():
        for batch in (1, 2):
            gate = block.img_mod(torch.randn(batch, 256, dtype=block.img_mod.lin.weight.dtype))[0].gate
            assert gate.shape == (batch, 1, 256) and gate.storage_offset() > 0 and (gate.is_contiguous() or batch > 1)
    assert gate.stride(0) == 6 * 256 and not gate.is_contiguous()


def test_every_site_of_the_model_is_fused_in_every_step(scene):
    """B23, B01: counts, by operation."""
    model = scene.load()
    told = scene.same(model, steps=3)
    scene.sample(scene.ours(model), steps=3)
    wanted = Counter(residual_gate=33, layer_norm_modulate=36, gelu_concat=9)
    if scene.core.version >= (0, 4):
        wanted["head_concat"] = 6
    assert {k: scene.calls[k] for k in wanted} == dict(wanted) and (scene.calls["qk_norm_rope"] >= 15) == (scene.core.version >= (0, 4))
    assert told["blocks"] == {"double": 2, "single": 3} and told["model"] == "Flux" and told["dtype"] == "bfloat16" and told["core"] == ".".join(map(str, scene.core.version))

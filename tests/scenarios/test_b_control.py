"""Kind B: ControlNet residuals are added by core, into the very image tokens that we returned (B25)."""
import comfy_harness as harness
import pytest
import torch

pytestmark = pytest.mark.comfyui


def control_net(seed, strength=1.0, percent=(0.0, 1.0), doubles=2, singles=3, tokens=16, previous=None):
    """core's ControlBase with random residuals: as many as the model has blocks, or fewer, or for part of the image."""
    import comfy.controlnet

    class Residuals(comfy.controlnet.ControlBase):
        def __init__(self):
            super().__init__()
            self.log = []

        def get_control(self, x_noisy, t, cond, batched_number, transformer_options):
            before = self.previous_controlnet.get_control(x_noisy, t, cond, batched_number, transformer_options) if self.previous_controlnet is not None else None
            first, last = self.timestep_range
            self.log.append(bool(last <= t[0] <= first))
            if not self.log[-1]:
                return before
            generator = torch.Generator().manual_seed(seed)

            def some(count):
                return [(torch.randn(x_noisy.shape[0], tokens, 256, generator=generator) * 0.3 * strength).to(x_noisy.device, torch.bfloat16) if i != 1 else None for i in range(count)]

            mine = {"input": some(doubles), "output": some(singles)}
            for kind, values in (before or {}).items():
                padded = mine[kind] + [None] * (len(values) - len(mine[kind]))
                mine[kind] = [a if b is None else b if a is None else a + b for a, b in zip(padded, list(values) + [None] * (len(padded) - len(values)))]
            return mine

        def inference_memory_requirements(self, dtype):
            return 0

    net = Residuals()
    net.timestep_percent_range = percent
    return net.set_previous_controlnet(previous)


def with_control(net, uncond=True):
    return {"control": net, "control_apply_to_uncond": uncond}


@pytest.mark.parametrize("case", [
    pytest.param(dict(), id="every block"), pytest.param(dict(strength=0.0), id="strength 0"), pytest.param(dict(strength=0.6), id="strength 0.6"), pytest.param(dict(doubles=1, singles=0), id="first block only"),
    pytest.param(dict(doubles=0, singles=2), id="single blocks only"), pytest.param(dict(tokens=5), id="part of the image"),
])
def test_residuals_are_added_where_core_adds_them(scene, case):
    """B25, S4"""
    model, net = scene.load(), control_net(5, **case)
    plain = scene.sample(model)
    scene.same(model, extra=with_control(net))
    assert all(net.log) and len(net.log) == 6
    assert torch.equal(scene.sample(model, extra=with_control(net)), plain) == (case.get("strength") == 0.0)


@pytest.mark.parametrize("percent", [(0.0, 0.5), (0.4, 1.0), (0.3, 0.6)], ids=["stops", "starts", "starts and stops"])
def test_control_that_comes_and_goes_in_mid_run(scene, percent):
    """B25"""
    model, net = scene.load(), control_net(6, percent=percent)
    scene.same(model, steps=5, extra=with_control(net))
    assert net.log[:5] == net.log[5:10] == net.log[10:] and {True, False} == set(net.log)


def test_two_stacked_nets(scene):
    """B25"""
    net = control_net(7, previous=control_net(8, strength=0.5, percent=(0.0, 0.5), doubles=1))
    scene.same(scene.load(), steps=4, extra=with_control(net))


@pytest.mark.parametrize("uncond", [True, False])
def test_control_with_guidance_and_a_batch(scene, uncond):
    """B25, B15"""
    scene.same(scene.load(), cfg=2.5, negative=True, batch=2, extra=with_control(control_net(9), uncond))


def test_control_together_with_block_replacement(scene):
    """B25: residuals go into what the replacement returned, be it a new tensor."""
    model = scene.load().clone()

    def replace(args, extra):
        out = extra["original_block"](args)
        return {**out, "img": out["img"].clone()}

    model.set_model_patch_replace(replace, "dit", "double_block", 0)
    model.set_model_patch_replace(replace, "dit", "single_block", 1)
    scene.same(model, extra=with_control(control_net(10)))


def test_cores_own_flux_control_net(scene):
    """B25: a ControlNet is built of FLUX's blocks too (S5); it runs as core runs it while the model is fused."""
    import comfy.controlnet
    import comfy.ldm.flux.controlnet
    import comfy.ops
    params = dict(in_channels=16, vec_in_dim=32, context_in_dim=64, hidden_size=256, mlp_ratio=4.0, num_heads=2, depth=2, depth_single_blocks=1, axes_dim=[16, 56, 56], theta=10000, patch_size=2, qkv_bias=True, guidance_embed=True)
    if scene.core.version >= (0, 4):
        params.update(out_channels=16, txt_ids_dims=[])
    else:
        params.update(out_channels=16)
    net = comfy.ldm.flux.controlnet.ControlNetFlux(latent_input=True, num_union_modes=0, control_latent_channels=16, dtype=torch.bfloat16, device=scene.core.device, operations=comfy.ops.manual_cast, **params)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.03)
    control = comfy.controlnet.ControlNet(net, compression_ratio=1, latent_format=None, load_device=scene.core.device, manual_cast_dtype=torch.bfloat16, extra_conds=["y", "guidance"])
    control.set_cond_hint(torch.randn(1, 16, 8, 8, generator=generator), 0.7, (0.0, 0.6))
    scene.models_of_the_net = harness.snapshot(net)
    model = scene.load()
    plain = scene.sample(model, steps=3)
    scene.same(model, steps=3, extra=with_control(control))
    assert not torch.equal(scene.sample(model, steps=3, extra=with_control(control)), plain)
    harness.assert_untouched(net, scene.models_of_the_net)
    del scene.models_of_the_net

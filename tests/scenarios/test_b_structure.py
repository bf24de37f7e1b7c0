"""Kind B: assumed structure. A core that changed, a model that only resembles FLUX.1, a module that somebody replaced."""
import dataclasses
import functools
import importlib.util
import inspect
import sys

import comfy_harness as harness
import pytest
import torch
from flux_fast_path.nodes.fast_path import FluxFastPath

pytestmark = pytest.mark.comfyui


def changed_core(scene, *edits):
    """core's layers.py with some text replaced, as a module of its own whose source can be read."""
    from comfy.ldm.flux import layers
    source = inspect.getsource(layers)
    for old, new in edits:
        assert old in source, f"this core has no {old!r}"
        source = source.replace(old, new)
    source = source.replace("from .math", "from comfy.ldm.flux.math")
    path = scene.folder / "changed_layers.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("changed_layers", path)
    module = sys.modules["changed_layers"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def with_classes_of(model, layers):
    for m in model.model.diffusion_model.modules():
        other = getattr(layers, type(m).__name__, None)
        if type(m).__module__.endswith("flux.layers") and other is not None:
            m.__class__ = other
    return model


CHANGES = {
    "an extra keyword": [("modulation_dims_img=None, modulation_dims_txt=None", "modulation_dims_img=None, modulation_dims_txt=None, extra=None")],
    "another residual in single blocks": [("x += apply_mod(output, mod.gate, None, modulation_dims)", "x = x + 0.5 * apply_mod(output, mod.gate, None, modulation_dims)")],
    "the norm is used after a write": [("txt_modulated = self.txt_norm1(txt)\n", "txt_modulated = self.txt_norm1(txt)\n        txt = txt.mul_(1.25)\n")],
    "another modulation": [("self.lin(nn.functional.silu(vec))", "self.lin(nn.functional.gelu(vec))")],
    "another apply_mod": [("return tensor * m_mult", "return m_mult * tensor")],
    "another q/k norm": [("q = self.query_norm(q)", "q = self.query_norm(q) * 1.5")],
    "the last layer writes": [("x = apply_mod(self.norm_final(x), (1 + scale), shift, modulation_dims)", "h = self.norm_final(x); x.mul_(3.0); x = apply_mod(h, (1 + scale), shift, modulation_dims)")],
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_core_with_other_block_code_runs_as_it_is(scene, change):
    """B03"""
    model = with_classes_of(scene.load_unwatched(), changed_core(scene, *CHANGES[change]))
    wanted = scene.sample(model)
    late = scene.ours(scene.load())  # applied before the classes changed: asked again at each call
    with_classes_of(late, sys.modules["changed_layers"])
    try:
        harness.assert_bits_equal(scene.sample(late), wanted)
        told = scene.report(late)
        assert told["state"] == "stepped_aside" and "core version not recognised" in told["reason"] and "core version not recognised" in told["text"] and not scene.calls
    finally:
        from comfy.ldm.flux import layers
        for m in late.model.diffusion_model.modules():
            if type(m).__module__ == "changed_layers":
                m.__class__ = getattr(layers, type(m).__name__)


def test_this_cores_own_code_is_recognised_after_a_copy(scene):
    """B03: the same text elsewhere is the same code."""
    model = with_classes_of(scene.load_unwatched(), changed_core(scene))
    wanted = scene.sample(model)
    harness.assert_bits_equal(scene.sample(scene.ours(model)), wanted)
    assert scene.calls["residual_gate"] == 22


@pytest.mark.parametrize("cls", ["DoubleStreamBlock", "SingleStreamBlock", "Modulation", "QKNorm"])
def test_a_class_wrapped_by_another_pack_runs_as_it_is(scene, cls, monkeypatch):
    """B03"""
    from comfy.ldm.flux import layers
    model, owner = scene.load(), getattr(layers, cls)
    mine, original = scene.ours(model), owner.forward

    @functools.wraps(original)
    def forward(*args, **kwargs):
        return original(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(owner, "forward", forward)
        scene.same(model, mine, fused=False)
    scene.same(model, mine)


def test_an_extra_argument_to_the_model_call_is_passed_on(scene):
    """B03: core extends what it passes to apply_model; a wrapper must not care."""
    model, seen = scene.load(), []

    def add(executor, *args, **kwargs):
        return executor(*args, **kwargs, brand_new_argument=torch.ones(1))

    def look(executor, *args, **kwargs):
        seen.append("brand_new_argument" in kwargs)
        return executor(*args, **kwargs)

    model.add_wrapper_with_key("apply_model", "add", add)
    mine = scene.ours(model)
    mine.add_wrapper_with_key("apply_model", "look", look)
    scene.same(model, mine)
    assert seen == [True] * 2


def family(name):
    import comfy.ldm.chroma.model
    import comfy.ldm.flux.model
    import comfy.ldm.hunyuan_video.model
    import comfy.ldm.modules.diffusionmodules.openaimodel as unet
    import comfy.ops
    wanted = dict(in_channels=16, out_channels=16, vec_in_dim=32, context_in_dim=64, hidden_size=256, mlp_ratio=4.0, num_heads=2, depth=1, depth_single_blocks=1, axes_dim=[16, 56, 56], theta=10000, patch_size=2, qkv_bias=True,
                  guidance_embed=False, txt_ids_dims=[], in_dim=64, out_dim=64, hidden_dim=64, n_layers=1, byt5=False, meanflow=False, use_cond_type_embedding=False, vision_in_dim=None, meanflow_sum=False)
    place = dict(device="meta", dtype=torch.bfloat16, operations=comfy.ops.disable_weight_init)

    def make(cls, params, **others):
        known = {f.name for f in dataclasses.fields(params)}  # cores differ in what they ask for
        return cls(**{k: v for k, v in {**wanted, **others}.items() if k in known}, **place)

    if name == "Chroma":
        return make(comfy.ldm.chroma.model.Chroma, comfy.ldm.chroma.model.ChromaParams)
    if name == "HunyuanVideo":
        return make(comfy.ldm.hunyuan_video.model.HunyuanVideo, comfy.ldm.hunyuan_video.model.HunyuanVideoParams, patch_size=[1, 2, 2])
    if name == "FLUX.2":
        return make(comfy.ldm.flux.model.Flux, comfy.ldm.flux.model.FluxParams, vec_in_dim=None, guidance_embed=True, txt_ids_dims=[3], global_modulation=True, mlp_silu_act=True, ops_bias=False)
    if name == "UNet":
        return unet.UNetModel(image_size=32, in_channels=4, model_channels=32, out_channels=4, num_res_blocks=[1], dropout=0, channel_mult=(1,), num_heads=2, use_spatial_transformer=True, transformer_depth=[1], context_dim=64,
                              transformer_depth_output=[1, 1], transformer_depth_middle=-2, **place)
    return torch.nn.Linear(2, 2, device="meta")


@pytest.mark.parametrize("name", ["Chroma", "HunyuanVideo", "FLUX.2", "UNet", "a linear"])
def test_relatives_and_strangers_come_back_as_they_were(bare_scene, name):
    """B19, S5"""
    if name == "FLUX.2" and bare_scene.core.version < (0, 4):
        pytest.skip("this core has no FLUX.2")
    base = torch.nn.Module()
    base.diffusion_model, base.device, base.model_config = family(name), torch.device("cpu"), None
    base.get_dtype, base.model_loaded_weight_memory, base.current_weight_patches_uuid, base.lowvram_patch_counter = lambda: torch.bfloat16, 0, None, 0
    model = bare_scene.core.comfy.model_patcher.ModelPatcher(base, load_device=torch.device("cpu"), offload_device=torch.device("cpu"))
    assert FluxFastPath().apply(model, True, "7")[0] is model
    harness.assert_untouched(base)


@pytest.mark.parametrize("name", ["SD3", "SDXL", "nothing", "dict", "diffusers pipeline"])
def test_what_is_no_model_at_all_comes_back_as_it_was(bare_scene, name):
    """B19"""
    class Pipeline:
        transformer, config = torch.nn.Linear(2, 2), {}

        def clone(self):
            return self

        def get_model_object(self, name):
            raise AttributeError(name)

    thing = {"nothing": None, "dict": {}, "diffusers pipeline": Pipeline()}.get(name, type(name, (), {"model": None})())
    assert FluxFastPath().apply(thing, True, "7")[0] is thing


@pytest.mark.parametrize("path, kind", [("double_blocks.0", "instance forward"), ("single_blocks.2", "instance forward"), ("", "forward_orig"), ("double_blocks.1.img_norm2", "instance forward"), ("single_blocks.0.linear1", "instance forward"), ("single_blocks.1.mlp_act", "instance forward")])
def test_foreign_instance_forwards_stay_and_keep_their_effect(scene, path, kind):
    """B03, B09: packs set forwards on modules, for good."""
    model = scene.load_unwatched()
    module, name = model.model.diffusion_model.get_submodule(path), "forward_orig" if kind == "forward_orig" else "forward"
    original, calls = getattr(module, name), []

    def forward(*args, **kwargs):
        calls.append(1)
        out = original(*args, **kwargs)
        return (out[0] * 1.25, *out[1:]) if isinstance(out, tuple) else out * 1.25

    setattr(module, name, forward)
    plain = scene.sample(model)
    harness.assert_bits_equal(scene.sample(scene.ours(model)), plain)
    assert module.__dict__[name] is forward and len(calls) == 4
    delattr(module, name)
    assert not torch.equal(scene.sample(model), plain)

"""Kind D: LoRA and weight hooks stay core's business, before and after our node, changed between runs and in mid-run."""
import pytest
import torch
from comfy_harness import assert_bits_equal

pytestmark = pytest.mark.comfyui


def test_a_lora_acts_before_and_after_our_node(scene):
    """B07"""
    model = scene.load()
    plain, wanted = scene.sample(model), scene.sample(scene.lora(model))
    assert not torch.equal(plain, wanted)
    for mine in (scene.ours(scene.lora(model)), scene.lora(scene.ours(model))):
        assert_bits_equal(scene.sample(mine), wanted)
        assert scene.calls["residual_gate"] == 22
    assert_bits_equal(scene.sample(scene.ours(model)), plain, "and is gone without it")


def test_a_lora_changes_between_runs(scene):
    """B07: strength 0, 1, 0; another file; two stacked; negative."""
    model = scene.load()

    def stacks(base):
        first, second = scene.lora(base), scene.lora(base, seed=12)
        return {"0": scene.lora(base, 0.0), "1": first, "0.3": scene.lora(base, 0.3), "other": second, "both": scene.lora(first, 0.7, seed=12), "-1": scene.lora(base, -1.0), "0 again": scene.lora(base, 0.0)}

    wanted = {name: scene.sample(m) for name, m in stacks(model).items()}
    for name, mine in stacks(scene.ours(model)).items():
        assert_bits_equal(scene.sample(mine), wanted[name], name)
        assert scene.calls
    assert len({w.sum().item() for w in wanted.values()}) == 6


def test_patches_on_norms_are_read_by_us_as_core_reads_them(scene):
    """B07, B13: the q/k norms' weights are the ones that we read."""
    model = scene.load()
    names = [k for k in model.model.state_dict() if "norm.query_norm" in k or "norm.key_norm" in k]
    generator = torch.Generator().manual_seed(3)

    def patched(base):
        base = base.clone()
        added = base.add_patches({name: ("diff", (torch.randn(128, generator=generator.manual_seed(i)) * 0.3,)) for i, name in enumerate(names)}, 1.0)
        assert len(added) == len(names) == 14
        return base

    plain, wanted = scene.sample(model), scene.sample(patched(model))
    assert not torch.equal(plain, wanted)
    assert_bits_equal(scene.sample(patched(scene.ours(model))), wanted)
    assert_bits_equal(scene.sample(scene.ours(patched(model))), wanted)


def test_weight_hooks_that_come_and_go_in_mid_run(scene):
    """B07: a hooked LoRA with its own schedule; core swaps weights between steps."""
    import comfy.hooks
    from safetensors.torch import load_file
    model = scene.load()

    def hooks():
        group = comfy.hooks.create_hook_lora(load_file(scene.lora_file), 1.0, 1.0)
        keyframes = comfy.hooks.HookKeyframeGroup()
        keyframes.add(comfy.hooks.HookKeyframe(strength=0.0, start_percent=0.0))
        keyframes.add(comfy.hooks.HookKeyframe(strength=1.0, start_percent=0.5))
        group.set_keyframes_on_hooks(keyframes)
        return group

    plain = scene.sample(model, steps=4)
    wanted = scene.sample(model, steps=4, extra={"hooks": hooks()})
    assert not torch.equal(plain, wanted)
    mine = scene.ours(model)
    assert_bits_equal(scene.sample(mine, steps=4, extra={"hooks": hooks()}), wanted)
    assert scene.calls["residual_gate"] == 44
    assert_bits_equal(scene.sample(mine, steps=4), plain)


def test_state_dict_keys_do_not_change_while_we_are_mounted(scene):
    """B07"""
    model = scene.load()
    keys, seen = list(model.model.state_dict()), []
    mine = scene.ours(model)

    def look(executor, *args, **kwargs):
        seen.append(list(model.model.state_dict()) == keys and not any("flux_fast_path" in k for k in dict(model.model.named_modules())))
        return executor(*args, **kwargs)

    mine.add_wrapper_with_key("diffusion_model", "look", look)
    scene.sample(mine)
    assert seen == [True, True]

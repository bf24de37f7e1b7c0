"""What other packs put on a model keeps working, and gives the bits it gives without us: forwards, hooks, subclasses, replaced modules."""
import functools
import gc
import types
import weakref

import comfy_harness as harness
import fusion_scene
import pytest
import torch
from comfy_harness import assert_bits_equal
from flux_fast_path.bench import reference_flux
from flux_fast_path.fusion.pending import Pending
from fusion_scene import DEVICE, ours, report_of

pytestmark = pytest.mark.usefixtures("one_thread", "fused")
run = functools.partial(fusion_scene.run, batch=2, text_tokens=7)
KINDS = {"modulation": "double_blocks.0.img_mod", "modulation-single": "single_blocks.1.modulation", "norm1": "double_blocks.0.img_norm1", "norm2": "double_blocks.1.txt_norm2", "qkv": "double_blocks.0.txt_attn.qkv",
         "qk-norm": "double_blocks.1.img_attn.norm", "query-norm": "double_blocks.0.img_attn.norm.query_norm", "key-norm-single": "single_blocks.0.norm.key_norm", "linear1": "single_blocks.0.linear1",
         "pre-norm": "single_blocks.2.pre_norm", "qk-norm-single": "single_blocks.1.norm", "gelu": "single_blocks.0.mlp_act", "final-norm": "final_layer.norm_final",
         "proj": "double_blocks.0.img_attn.proj", "mlp": "double_blocks.0.img_mlp", "linear2": "single_blocks.0.linear2"}


def leaf(patcher, kind):
    return patcher.model.diffusion_model.get_submodule(KINDS[kind])


def compare(patcher):
    """The run with us equals the run without us; the report of it."""
    wanted = run(patcher)
    mine = ours(patcher)
    assert_bits_equal(run(mine), wanted)
    assert_bits_equal(run(patcher), wanted)
    return report_of(mine)


def change(result):
    """Something another pack might do to a leaf's result, of whatever shape it is."""
    if isinstance(result, torch.Tensor):
        return result * 1.5
    if result is None:
        return None
    if isinstance(result, tuple):
        return tuple(change(r) for r in result)
    return type(result)(*(change(getattr(result, name)) for name in ("shift", "scale", "gate")))


@pytest.mark.parametrize("kind", KINDS)
def test_a_forward_of_another_pack_stays_and_keeps_its_effect(patcher, kind):
    plain, module = run(patcher), leaf(patcher, kind)
    original, calls = module.forward, []

    def forward(*args, **kwargs):
        calls.append(1)
        assert not any(isinstance(a, Pending) for a in args)
        return change(original(*args, **kwargs))

    module.forward = forward
    told = compare(patcher)
    assert module.__dict__["forward"] is forward and len(calls) == 6
    assert not torch.equal(run(patcher), plain) or kind in ("query-norm", "key-norm-single")
    assert any("another pack" in note for note in told["notes"]) or kind in ("query-norm", "key-norm-single", "proj", "mlp", "linear2")


@pytest.mark.parametrize("kind", KINDS)
def test_hooks_see_and_change_what_they_do_without_us(patcher, kind):
    module, seen = leaf(patcher, kind), []

    def look(module, args, result):
        seen.append([type(a) for a in (*args, result)])
        return change(result)

    with module.register_forward_hook(look), module.register_forward_pre_hook(lambda module, args: seen.append([type(a) for a in args])):
        compare(patcher)
    assert seen[4:8] == seen[:4]


def test_global_hooks_see_what_they_do_without_us(patcher):
    seen = []
    with torch.nn.modules.module.register_module_forward_hook(lambda module, args, result: seen.append((type(module).__name__, type(result).__name__))):
        compare(patcher)
    third = len(seen) // 3
    assert seen[third:2 * third] == seen[:third]


@pytest.mark.parametrize("kind", KINDS)
def test_a_subclass_with_its_own_forward_gives_its_own_result(patcher, kind):
    module = leaf(patcher, kind)
    original = type(module)
    module.__class__ = type(f"Other{original.__name__}", (original,), {"forward": lambda self, *args, **kwargs: change(original.forward(self, *args, **kwargs))})
    compare(patcher)


@pytest.mark.parametrize("kind", ["norm1", "query-norm", "qkv", "gelu"])
def test_a_class_that_was_patched_for_everybody_keeps_its_effect(patcher, kind, monkeypatch):
    cls = type(leaf(patcher, kind))
    original = cls.forward
    monkeypatch.setattr(cls, "forward", functools.wraps(original)(lambda self, *args: change(original(self, *args))))
    compare(patcher)


@pytest.mark.parametrize("where", ["block", "hook"])
def test_foreign_code_may_write_between_asking_for_a_leaf_and_using_it(patcher, where):
    block = patcher.model.diffusion_model.double_blocks[0]
    original = block.forward

    def ask(img):
        return block.img_norm1(img)

    if where == "block":
        def forward(self, img, txt, vec, pe, **kwargs):
            before = ask(img)
            img, txt = original(img=img, txt=txt, vec=vec, pe=pe, **kwargs)  # core writes into img
            return img + before, txt

        block.forward = types.MethodType(forward, block)
        compare(patcher)
    else:
        kept = []
        with block.register_forward_pre_hook(lambda m, args, kwargs: kept.append(ask(kwargs["img"])), with_kwargs=True), block.register_forward_hook(lambda m, args, out: (out[0] + kept.pop(), out[1])):
            compare(patcher)


def test_a_hook_that_keeps_a_blocks_input_sees_core_write_into_it(patcher):
    """B05: a cache that forgets to copy sees no difference, with and without us; one that copies sees the same difference."""
    block, found = patcher.model.diffusion_model.double_blocks[0], []

    def before(module, args, kwargs):
        found.append([kwargs["img"], kwargs["img"].clone(), kwargs["txt"]])

    def after(module, args, out):
        kept = found.pop()
        found.append((out[0] is kept[0], out[1] is kept[2], (out[0] - kept[1]).abs().sum().item()))

    with block.register_forward_pre_hook(before, with_kwargs=True), block.register_forward_hook(after):
        compare(patcher)
    assert len(found) == 6 and found[2:4] == found[:2] and found[0][:2] == (True, True)


@pytest.mark.parametrize("path, seen_from", [
    ("double_blocks.0", "img_in"), ("double_blocks.0.img_norm1", "img_in"), ("final_layer", "img_in"),
    pytest.param("double_blocks.0.img_norm2", "double_blocks.0.img_attn.proj"),
])
def test_a_forward_captured_while_we_were_mounted_is_cores_afterwards(patcher, path, seen_from):
    transformer, asked = patcher.model.diffusion_model, []
    module = transformer.get_submodule(path)
    plain = run(patcher)

    def patch_once(m, args):
        if not asked:
            asked.append(module.forward)
            module.forward = lambda *args, captured=module.forward, **kwargs: captured(*args, **kwargs)

    with transformer.get_submodule(seen_from).register_forward_pre_hook(patch_once):
        assert_bits_equal(run(ours(patcher)), plain)
    results = []
    with module.register_forward_hook(lambda m, args, result: results.append(type(result))):
        assert_bits_equal(run(patcher), plain)
    assert asked and not any(issubclass(r, Pending) for r in results)


def test_a_forward_put_on_and_taken_off_inside_our_call_leaves_nothing(patcher):
    module, state = leaf(patcher, "qkv"), []
    transformer = patcher.model.diffusion_model

    def on(m, args):
        state.append(module.forward)
        module.forward = lambda x, inner=module.forward: inner(x)

    def off(m, args, result):
        if "forward" in module.__dict__:
            original = state.pop()
            if isinstance(original, types.MethodType):
                del module.forward
            else:
                module.forward = original

    with transformer.img_in.register_forward_pre_hook(on), transformer.final_layer.register_forward_hook(off):
        compare(patcher)
    harness.assert_untouched(patcher)


@pytest.mark.parametrize("kind", ["norm1", "qkv", "linear1", "gelu", "modulation"])
def test_a_replaced_leaf_runs_and_the_old_one_is_let_go(patcher, kind):
    compare(patcher)
    path, _, name = KINDS[kind].rpartition(".")
    parent, donor = patcher.model.diffusion_model.get_submodule(path), reference_flux.reference_flux("tiny", device=DEVICE, seed=9)
    old = weakref.ref(getattr(parent, name))
    setattr(parent, name, donor.get_submodule(KINDS[kind]))
    compare(patcher)
    gc.collect()
    assert old() is None


def test_a_linear_with_a_transposed_result_is_handled(patcher):
    class Transposed(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x).mT.contiguous().mT

    for kind in ("qkv", "linear1"):
        leaf(patcher, kind).__class__ = Transposed
    compare(patcher)

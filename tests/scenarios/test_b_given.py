"""Kind B: what a block or leaf is given, and what hangs on it, that is not what core gives: each such block runs as core runs it."""
import pytest
import torch
from comfy_harness import assert_bits_equal
from flux_fast_path.bench import checkpoint
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.comfyui


def same(scene, change, takes_effect=True):
    """`change(model)` gives the model another pack made: with us it makes the same picture; our report."""
    model = scene.load()
    plain = scene.sample(model)  # loading says on each module how its weights are cast, before patches hide some
    other, mine = change(model), change(scene.ours(model))
    wanted = scene.sample(other)
    assert torch.equal(wanted, plain) is not takes_effect, "the change does nothing, so the test proves nothing"
    assert_bits_equal(scene.sample(mine), wanted)
    assert_bits_equal(scene.sample(mine), wanted)
    assert_bits_equal(scene.sample(model), plain, "without either, where core takes its object patches back")
    return scene.report(mine)


class Seen(torch.Tensor):
    """Another pack's tensors, which see every operation on them: LayerNorm gives half as much again."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        found = super().__torch_function__(func, types, args, kwargs or {})
        return found * 1.5 if func is torch.nn.functional.layer_norm else found


def test_a_tensor_of_another_packs_class_sees_every_operation(scene):
    """B03, B05"""

    def change(model):
        model = model.clone()
        model.set_model_patch_replace(lambda args, extra: extra["original_block"]({**args, "img": args["img"].as_subclass(Seen)}), "dit", "double_block", 0)
        return model

    told = same(scene, change)
    assert told["blocks_mounted"] < 5


def test_attention_without_a_rotation_gets_tensors(scene):
    """B03: an embedder that gives no positions, beside an attention of another pack that looks at what it gets."""

    def override(func, q, k, v, *args, **kwargs):
        assert all(type(t) is torch.Tensor for t in (q, k, v))
        return func(q, k, v, *args, **kwargs)

    class NoPositions(torch.nn.Module):
        def forward(self, ids):
            return None

    def change(model):
        model = model.clone()
        model.add_object_patch("diffusion_model.pe_embedder", NoPositions())
        model.model_options.setdefault("transformer_options", {})["optimized_attention_override"] = override
        return model

    if scene.core.version < (0, 4):
        pytest.skip("this core rotates whatever it is given")
    same(scene, change)


def test_a_hook_set_on_a_leaf_in_the_middle_of_its_block_is_heard(scene):
    """B09"""

    def change(model):
        transformer = model.model.diffusion_model
        leaf, hooks = transformer.double_blocks[0].img_norm1, []

        def set_it(module, args):
            hooks.append(leaf.register_forward_hook(lambda module, args, result: result * 1.5))

        def take_off(module, args, result):
            [hook.remove() for hook in hooks]
            hooks.clear()

        def wrapper(executor, *args, **kwargs):
            with transformer.double_blocks[0].img_mod.lin.register_forward_pre_hook(set_it), transformer.double_blocks[0].register_forward_hook(take_off):
                return executor(*args, **kwargs)

        return scene.wrapped(model, wrapper)

    same(scene, change)


def with_linear(model, path, cls):
    """The model with an object patch: a Linear of another pack's class with the weights of the one at `path`."""
    own = model.get_model_object(path)
    new = cls(own.in_features, own.out_features, device=model.load_device)
    new.weight, new.bias = (torch.nn.Parameter(p.detach().to(model.load_device), False) for p in (own.weight, own.bias))
    model = model.clone()
    model.add_object_patch(path, new)
    return model


class Greedy(torch.nn.Linear):
    """Another pack's Linear, which writes into what it is given."""

    def forward(self, x):
        found = torch.nn.functional.linear(x, self.weight.to(x), self.bias.to(x))
        x.mul_(0.5)
        return found


def test_a_linear_that_writes_its_input_has_an_input_of_its_own(scene):
    """B05: silu(vec) is shared between Modulations only where none of them writes to it."""
    same(scene, lambda model: with_linear(model, "diffusion_model.double_blocks.0.img_mod.lin", Greedy), takes_effect=False)


class Suspicious(torch.nn.Linear):
    """Another pack's Linear, whose call looks at the result before anybody else does."""

    def __call__(self, x):
        found = super().__call__(x)
        return found * 1.5 if isinstance(found, torch.Tensor) else found

    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight.to(x), self.bias.to(x))


def test_a_linear_with_a_call_of_its_own_is_called(scene):
    """B19"""
    same(scene, lambda model: with_linear(model, "diffusion_model.single_blocks.0.linear1", Suspicious))


def test_a_layer_norm_that_was_given_a_weight_uses_it(scene):
    """B19: whatever its flag says."""
    # Not one of the scene's: dynamic VRAM takes a parameter that appears for its own, and keeps it.
    model = scene.load_unwatched()
    plain, mine = scene.sample(model), scene.ours(model)
    leaf = model.model.diffusion_model.double_blocks[0].img_norm1
    leaf.weight = torch.nn.Parameter(torch.full((256,), 1.5, device=model.load_device, dtype=torch.bfloat16), False)
    try:
        wanted = scene.sample(model)
    except Exception as error:
        pytest.skip(f"core itself cannot page a parameter that appears while it is loaded: {type(error).__name__}")
    assert not torch.equal(wanted, plain), "the change does nothing, so the test proves nothing"
    assert_bits_equal(scene.sample(mine), wanted)


def test_longcat_image_is_flux_blocks_and_gets_its_bits(scene):
    """B19: core's Flux class with another text encoder and no pooled vector."""
    comfy = scene.core.comfy
    if not hasattr(comfy.supported_models, "LongCatImage"):
        pytest.skip("this core has no LongCat-Image")
    path = str(scene.folder / "longcat.safetensors")
    checkpoint.write(path, "tiny", torch.bfloat16, 41, context_in_dim=3584, vec_in_dim=32, guidance_embed=False)
    save_file({name: weight for name, weight in load_file(path).items() if not name.startswith("vector_in")}, path)
    model = scene.load(path=path)
    assert type(model.model).__name__ == "LongCatImage"
    conditions = [[torch.randn(1, 16, 3584, generator=torch.Generator().manual_seed(1)), {}]]

    def sample(patched):
        scene.calls.clear()
        with torch.inference_mode():
            return scene.core.nodes.common_ksampler(patched, 0, 2, 1.0, "euler", "simple", conditions, conditions, {"samples": torch.zeros(1, 16, 8, 8)})[0]["samples"]

    wanted, mine = sample(model), scene.ours(model)
    assert_bits_equal(sample(mine), wanted)
    assert scene.report(mine)["state"] == "fused" and scene.calls["residual_gate"] == 22

"""Kind B: other packs' patches, ControlNets and caches, on the same objects in the same order as without us."""
import comfy_harness as harness
import pytest
import torch

pytestmark = pytest.mark.comfyui


def applied(scene, model, add, order):
    """`add` is another pack's node; returns (theirs alone, with ours). Every clone has its own patch state."""
    if order == "ours first":
        return add(model), add(scene.ours(model))
    return add(model), scene.ours(add(model))


ORDERS = pytest.mark.parametrize("order", ["ours first", "ours last"])


def check(scene, model, add, order, gates=True, **kwargs):
    theirs, both = applied(scene, model, add, order)
    wanted = scene.sample(theirs, **kwargs)
    assert not scene.calls
    harness.assert_bits_equal(scene.sample(both, **kwargs), wanted)
    told = scene.report(both)
    assert told["state"] == "fused" and (not gates or scene.calls["residual_gate"] == 11 * told["steps"])
    return told


# --- patches of core's own kinds ---


def patch_of(name, log):
    def attn1_patch(q, k, v, pe=None, attn_mask=None, extra_options=None, **kwargs):
        log.append([type(t) for t in (q, k, v)] + [tuple(extra_options.get("img_slice", ()))])
        return {"q": q * 1.5, "k": k.contiguous(), "v": torch.cat((v[:, :, :1], v[:, :, 1:].clone()), dim=2), "pe": pe, "attn_mask": attn_mask}

    def attn1_output_patch(attn, extra_options):
        log.append((type(attn), tuple(attn.shape)))
        return attn * 0.75

    def post_input(args):
        log.append(sorted(args))
        return {**args, "img": args["img"] * 1.1, "txt": args["txt"][:, :-1], "txt_ids": args["txt_ids"][:, :-1]}

    return {"attn1_patch": attn1_patch, "attn1_output_patch": attn1_output_patch, "post_input": post_input}[name]


@ORDERS
@pytest.mark.parametrize("names", [("attn1_patch",), ("attn1_output_patch",), ("post_input",), ("attn1_patch", "attn1_output_patch", "post_input")], ids="+".join)
def test_attention_and_input_patches_see_tensors_and_keep_their_effect(scene, names, order):
    """B25, B03"""
    model, log = scene.load(), []

    def add(model):
        model = model.clone()
        for name in names:
            model.set_model_patch(patch_of(name, log), name)
        return model

    plain = scene.sample(model)
    check(scene, model, add, order)
    half = len(log) // 2
    assert log[:half] == log[half:]
    if scene.core.version >= (0, 4) or "post_input" in names:
        assert half and not torch.equal(scene.sample(add(model)), plain)


def replacer(act, log, blocks=(("double_block", 0), ("double_block", 1), ("single_block", 0), ("single_block", 2))):
    def add(model):
        model = model.clone()
        for kind, index in blocks:
            model.set_model_patch_replace(lambda args, extra: act(args, extra, log), "dit", kind, index)
        return model
    return add


def pass_on(args, extra, log):
    out = extra["original_block"](args)
    log.append((out["img"] is args["img"], out.get("txt") is args.get("txt"), type(out["img"])))
    return out


def skip(args, extra, log):
    log.append("skipped")
    return {k: args[k] for k in ("img", "txt") if k in args}


def run_twice(args, extra, log):
    first = extra["original_block"]({**args, "img": args["img"].clone(), **({"txt": args["txt"].clone()} if "txt" in args else {})})
    second = extra["original_block"](args)
    return {k: (first[k] + second[k]) / 2 for k in second}


def change_vec(args, extra, log):
    args["vec"].mul_(1.01)  # in place: every later block sees it too
    return extra["original_block"](args)


def keep_reference(args, extra, log):
    """A cache that forgets to copy (B05): core writes into what was kept."""
    kept, copy = args["img"], args["img"].clone()
    out = extra["original_block"](args)
    log.append(((out["img"] - kept).abs().sum().item(), (out["img"] - copy).abs().sum().item()))
    return out


@ORDERS
@pytest.mark.parametrize("act", [pass_on, skip, run_twice, change_vec, keep_reference], ids=lambda f: f.__name__)
def test_block_replacements_act_on_cores_objects(scene, act, order):
    """B05, S1"""
    log = []
    told = check(scene, scene.load(), replacer(act, log), order, gates=act is not skip and act is not run_twice)
    assert log[:len(log) // 2] == log[len(log) // 2:] and told["outcome"] == "finished"


def test_a_replacement_may_call_a_norm_and_use_it_after_the_block(scene):
    """B05, TeaCache's kind: it takes the modulated input of the first block as its indicator."""
    model = scene.load()
    block = model.model.diffusion_model.double_blocks[0]

    def act(args, extra, log):
        before = block.img_norm1(args["img"])
        out = extra["original_block"](args)
        return {**out, "img": out["img"] + before}

    check(scene, model, replacer(act, [], [("double_block", 0)]), "ours last")


@ORDERS
def test_a_wrapper_may_compute_the_modulated_input_itself(scene, order):
    """B05, TeaCache as it is: modulation, norm and apply_mod of the first block, called from a wrapper around the transformer."""
    from comfy.ldm.flux.layers import apply_mod
    seen = []

    def indicator(executor, x, timestep, context, *args, **kwargs):
        block = executor.class_obj.double_blocks[0]
        img = executor.class_obj.img_in(executor.class_obj.process_img(x)[0])
        mod, _ = block.img_mod(executor.class_obj.time_in(torch.ones(x.shape[0], 256, dtype=img.dtype, device=img.device)))
        modulated = apply_mod(block.img_norm1(img), (1 + mod.scale), mod.shift)
        seen.append(((modulated.abs().mean() + mod.gate.abs().mean()).item(), type(modulated).__name__))
        return executor(x, timestep, context, *args, **kwargs)

    def add(model):
        model = model.clone()
        model.add_wrapper_with_key("diffusion_model", "teacache", indicator)
        return model

    check(scene, scene.load(), add, order)
    assert seen[:2] == seen[2:4] and {kind for _, kind in seen} == {"Tensor"}


class FirstBlockCache:
    """WaveSpeed's idea: when the first block changes its input as in the step before, the rest is replaced by the last known residual."""

    def __init__(self, threshold, copy=True):
        self.threshold, self.copy, self.log = threshold, copy, []
        self.first = self.rest = self.start = None
        self.hit = False

    def __call__(self, model):
        model, cache = model.clone(), FirstBlockCache(self.threshold, self.copy)
        cache.log = self.log

        def first(args, extra):
            before = args["img"].clone() if cache.copy else args["img"]
            out = extra["original_block"](args)
            change = out["img"] - before
            cache.hit = cache.first is not None and ((change - cache.first).abs().mean() < cache.threshold * cache.first.abs().mean()).item()
            cache.log.append(cache.hit)
            cache.first, cache.start = change, out["img"].clone()
            return out

        def middle(args, extra):
            return {k: args[k] for k in ("img", "txt") if k in args} if cache.hit else extra["original_block"](args)

        def last(args, extra):
            tokens = cache.start.shape[1]
            if cache.hit:
                args["img"][:, -tokens:] += cache.rest
                return {"img": args["img"]}
            out = extra["original_block"](args)
            cache.rest = out["img"][:, -tokens:] - cache.start
            return out

        model.set_model_patch_replace(first, "dit", "double_block", 0)
        for kind, index in (("double_block", 1), ("single_block", 0), ("single_block", 1)):
            model.set_model_patch_replace(middle, "dit", kind, index)
        model.set_model_patch_replace(last, "dit", "single_block", 2)
        return model


@ORDERS
@pytest.mark.parametrize("threshold, copy", [(0.0, True), (0.6, True), (9.0, True), (0.6, False)], ids=["never", "sometimes", "always", "forgets to copy"])
def test_a_first_block_cache_hits_and_misses_as_it_does_alone(scene, threshold, copy, order):
    """B05"""
    cache = FirstBlockCache(threshold, copy)
    check(scene, scene.load(), cache, order, gates=False, steps=5)
    assert len(cache.log) == 10 and cache.log[:5] == cache.log[5:]
    assert any(cache.log) == (threshold > 0.6 or threshold > 0 and any(cache.log)) and (any(cache.log) or threshold < 9)


@ORDERS
@pytest.mark.parametrize("kind", ["apply_model", "diffusion_model", "outer_sample", "calc_cond_batch", "sampler_sample", "predict_noise"])
def test_wrappers_of_every_kind_stack_with_ours(scene, kind, order):
    """B05"""
    log = []

    def wrapper(executor, *args, **kwargs):
        log.append(len(args))
        out = executor(*args, **kwargs)
        return out * 1.125 if isinstance(out, torch.Tensor) else [o * 1.125 for o in out]

    def add(model):
        model = model.clone()
        model.add_wrapper_with_key(kind, "theirs", wrapper)
        return model

    check(scene, scene.load(), add, order)
    assert log and log[:len(log) // 2] == log[len(log) // 2:]


@ORDERS
def test_a_wrapper_may_call_the_model_twice(scene, order):
    """B05: guidance packs run the model again with other options."""
    def add(model):
        model = model.clone()
        model.add_wrapper_with_key("apply_model", "twice", lambda executor, *args, **kwargs: (executor(*args, **kwargs) + executor(*args, **kwargs)) / 2)
        model.set_model_unet_function_wrapper(lambda apply, p: apply(p["input"], p["timestep"], **p["c"]) * 0.5 + apply(p["input"], p["timestep"], **p["c"]) * 0.5)
        return model

    check(scene, scene.load(), add, order, gates=False)
    assert scene.calls["residual_gate"] == 2 * 2 * 2 * 11


@ORDERS
def test_another_packs_attention_is_used_and_sees_tensors(scene, order):
    """B15, B05: optimized_attention_override is how packs bring their own attention."""
    if scene.core.version < (0, 4):
        pytest.skip("this core has no attention override in FLUX")
    log = []

    def override(func, q, k, v, *args, **kwargs):
        log.append([type(t) for t in (q, k, v)] + [q.shape, q.is_contiguous()])
        return func(q * 1.25, k, v, *args, **kwargs)

    def add(model):
        model = model.clone()
        model.model_options["transformer_options"]["optimized_attention_override"] = override
        return model

    check(scene, scene.load(), add, order)
    assert log and [entry[:4] for entry in log[:len(log) // 2]] == [entry[:4] for entry in log[len(log) // 2:]]

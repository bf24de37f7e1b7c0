"""Plans and the calls that use them: nested, overlapping, in threads; when a plan is made again, and what it must not keep alive."""
import gc
import threading
import weakref

import comfy_harness as harness
import pytest
import torch
from comfy_harness import assert_bits_equal
from flux_fast_path.bench import reference_flux
from flux_fast_path.bench.reference_patcher import APPLY_MODEL, reference_patcher
from flux_fast_path.fusion import session
from fusion_scene import DEVICE, assert_same, ours, report_of, run

pytestmark = pytest.mark.usefixtures("one_thread")


def test_mounting_twice_restores_once_and_keeps_the_outer_choices(fused, patcher):
    transformer = patcher.model.diffusion_model
    plan, inputs = session.plan_for(transformer), reference_flux.example_inputs(transformer)
    with torch.inference_mode():
        wanted = transformer(**inputs)
        with session.mounted(plan, share_silu=False):
            with session.mounted(plan, share_silu=True):
                assert_bits_equal(transformer(**inputs), wanted)
            assert all("forward" in unit.block.__dict__ for unit in plan.units)
            assert_bits_equal(transformer(**inputs), wanted)
    harness.assert_untouched(patcher)


def test_an_inner_call_does_not_change_the_choices_of_the_outer_one(patcher):
    plan = session.plan_for(patcher.model.diffusion_model)
    with session.mounted(plan, token_major=False, share_silu=False):
        with session.mounted(plan, token_major=True, share_silu=True):
            pass
        assert (plan.shared.call.token_major, plan.shared.call.share_silu) == (False, False)


def test_two_calls_that_overlap_without_nesting_end_as_they_began(patcher):
    plan = session.plan_for(patcher.model.diffusion_model)
    first, second = session.mounted(plan), session.mounted(plan)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    during = plan.shared.call.kinds
    second.__exit__(None, None, None)
    assert (during, plan.shared.call.kinds) == (session.KINDS, frozenset())


def test_two_threads_run_two_models(fused):
    models = [reference_patcher("tiny", device=DEVICE, seed=s) for s in (1, 2)]
    wanted, got, errors = [run(m, steps=6, seed=3) for m in models], {}, []

    def work(i):
        try:
            got[i] = run(ours(models[i]), steps=6, seed=3)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not errors
    for i, model in enumerate(models):
        assert_bits_equal(got[i], wanted[i])
        harness.assert_untouched(model)


def test_two_threads_run_one_model(fused, patcher):
    wanted, got = [run(patcher, steps=6, seed=s) for s in range(2)], {}
    threads = [threading.Thread(target=lambda i=i: got.update({i: run(ours(patcher), steps=6, seed=i)})) for i in range(2)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    for i in range(2):
        assert_bits_equal(got[i], wanted[i])
    harness.assert_untouched(patcher)


def test_threads_on_one_model_with_different_nodes_get_each_their_own_picture(fused, patcher):
    """The second one to come runs as core runs it, and says so; tier high cannot leak into a lossless or plain run."""
    wanted = run(patcher, steps=8)
    models = {"plain": patcher, "lossless": ours(patcher), "other lossless": ours(patcher)}
    got = {name: [] for name in models}

    def work(name):
        for _ in range(2):
            got[name].append(run(models[name], steps=8))

    threads = [threading.Thread(target=work, args=(name,)) for name in models]
    [t.start() for t in threads]
    [t.join() for t in threads]
    for name, pictures in got.items():
        assert len(pictures) == 2
        for picture in pictures:
            assert_bits_equal(picture, wanted, name)
    harness.assert_untouched(patcher)
    plan = session.plan_for(patcher.model.diffusion_model)
    assert not plan.shared.busy


def test_a_thread_that_comes_while_another_is_in_the_model_is_refused(patcher):
    plan, seen = session.plan_for(patcher.model.diffusion_model), []

    def second():
        with session.mounted(plan) as count:
            seen.append(count)

    with session.mounted(plan) as count:
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()
        assert count.mounted == 5 and seen == [None] and plan.shared.busy
    assert not plan.shared.busy


@pytest.mark.parametrize("compile_it", [
    lambda m: m.compile(backend="eager"),
    lambda m: setattr(m, "forward", torch.compile(m.forward, backend="eager")),
], ids=["in place", "its forward"])
def test_a_model_compiled_without_a_wrapper_of_cores_runs_compiled(fused, patcher, compile_it):
    torch._dynamo.reset()
    compile_it(patcher.model.diffusion_model)
    wanted = run(patcher)
    mine = ours(patcher)
    assert_bits_equal(run(mine), wanted)
    assert "torch.compile" in report_of(mine)["reason"] and not fused
    torch._dynamo.reset()


def test_another_packs_forward_that_holds_the_model_keeps_it_no_longer_than_core_does(fused):
    model = reference_patcher("tiny", device=DEVICE)
    transformer, block = model.model.diffusion_model, model.model.diffusion_model.single_blocks[0]

    def forward(*args, _model=transformer, _block=block, **kwargs):
        return type(_block).forward(_block, *args, **kwargs)

    block.forward = forward
    run(ours(model))
    alive = weakref.ref(transformer)
    del model, transformer, block, forward
    gc.collect()
    assert alive() is None


def test_a_plan_is_made_again_when_blocks_are_others(fused, patcher):
    transformer = patcher.model.diffusion_model
    first = session.plan_for(transformer)
    assert session.plan_for(transformer) is first
    transformer.double_blocks[0] = reference_flux.reference_flux("tiny", device=DEVICE, seed=8).double_blocks[0]
    assert session.plan_for(transformer) is not first
    fused.clear()
    assert_same(patcher)
    assert fused.count("residual_gate") == 22


def test_neither_plan_nor_application_keeps_the_model(fused):
    model = reference_patcher("tiny", device=DEVICE)
    mine = ours(model)
    run(mine)
    application = mine.wrappers[APPLY_MODEL][session.KEY][0].__self__
    alive = weakref.ref(model.model.diffusion_model)
    weight = weakref.ref(model.model.diffusion_model.single_blocks[0].linear1.weight)
    del model, mine
    gc.collect()
    assert alive() is None and weight() is None and application.run is not None


def test_a_mounted_model_can_go_away(fused, patcher):
    transformer = reference_flux.reference_flux("tiny", device=DEVICE)
    plan, alive = session.plan_for(transformer), weakref.ref(transformer)
    with session.mounted(plan):
        del transformer
        gc.collect()
        assert alive() is None
    assert not any("forward" in unit.block.__dict__ for unit in plan.units)

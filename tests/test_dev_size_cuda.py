"""FLUX.1-dev's size on a large GPU: a step of the whole transformer has eager's bits in every shape people draw, and eager's peak memory."""
import pytest
import torch
from flux_fast_path.bench import comfy_core, timing
from flux_fast_path.bench.reference_flux import example_inputs
from flux_fast_path.bench.subject import Subject, left_behind, size_for
from flux_fast_path.fusion import session
from flux_fast_path.kernels import proof

DEVICE = torch.device("cuda", 0)
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available() or size_for(DEVICE) != "dev", reason="FLUX.1-dev's size needs a GPU with 40 GB")]
# (height, width, text tokens, batch): square, portrait, landscape, odd sides in patches, odd and long prompts, every batch up to 4.
SHAPES = [(1024, 1024, 512, 1), (512, 512, 256, 2), (1216, 832, 512, 1), (720, 1280, 333, 1), (528, 784, 77, 3), (512, 768, 256, 4), (1024, 1024, 256, 4), (2048, 2048, 512, 1)]


@pytest.fixture(scope="module", params=[torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def subject(request):
    core, why_no_core = comfy_core.load(dynamic_vram=True)
    yield Subject("dev", request.param, DEVICE, core, why_no_core)
    torch.cuda.empty_cache()


def steps(subject, inputs):
    """Eager, and the same call with our leaves mounted."""
    model, plan = subject.transformer, session.plan_for(subject.transformer)

    def fused():
        with session.mounted(plan, token_major=True, share_silu=True):
            return model(**inputs)

    return (lambda: model(**inputs)), fused


def launches():
    return {name: sum(plan.launches for plan in op.plans.values()) for name, op in proof.REGISTRY.items()}


@pytest.mark.parametrize("height, width, text, batch", SHAPES)
def test_a_step_has_eagers_bits(subject, height, width, text, batch):
    eager, fused = steps(subject, example_inputs(subject.transformer, height, width, text, batch, seed=height + batch))
    with torch.inference_mode():
        want, first, before = eager(), fused(), launches()
        second = fused()
    assert torch.isfinite(want).all()
    assert proof.same_bits(first, want) and proof.same_bits(second, want)
    done = {name: n - before[name] for name, n in launches().items()}
    assert done["residual_gate"] == 114 and done["layer_norm_modulate"] == 115 and done["gelu_concat"] == 38, done
    assert done["qk_norm_rope"] in (57, 114), done  # cores before 0.29 rotate q and k in two calls
    assert not left_behind(subject.transformer)


def test_a_steps_peak_memory_is_eagers(subject):
    """Within 1 %: the result of GELU and concat is allocated while `linear1`'s is still alive."""
    for size in (512, 1024, 2048):
        eager, fused = steps(subject, example_inputs(subject.transformer, size, size, 512, 1, seed=1))
        with torch.inference_mode():
            fused()  # kernels and proofs
            wanted, ours = (timing.peak_memory(DEVICE, step)["peak"] for step in (eager, fused))
        assert ours <= 1.01 * wanted, f"{size}: {ours / 2**20:.0f} MiB against {wanted / 2**20:.0f}"


def test_values_that_wait_keep_nothing_alive(subject):
    """What a step has allocated is gone with its result."""
    _, fused = steps(subject, example_inputs(subject.transformer, 512, 512, 256, 1, seed=2))
    with torch.inference_mode():
        fused()
        torch.cuda.synchronize()
        resting = torch.cuda.memory_allocated(DEVICE)
        for _ in range(3):
            fused()
        torch.cuda.synchronize()
    assert torch.cuda.memory_allocated(DEVICE) == resting

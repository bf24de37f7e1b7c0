"""One operation at a time with two GPUs: it works on its operands' device whichever is current, and refuses operands on both."""

import pytest
import torch
from flux_fast_path.kernels import proof
from flux_fast_path.kernels.qk_norm_rope import Stream
from flux_fast_path.kernels.slices import ColumnSlice
from op_cases import eager_rope_pair, gate_case, norm_case, qk_case, values
from two_gpus import BF16, FIRST, NEEDED, SECOND, launches, refusals, the_first_is_current  # noqa: F401 the last is a fixture

pytestmark = NEEDED


def random(like, *shape):
    device, generator = like
    return values(*shape, dtype=BF16, device=device, generator=generator, special=False)


CASES = {  # of a pair (device, generator)
    "residual_gate": lambda on: (*gate_case(2, 77, 256, "chunk", BF16, *on), True),
    "layer_norm_modulate": lambda on: (*norm_case(2, 77, 256, BF16, *on), 1e-6, True),
    "qk_norm_rope": lambda on: (*qk_case(2, (13, 29), 2, 128, BF16, *on), None, eager_rope_pair, True),
    "head_concat": lambda on: (*(ColumnSlice(random(on, 2, n, 768), 512, 256) for n in (13, 29)), 2),
    "gelu_concat": lambda on: (random(on, 2, 33, 256), ColumnSlice(random(on, 2, 33, 1792), 768, 1024)),
    "column_copy": lambda on: (random(on, 2, 33, 1280)[..., :256], random(on, 2, 33, 256)),
    "linear_gelu": lambda on: (random(on, 1, 33, 256), random(on, 1024, 256) / 16, random(on, 1024), random(on, 1, 33, 1280)[..., 256:]),
}


def case(name, device):
    return CASES[name]((device, torch.Generator(device).manual_seed(11)))


@pytest.mark.parametrize("name", proof.REGISTRY)
def test_an_operation_runs_on_its_operands_device_and_not_on_the_current_one(name):
    op = proof.REGISTRY[name]
    proof.forget()
    for device in (SECOND, FIRST, SECOND):  # a plan of one device must not serve the other
        args = case(name, device)
        wanted, before = op.reference(*op.shadow(*args)), launches(device)[name]
        for turn in range(2):
            got = op(*op.shadow(*args))
            assert {t.device for t in (got if isinstance(got, (tuple, list)) else [got])} == {device}
            assert op.agrees(args, got, wanted), f"{name} on {device}, call {turn + 1}"
        assert launches(device)[name] == before + 2, refusals()
        assert torch.cuda.current_device() == 0


def test_what_an_operation_costs_is_measured_on_its_own_device():
    """The report's milliseconds must not depend on which device is current. Large operands: eager takes far longer than it takes to queue."""
    op, took = proof.REGISTRY["residual_gate"], {}
    args = (*gate_case(1, 4 * 4608, 3072, "chunk", BF16, SECOND, torch.Generator(SECOND).manual_seed(11)), True)
    for current in (SECOND, FIRST):
        proof.forget()
        torch.cuda.set_device(current)
        op(*op.shadow(*args))
        took[str(current)] = next(p.eager_us for p in op.plans.values() if p.fused)
    assert 0.5 < took["cuda:0"] / took["cuda:1"] < 2, f"eager µs of one call on cuda:1, by the device that was current: {took}"


def split_over_both(name):
    """(which operand, operands on cuda:1 except that one on cuda:0), one after the other."""
    def away(value):
        return ColumnSlice(value.base.to(FIRST), value.start, value.width) if type(value) is ColumnSlice else value.to(FIRST)

    args = case(name, SECOND)
    for i, value in enumerate(args):
        if isinstance(value, (torch.Tensor, ColumnSlice)):
            yield f"operand {i}", (*args[:i], away(value), *args[i + 1 :])
    if name == "qk_norm_rope":
        (text, image), *rest = args
        for field in ("base", "q_weight", "k_weight"):
            moved = Stream(*(getattr(image, f) for f in Stream.__slots__))
            setattr(moved, field, getattr(image, field).to(FIRST))
            yield f"the image's {field}", ((text, moved), *rest)


@pytest.mark.parametrize("name", proof.REGISTRY)
def test_operands_on_two_gpus_are_refused_with_a_reason_and_no_launch(name):
    op = proof.REGISTRY[name]
    proof.forget()
    for which, args in split_over_both(name):
        reason = op.why_not(*args)  # asked first: a launch with a pointer of another device could end the process
        assert reason, f"{name} accepts {which} on another device"
        try:
            op(*op.shadow(*args))  # what torch says to it: most refuse, a copy does not
        except RuntimeError as error:
            assert "device" in str(error), f"{name} with {which} elsewhere: {error}"
    assert not any(launches(FIRST).values()) and not any(launches(SECOND).values())
    assert op.plans and all(p.reason and not p.fused for p in op.plans.values())

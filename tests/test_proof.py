"""The dispatcher all operations share: trust after proof, off for good after a wrong bit, reference wherever anything is not as expected."""

import logging
import threading
import time

import pytest
import torch
from flux_fast_path.kernels import build, proof
from flux_fast_path.kernels.nvrtc import KernelError


@pytest.fixture
def op(monkeypatch):
    """An operation `x + 1` whose "kernel" is torch too, on a CPU that counts as a GPU."""

    class Increment(proof.FusedOp):
        name, label, variants, wrong = "increment", "increments", (0, 1), set()

        def key(self, x):
            return x.shape, x.dtype

        def why_not(self, x):
            return "x has no rows" if x.ndim < 2 else None

        def proof_key(self, x):
            return ("any",)

        @staticmethod
        def reference(x):
            return x + 1

        def prepare(self, variant, x):
            if self.wrong == "unbuildable":
                raise KernelError("the kernel launch failed: CUDA_ERROR_TEST (999)")
            return lambda x: x + 1 if variant not in self.wrong else x + 2

    monkeypatch.setattr(build, "unavailable", lambda device, dtype: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Test GPU")
    monkeypatch.setattr(proof.FusedOp, "_time", lambda self, args, *runs: [2.0, 1.0])
    made = Increment()
    made.wrong = set()
    yield made
    proof.REGISTRY.pop("increment")


def half(*shape):
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape).to(torch.bfloat16)


def test_a_proven_operation_runs_its_kernel_and_counts(op):
    for _ in range(3):
        assert torch.equal(op(half(2, 3)), half(2, 3) + 1)
    op(half(4, 3))
    assert [(p.fused, p.launches) for p in op.plans.values()] == [(True, 3), (True, 1)]
    assert [(v.state, v.variant) for v in op.verdicts.values()] == [("trusted", 0)], "another shape proves nothing again"


def test_the_next_variant_is_tried_before_giving_up(op):
    op.wrong = {0}
    assert torch.equal(op(half(2, 3)), half(2, 3) + 1)
    assert [(v.state, v.variant) for v in op.verdicts.values()] == [("trusted", 1)]


@pytest.mark.parametrize("wrong,word", [({0, 1}, "bits differ"), ("unbuildable", "CUDA_ERROR_TEST")])
def test_what_fails_its_proof_is_off_for_good_with_one_line(op, wrong, word, caplog):
    op.wrong = wrong
    with caplog.at_level(logging.WARNING, "flux_fast_path"):
        for shape in ((2, 3), (2, 3), (5, 3)):
            assert torch.equal(op(half(*shape)), half(*shape) + 1)
    assert [v.state for v in op.verdicts.values()] == ["disabled"] and word in next(iter(op.verdicts.values())).reason
    assert len(caplog.records) == 1 and "image is unaffected" in caplog.text and word in caplog.text
    op.wrong = set()
    op(half(2, 3))
    assert not any(p.fused for p in op.plans.values()), "a verdict is not asked for again"


def test_what_the_contract_excludes_runs_the_reference_without_a_proof(op):
    assert torch.equal(op(half(3)), half(3) + 1)
    assert not op.verdicts and [p.reason for p in op.plans.values()] == ["x has no rows"]


def test_a_launch_that_is_refused_later_falls_back_and_stays_back(op, caplog):
    op(half(2, 3))
    plan = next(iter(op.plans.values()))

    def refused(x):
        raise KernelError("the kernel launch failed: CUDA_ERROR_TEST (999)")

    plan.run = refused
    assert torch.equal(op(half(2, 3)), half(2, 3) + 1) and torch.equal(op(half(2, 3)), half(2, 3) + 1)
    assert not plan.fused and [v.state for v in op.verdicts.values()] == ["disabled"]


def test_without_memory_for_a_proof_core_runs_and_the_next_call_tries_again(op, monkeypatch):
    def full(self, args, verdict):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as context:
        context.setattr(proof.FusedOp, "_prove", full)
        assert torch.equal(op(half(2, 3)), half(2, 3) + 1) and not op.plans
    op(half(2, 3))
    assert next(iter(op.plans.values())).fused


def test_bits_are_compared_not_values():
    nan, zero = torch.tensor([float("nan")], dtype=torch.float16), torch.tensor([0.0], dtype=torch.float16)
    assert proof.same_bits(nan, nan.clone()) and not proof.same_bits(zero, -zero) and not proof.same_bits(zero, zero.bfloat16())
    assert not proof.same_bits(zero, zero.expand(2))


def test_proof_values_leave_torchs_random_state_alone():
    before = torch.get_rng_state()
    a, b = proof.random_like(half(2, 2), 4, 64), proof.special_like(half(2, 2), 40, 64)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(a, proof.random_like(half(2, 2), 4, 64))
    assert b.isnan().any() and b.isinf().any() and a.isfinite().all()


def test_threads_that_meet_a_signature_together_make_one_plan(op):
    """The second one finds the first one's plan when its turn comes, so no launch is counted on a plan that is gone."""
    deciding, decide = [], op._decide

    def slow(args, verdict):
        deciding.append(1)
        time.sleep(0.05)
        return decide(args, verdict)

    op._decide = slow
    threads = [threading.Thread(target=op, args=(half(4, 8),)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(deciding) == 1 and [plan.launches for plan in op.plans.values()] == [4]


def test_a_slow_host_is_not_taken_for_a_slow_operation(monkeypatch):
    """The device is simulated: a queue that runs 20 µs kernels, filled by a host that needs 80 µs for each."""
    clock = [0.0]

    def now():
        return time.perf_counter() * 1e6

    def kernel(us):
        clock[0] = max(clock[0], now()) + us

    class Event:
        def __init__(self, enable_timing):
            self.at = None

        def record(self):
            self.at = clock[0] = max(clock[0], now())

        def synchronize(self):
            while now() < clock[0]:
                pass

        def elapsed_time(self, other):
            return (other.at - self.at) / 1e3

    def eager(x):
        for _ in range(10):
            ready = now() + 80
            while now() < ready:
                pass
            kernel(20)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(build, "spin", lambda index, dtype: lambda: kernel(300))
    op = type("Op", (proof.FusedOp,), {"name": "timed"})()
    proof.REGISTRY.pop("timed")
    took = op._time((half(2, 2),), eager, lambda x: kernel(40))
    assert took[0] == pytest.approx(200, abs=30) and took[1] == pytest.approx(40, abs=10)

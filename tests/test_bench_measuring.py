"""What the benchmark measures is what its tables say: every operation, the transformer's own products, compiled blocks that leave again."""
from types import SimpleNamespace

import pytest
import torch
from flux_fast_path.bench import arms, cases, compiled, environment, reference_flux, skeleton, timing
from flux_fast_path.fusion import high, session


def test_every_bit_exact_operation_has_cases():
    assert cases.uncovered() == []


@pytest.mark.parametrize("op", cases.exact_ops(), ids=lambda op: op.name)
def test_random_signatures_are_valid_operands(op):
    make = cases.Maker(torch.bfloat16, torch.device("cpu"), seed=1)
    for _ in range(8):
        args = cases.random_signature(op, make)
        assert op.reference(*op.shadow(*args)) is not None and (op.why_not(*args) is None or isinstance(op.why_not(*args), str))


def test_the_skeleton_makes_the_transformers_products():
    flux = reference_flux.reference_flux("tiny")
    inputs = reference_flux.example_inputs(flux, 64, 96, 16, 2)
    calls = []
    blocks = [m for name, m in flux.named_modules() if isinstance(m, torch.nn.Linear) and not name.startswith(("time_in", "vector_in", "guidance_in", "final_layer.adaLN"))]
    for linear in blocks:
        linear.register_forward_hook(lambda module, args, out: calls.append((tuple(args[0].shape), tuple(out.shape))))
    with torch.inference_mode():
        flux(**inputs)
        wanted, calls[:] = sorted(calls), []
        skeleton.skeleton(flux, inputs)()
    assert sorted(calls) == wanted


def test_every_arm_makes_a_step_where_kernels_can_run(monkeypatch):
    """As on a GPU: here each operation runs its reference."""
    monkeypatch.setattr(arms.build, "unavailable", lambda device, dtype: None)
    monkeypatch.setattr(high, "why_not_device", lambda device, dtype: None)
    flux = reference_flux.reference_flux("tiny", torch.bfloat16)
    inputs, subject = reference_flux.example_inputs(flux), SimpleNamespace(transformer=flux, device=torch.device("cpu"), dtype=torch.bfloat16)
    with torch.inference_mode():
        made = arms.build_arms(subject, inputs, SimpleNamespace(no_compile=False, compile_backend="eager"))
        assert tuple(arm.name for arm in made) == arms.ORDER and not [arm.skipped for arm in made if arm.skipped]
        found = {}
        for arm in made:
            with arm.around():
                found[arm.name] = arm.step()
    assert all(torch.equal(found[arm.name], found["eager"]) for arm in made if arm.claims)
    assert found["high"].shape == found["eager"].shape and torch.isfinite(found["high"]).all()


def test_compiled_blocks_stand_in_and_leave_again():
    flux = reference_flux.reference_flux("tiny")
    inputs = reference_flux.example_inputs(flux)
    blocks = [*flux.double_blocks, *flux.single_blocks]
    arm = compiled.CompiledBlocks(flux, "eager")
    with torch.inference_mode():
        wanted = flux(**inputs)
        arm.warm_up(lambda: flux(**inputs), torch.device("cpu"))
        with pytest.raises(KeyboardInterrupt), arm.mounted():
            assert type(flux.double_blocks[0]).__name__ == "OptimizedModule"
            assert torch.equal(flux(**inputs), wanted)
            raise KeyboardInterrupt
    assert all(a is b for a, b in zip(blocks, [*flux.double_blocks, *flux.single_blocks])) and arm.seconds is not None
    assert session.plan_for(flux).blocks == {"double": 2, "single": 3}


def test_a_spread_is_of_the_values():
    assert timing.spread([3.0, 1.0, 2.0]) == dict(median=2.0, min=1.0, p10=1.2, p90=2.8, n=3)
    assert timing.spread([])["median"] is None


def test_the_commit_is_read_without_git(tmp_path, monkeypatch):
    monkeypatch.delenv("FLUX_FAST_PATH_COMMIT", raising=False)
    assert environment.commit(tmp_path) is None
    git = tmp_path / ".git"
    (git / "refs/heads").mkdir(parents=True)
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    (git / "packed-refs").write_text("# pack-refs\n" + "b" * 40 + " refs/heads/main\n")
    assert environment.commit(tmp_path) == "b" * 40
    (git / "refs/heads/main").write_text("a" * 40 + "\n")
    assert environment.commit(tmp_path) == "a" * 40
    work = tmp_path / "work"
    (git / "worktrees/w").mkdir(parents=True)
    (git / "worktrees/w/HEAD").write_text("ref: refs/heads/main\n")
    (git / "worktrees/w/commondir").write_text("../..\n")
    work.mkdir()
    (work / ".git").write_text(f"gitdir: {git / 'worktrees/w'}\n")
    assert environment.commit(work) == "a" * 40


def test_a_recorded_command_names_no_place_of_this_machine():
    said = environment.command_line(["sampler", "--out", "/home/me/out", "--checkpoint", "/models/flux1-dev.safetensors", "--into", "/x.json", "--steps", "20"])
    assert said == "python -m flux_fast_path.bench sampler --out DIR --checkpoint flux1-dev.safetensors --into FILE --steps 20"

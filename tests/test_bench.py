"""The benchmark ends on any machine and says what it could not do; the documents say what the results files say."""
import json

import pytest
from flux_fast_path.bench import __main__ as bench
from flux_fast_path.bench import charts, environment, model, render, results, sampler, tables, timing

CPU = ["--device", "cpu"]
ASIDE = "the model runs on cpu, not on an NVIDIA GPU"


def run(capsys, *arguments):
    """(exit status, what was printed)."""
    status = bench.main([*arguments, *CPU])
    return status, capsys.readouterr().out


@pytest.fixture(scope="module")
def cpu_file(tmp_path_factory):
    """A results file of every part on a CPU, and the exit status."""
    folder = tmp_path_factory.mktemp("results")
    status = bench.main(["all", "--no-comfy", "--quick", "--fuzz", "1", "--repeats", "2", "--out", str(folder), *CPU])
    files = list(folder.iterdir())
    assert len(files) == 1 and files[0].name.startswith("cpu-2")
    return status, files[0]


@pytest.fixture
def gpu_results(cpu_file):
    """The same file with the figures that a GPU would add, made up, so that every table and chart has its rows."""
    found = results.load(cpu_file[1])
    found["environment"].update(gpu="NVIDIA Imaginary", memory_gib=80.0, core="0.29.0", comfy_kitchen="0.2.24")

    def timed(us):
        return {"us": timing.spread([us, us * 1.1]), "profiler_us": [us], "graph_us": [us]}

    rows = [dict(op="residual_gate", label="residual gates", shape="(1,4096,3072)", bytes=75503616, sets=4, values=9, different=0, fused=True, reasons=[], ratio=2.0,
                 gb_s=4000.0, of_copy=0.95, host_us=dict(eager=9.0, fused=4.0), arms=dict(eager=timed(36.0), fused=timed(18.0), copy=timed(17.0)))]
    up = [dict(rows=4096, **{"in": 3072, "out": 12288}, arms={n: timed(400.0) for n in ("eager", "product", "epilogue", "high")},
               relative_error=dict(epilogue=3e-3, high=3e-3), high_mounted=True, reasons=[])]
    found["sections"]["ops"] = dict(rows=rows, up=up, copy=dict(gb_s=4200.0, bytes=1), identical=True, seconds=1.0, command="made up")
    section = found["sections"]["model"]
    first = section["points"][0]
    section.update(points=[], fused=True, build_seconds={"0 bfloat16": 0.7})
    for pixels, text, scale in ((512, 256, 0.3), (1024, 512, 1.0), (2048, 512, 5.0)):
        point = json.loads(json.dumps(first))
        point.update(pixels=pixels, text=text, launches=dict(point["sites"]), host_us_per_launch=90.0)
        for name, ms in (("eager", 158), ("lossless", 126), ("high", 124), ("compile", 139), ("skeleton", 120)):
            point["arms"][name].update(skipped=None, note=None, ms=[ms * scale], spread=timing.spread([ms * scale]), host=timing.spread([50.0]), resting=1, peak=2**30)
        point["arms"]["compile"].update(identical=False, deviation=4e-3, compile_seconds=44.0)
        section["points"].append(point)
    found["sections"]["sampler"]["fused"] = True
    return found


# ---- the command ------------------------------------------------------------------------------------------------------------------------

def test_every_part_ends_on_a_cpu(cpu_file):
    status, file = cpu_file
    found = results.load(file)
    assert status == 0 and list(found["sections"]) == list(results.SECTIONS)
    assert results.problems_of(found) == []
    identical, sentence = results.verdict(found)
    assert identical is True and sentence.startswith("bit-identical: yes. Compared: ") and f"Nothing was fused, both sides ran core's own operations: {ASIDE}" in sentence
    for name in ("model", "sampler"):
        assert found["sections"][name]["left_behind"] == [] and found["sections"][name]["not_fused"] == ASIDE
    assert found["sections"]["ops"]["skipped"] == f"no kernel to time: {ASIDE}"
    arms = found["sections"]["model"]["points"][0]["arms"]
    assert arms["lossless"]["identical"] is True and len(arms["lossless"]["ms"]) == 4
    assert arms["high"]["skipped"] == ASIDE and arms["compile"]["skipped"] == "--quick or --no-compile"


@pytest.mark.parametrize("part, says", [
    (["check", "--fuzz", "0"], "Kernels against core's eager expressions"), (["ops"], "no kernel to time"),
    (["model", "--quick", "--repeats", "1"], "A step of the whole transformer"), (["sampler", "--repeats", "2", "--steps", "1"], "Whole runs of the sampler"),
], ids=["check", "ops", "model", "sampler"])
def test_a_part_alone_says_what_stepped_aside_and_why(capsys, part, says):
    status, printed = run(capsys, *part, "--no-comfy")
    assert status == 0 and says in printed and ASIDE in printed and "No results file was written" in printed
    assert printed.rstrip().splitlines()[-1].startswith("bit-identical: ")


def test_without_a_comparison_nothing_is_claimed(capsys):
    assert run(capsys, "ops", "--no-comfy")[1].rstrip().endswith("bit-identical: not compared in this run.")


@pytest.mark.comfyui
def test_with_a_checkout_the_model_and_sampler_are_comfyuis(capsys, comfy):
    status, printed = run(capsys, "model", "sampler", "--quick", "--repeats", "2")
    assert status == 0 and "own Flux class" in printed and "common_ksampler" in printed and "bit-identical: yes" in printed


def test_a_differing_step_is_the_one_reason_for_exit_status_1(capsys, monkeypatch):
    monkeypatch.setattr(model, "same_bits", lambda a, b: False)
    status, printed = run(capsys, "model", "--quick", "--no-comfy", "--repeats", "1")
    assert status == 1 and "bit-identical: NO." in printed


def test_differing_latents_are_too(capsys, monkeypatch):
    honest = sampler.sample
    monkeypatch.setattr(sampler, "sample", lambda subject, m, p: honest(subject, m, p) + (m is not subject.patcher))
    status, printed = run(capsys, "sampler", "--no-comfy", "--repeats", "2", "--steps", "1")
    assert status == 1 and "bit-identical: NO." in printed


def test_a_part_that_fails_leaves_the_others_their_turn(capsys, monkeypatch, tmp_path):
    def fail(*_):
        raise RuntimeError("out of patience")

    monkeypatch.setattr(model, "run", fail)
    status, printed = run(capsys, "model", "sampler", "--no-comfy", "--repeats", "2", "--steps", "1", "--out", str(tmp_path))
    assert status == 3 and "FAILED with an error, see above: model" in printed
    assert list(results.load(next(tmp_path.iterdir()))["sections"]) == ["sampler"]


def test_a_file_takes_more_points_but_none_of_other_code(capsys, tmp_path, monkeypatch):
    file = tmp_path / "r.json"
    for size in ("64", "96", "64"):
        assert run(capsys, "model", "--quick", "--no-comfy", "--repeats", "1", "--sizes", size, "--into", str(file))[0] == 0
    assert [p["pixels"] for p in results.load(file)["sections"]["model"]["points"]] == [64, 96]
    monkeypatch.setattr(environment, "source_digest", lambda: "other")
    assert run(capsys, "model", "--quick", "--no-comfy", "--into", str(file))[0] == 2


def test_wrong_words_are_refused():
    with pytest.raises(SystemExit):
        bench.parse(["everything"])
    assert bench.parse([]).what == ["check", "ops", "model"] and bench.parse([]).quick and bench.parse([]).no_compile
    assert not bench.parse(["all"]).no_compile and not bench.parse(["all", "--quick", "--compile"]).no_compile


# ---- what is written --------------------------------------------------------------------------------------------------------------------

def test_every_table_can_be_made(gpu_results):
    for name in tables.TABLES:
        made = tables.table(gpu_results, name)
        rows = [line.count("|") for line in made.splitlines() if line.startswith("|")]
        assert len(set(rows)) <= 1 and (name == "environment" or len(rows) >= 3), name
    aims = {row[0]: row[1:] for row in tables.aims(gpu_results)}
    assert aims["lossless ≥ 1.25× eager at 1024²/512"] == ["1.254×", "yes"] and aims["lossless ≥ 1.7× eager at 512²/256"][1] == "no"
    assert aims["lossless faster than torch.compile at 2048²/512"][1] == "yes" and aims["high ≥ 1.3 % over lossless at 1024²/512"] == ["1.6 %", "yes"]
    assert aims["gate ≤ 20.7 µs at (1,4096,3072)"][1] == "yes" and aims["each kernel ≥ 80 % of copy bandwidth"][1] == "yes"


def test_rendering_writes_tables_that_the_check_accepts(gpu_results, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    file = results.save(gpu_results, tmp_path / "bench/results/imaginary.json")
    readme, measured = tmp_path / "README.md", tmp_path / "docs" / "measured.md"
    measured.parent.mkdir()
    for document in (readme, measured):
        document.write_text("".join(f"{name}\n<!-- bench:{name} -->\nold\n<!-- /bench -->\nafter\n" for name in tables.TABLES), encoding="utf-8")
    assert render.main(["--check"]) == 1
    assert render.main([str(file), "--charts", str(tmp_path / "docs")]) == 0
    for document, link in ((readme, "(bench/results/imaginary.json)"), (measured, "(../bench/results/imaginary.json)")):
        text = document.read_text(encoding="utf-8")
        assert "old" not in text and text.count("after\n") == len(tables.TABLES) and link in text
        assert render.stale(text.replace("126.0 (1.25×)", "126.0 (1.52×)"), document.parent) == ["model"]
        assert render.rewrite(text, gpu_results, "bench/results/imaginary.json", document.parent) == text
    assert render.main(["--check"]) == 0


def test_charts_are_drawn(gpu_results, tmp_path):
    pytest.importorskip("matplotlib")
    assert sorted(path.name for path in charts.draw(gpu_results, tmp_path)) == ["bench-kernels.png", "bench-model.png"]


def test_a_results_file_is_strict_json(cpu_file, tmp_path):
    found = results.load(cpu_file[1])
    found["sections"]["model"]["seconds"] = float("nan")
    assert results.load(results.save(found, tmp_path / "x.json"))["sections"]["model"]["seconds"] is None
    assert results.free_path(tmp_path, "x.json").name == "x-2.json"
    for break_it in (lambda f: f.pop("commit"), lambda f: f.update(schema=9), lambda f: f["sections"].update(extra={}), lambda f: f["sections"]["model"]["points"][0].pop("launches")):
        broken = json.loads(json.dumps(results.load(cpu_file[1])))
        break_it(broken)
        assert results.problems_of(broken)


@pytest.mark.parametrize("file", sorted(results.FOLDER.glob("*.json")), ids=lambda f: f.name)
def test_committed_results_are_results_of_a_named_commit(file):
    found = results.load(file)
    assert results.problems_of(found) == [] and found["commit"]


def test_the_documents_tables_are_what_the_committed_results_say():
    named = []
    for document in render.documents():
        text = document.read_text(encoding="utf-8")
        assert render.stale(text, document.parent) == [], document
        named += [match[2] for match in render.BLOCK.finditer(text)]
    assert sorted(named) == sorted(tables.TABLES), "each table stands in one document"

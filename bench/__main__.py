"""The proof on record: bits compared, then time taken, on this machine.

    python -m flux_fast_path.bench                  check, ops and model, in under two minutes on a large GPU
    python -m flux_fast_path.bench all --quick      the sampler too
    python -m flux_fast_path.bench all              every size, torch.compile, 20 steps: about ten minutes

    check    builds the kernels; compares each with core's own expression, bit by bit
    ops      each kernel's time beside eager's and beside a copy of as many bytes
    model    a step of the whole transformer: eager, lossless, high, torch.compile, and the limit
    sampler  whole runs with and without the node; latents compared by hash

With COMFYUI_PATH set the model and sampler are ComfyUI's own, else bench/reference_flux.py's. The exit status is 1 only when something that
claims to be bit-identical is not (2: wrong arguments, 3: a part ended in an error). Results go to bench/results/ (on a GPU) or to --out;
FLUX_FAST_PATH_COMMIT names the commit where there is no .git.
"""

import argparse
import sys
import traceback
from pathlib import Path

import torch

from . import check, comfy_core, environment, model, ops, results, sampler
from .checkpoint import DTYPES
from .progress import say
from .subject import SIZES, WORDS, Subject, size_for
from .tables import table

SHOWN = {"check": ("check",), "ops": ("ops", "up"), "model": ("model", "arms", "step", "aims"), "sampler": ("sampler", "published")}
TITLES = {
    "check": "Kernels against core's eager expressions", "ops": "Kernels: time", "up": "GELU up-projections: what tier \"high\" can win", "model": "A step of the whole transformer",
    "arms": "The same, every arm", "step": "What a fused step consists of", "aims": "Aims", "sampler": "Whole runs of the sampler", "published": "Beside the seed's published figures",
}


def numbers(text: str) -> tuple:
    return tuple(int(n) for n in text.split(","))


def part(text: str) -> str:
    if text not in (*results.SECTIONS, "all"):
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(results.SECTIONS)}, all")
    return text


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m flux_fast_path.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("what", nargs="*", type=part, metavar="check|ops|model|sampler|all", help="default: check, ops and model, quick")
    p.add_argument("--quick", action="store_true", help="three sizes, few repeats, no torch.compile")
    p.add_argument("--out", type=Path, metavar="DIR", help="where the JSON goes")
    p.add_argument("--into", type=Path, metavar="FILE", help="add to this results file; same GPU, versions and source only")
    p.add_argument("--sizes", type=numbers, metavar="512,1024,2048", help="image sides in pixels")
    p.add_argument("--text", type=numbers, metavar="256,512", help="text tokens")
    p.add_argument("--batch", type=numbers, default=(1,), metavar="1,2")
    p.add_argument("--steps", type=int, help="of the sampler")
    p.add_argument("--repeats", type=int, help="rounds of model and ops, runs of the sampler (the first of which is dropped)")
    p.add_argument("--checkpoint", type=Path, metavar="FILE", help="sampler only: a FLUX.1 file through ComfyUI's own loader, its memory managed as ComfyUI would")
    p.add_argument("--leave-free", type=float, metavar="GIB", help="sampler only: hold GPU memory until no more than this is free, as on a smaller card")
    p.add_argument("--fuzz", type=int, metavar="N", help="random signatures per operation and dtype in check")
    p.add_argument("--seed", type=int, default=0, help="of the order in which arms run")
    p.add_argument("--dtype", choices=DTYPES, default="bf16", help="of the model")
    p.add_argument("--model-size", choices=SIZES, help="default: FLUX.1-dev on 40 GB or more, fewer blocks on less, tiny on a CPU")
    p.add_argument("--device", default=None, help="default: the first CUDA device, else cpu")
    p.add_argument("--compile", action="store_true", help="run the torch.compile arm even with --quick")
    p.add_argument("--no-compile", action="store_true", help="leave the torch.compile arm out")
    p.add_argument("--compile-backend", default="inductor")
    p.add_argument("--no-comfy", action="store_true", help="use the reference model even when COMFYUI_PATH is set")
    return p


def parse(argv):
    options = parser().parse_args(argv)
    if options.checkpoint and options.what != ["sampler"]:
        parser().error("--checkpoint is for the sampler alone: python -m flux_fast_path.bench sampler --checkpoint FILE")
    if options.checkpoint and not options.checkpoint.is_file():
        parser().error(f"no such file: {options.checkpoint}")
    if not options.what:
        options.what, options.quick = ["check", "ops", "model"], True
    if "all" in options.what:
        options.what = list(results.SECTIONS)
    options.no_compile = options.no_compile or (options.quick and not options.compile)
    return options


def pick_device(name) -> torch.device:
    device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    return device


def main(argv=None) -> int:
    options = parse(argv)
    device = pick_device(options.device)
    gpu = environment.Gpu(device)
    core, why_no_core = (None, "--no-comfy") if options.no_comfy else comfy_core.load(dynamic_vram=options.checkpoint is not None)
    if options.checkpoint and core is None:
        print(f"--checkpoint needs ComfyUI: {why_no_core}", file=sys.stderr)
        return 2
    facts = environment.facts(device, gpu, core)
    found = results.new(facts)
    if options.into and options.into.exists():
        earlier = results.load(options.into)
        reason = results.why_not_join(earlier, facts)
        if reason:
            print(f"{options.into} cannot take this run: {reason}", file=sys.stderr)
            return 2
        found = earlier
    print("# FLUX Fast Path on record\n\n" + table(found, "environment"))
    if "model" in options.what or "sampler" in options.what:
        words = options.checkpoint.name if options.checkpoint else WORDS[options.model_size or size_for(device)]
        print(f"Model: {words}; {'ComfyUI ' + core.version_text if core else f'the reference transformer ({why_no_core})'}.")
    folder = options.out or (results.FOLDER if device.type == "cuda" else None)
    path = options.into or (folder and results.free_path(folder, results.file_name(facts)))
    subject, measured, failed = None, [], []
    for name in (n for n in results.SECTIONS if n in options.what):
        try:
            if name in ("model", "sampler"):
                subject = subject or Subject(options.model_size or size_for(device), DTYPES[options.dtype], device, core, why_no_core, options.checkpoint)
            section = measure(name, options, device, gpu, subject)
        except Exception:  # the other parts have their turn, and what was measured is kept
            traceback.print_exc()
            failed.append(name)
            continue
        results.add(found, name, section, environment.command_line(argv))
        measured.append(name)
        show(found, name, section)
        if path:
            results.save(found, path)
        say(f"{name} done")
    print(f"\nRaw figures: {path}" if path else "\nNo results file was written: there is no GPU and no --out.")
    identical, sentence = results.verdict({**found, "sections": {name: found["sections"][name] for name in measured}})
    if failed:
        print(f"\nFAILED with an error, see above: {', '.join(failed)}")
    print("\n" + sentence)
    return 1 if identical is False else 3 if failed else 0


def measure(name, options, device, gpu, subject) -> dict:
    if name == "check":
        return check.run(device, options.quick, options.fuzz)
    if name == "ops":
        return ops.run(device, options.quick, options.repeats)
    return (model if name == "model" else sampler).run(subject, options, gpu)


def show(found: dict, name: str, section: dict) -> None:
    for shown in SHOWN[name]:
        if name != "ops" or section["rows"]:
            print(f"\n## {TITLES[shown]}\n\n" + table(found, shown))
    for line in remarks(name, section):
        print(f"\n{line}")
    sys.stdout.flush()


def remarks(name: str, section: dict):
    """What a table has no room for: who stepped aside and why, what differs, what was left on a module."""
    if name == "check":
        for dtype, built in section["build"].items():
            yield f"Kernels for {dtype}: " + (f"built in {built['seconds']:.2f} s" if built["seconds"] is not None else "not built") + (f" ({built['reason']})" if built["reason"] else "")
        for row in section["rows"]:
            yield from (f"DIFFERS: {row['label']}, {row['dtype']}: {failure}" for failure in row["failures"])
        for reason in sorted({reason for row in section["rows"] for reason in row["reasons"]})[:12]:
            yield f"Stepped aside: {reason}"
        if section["uncovered"]:
            yield f"NOT COMPARED, no cases for them: {', '.join(section['uncovered'])}"
        yield f"Check took {section['seconds']:.1f} s."
    elif name == "ops":
        if section.get("skipped"):
            yield f"Stepped aside: {section['skipped']}"
        else:
            yield "GPU time of kernels (torch.profiler) over operands that rotate through more memory than the L2; `eager` is core's own expression on the same operands."
    else:
        yield f"Measured: {section['subject']}" + (f"; {section['sampler']}" if name == "sampler" else "") + "."
        for arm, found in section.get("arms", {}).items():
            if any((found.get("launches") or {}).values()):
                yield f"{arm}, fused launches a step: " + ", ".join(f"{op} {n / section['steps']:g}" for op, n in found["launches"].items()) + "."
        if not section["fused"]:
            yield f"Nothing was fused: {section['not_fused'] or 'see the notes'}."
        for reasons in {str(p.get("not_fused")): p["not_fused"] for p in section.get("points", []) if p.get("not_fused")}.values():
            yield from (f"Stepped aside: {op}: {'; '.join(why)}" for op, why in reasons.items())
        if section["left_behind"]:
            yield f"LEFT BEHIND on modules: {', '.join(section['left_behind'][:5])}"


if __name__ == "__main__":
    sys.exit(main())

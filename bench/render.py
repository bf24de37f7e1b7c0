"""`python -m flux_fast_path.bench.render FILE.json`: rewrites the documents' tables and charts from a results file, so that none is typed by hand.

A table stands between `<!-- bench:NAME -->` and `<!-- /bench -->` in README.md and docs/measured.md; the names are those of tables.TABLES. Charts
go to docs/ when matplotlib is installed. `--check` writes nothing and exits with 1 when a document says anything else than its results file.
"""

import argparse
import os
import re
import sys
from pathlib import Path

from . import charts, environment, results
from .tables import TABLES, table

BLOCK = re.compile(r"(<!-- bench:([a-z]+) -->\n)(.*?)(<!-- /bench -->)", re.DOTALL)
SOURCE = re.compile(r"\[(bench/results/[\w.-]+\.json)\]")


def documents() -> list:
    """Every file with tables of the benchmark in it."""
    return [path for path in (environment.ROOT / "README.md", environment.ROOT / "docs" / "measured.md") if path.is_file()]


def caption(found: dict, name: str, source: str, link: str) -> str:
    """Where the figures come from: file, GPU, core, commit and the command that made them."""
    e, section = found["environment"], TABLES[name][0]
    commit = f"commit {found['commit'][:12]}" if found["commit"] else f"source {found['source']}"
    core = f"ComfyUI {e['core']}" if e["core"] else "the reference model"
    command = f", `{found['sections'][section]['command']}`" if section else ""
    return f"<sub>[{source}]({link}): {e['gpu'] or 'CPU'}, torch {e['torch']}, {core}, {commit}{command}</sub>"


def block(found: dict, name: str, source: str, folder: Path):
    """What stands between the markers of `name` in a document of `folder`, or None when the file holds no such figures."""
    made = table(found, name) if name in TABLES else None
    link = Path(os.path.relpath(environment.ROOT / source, folder)).as_posix()
    return made and f"{made}\n\n{caption(found, name, source, link)}\n"


def rewrite(text: str, found: dict, source: str, folder: Path) -> str:
    """`text` with every table that the results hold put in its place; other blocks stay as they are."""

    def replaced(match):
        made = block(found, match[2], source, folder)
        return match[0] if made is None else match[1] + made + match[4]

    return BLOCK.sub(replaced, text)


def stale(text: str, folder: Path) -> list:
    """Names of blocks whose text is not what the results file that they name would give."""
    wrong = []
    for match in BLOCK.finditer(text):
        source = SOURCE.search(match[3])
        path = source and environment.ROOT / source[1]
        if not path or not path.is_file() or block(results.load(path), match[2], source[1], folder) != match[3]:
            wrong.append(match[2])
    return wrong


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(prog="python -m flux_fast_path.bench.render", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?", help="a file of bench/results/; may be left out with --check")
    parser.add_argument("--charts", type=Path, default=environment.ROOT / "docs", metavar="DIR")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args(argv)
    if options.check:
        wrong = [f"{path.name}: {name}" for path in documents() for name in stale(path.read_text(encoding="utf-8"), path.parent)]
        print(f"not what the results say: {', '.join(wrong)}" if wrong else "the documents' tables are what the results say")
        return 1 if wrong else 0
    if options.file is None:
        parser.error("which results file?")
    found, path = results.load(options.file), options.file.resolve()
    problems = results.problems_of(found)
    if problems:
        print(f"{options.file} is no results file: {problems[0]}", file=sys.stderr)
        return 2
    source = path.relative_to(environment.ROOT).as_posix() if path.is_relative_to(environment.ROOT) else path.as_posix()
    for document in documents():
        text = document.read_text(encoding="utf-8")
        new = rewrite(text, found, source, document.parent)
        if new != text:
            document.write_text(new, encoding="utf-8")
        print(f"{document}: {', '.join(m[2] for m in BLOCK.finditer(new)) or 'no <!-- bench:NAME --> markers'}")
    drawn = charts.draw(found, options.charts)
    print(", ".join(map(str, drawn)) if isinstance(drawn, list) else drawn)
    return 0


if __name__ == "__main__":
    sys.exit(main())

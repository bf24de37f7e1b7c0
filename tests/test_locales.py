"""Words shown in ComfyUI: the English files say what the nodes say, and Chinese covers all of it."""

import inspect
import json
import re
from pathlib import Path

import pytest
import torch
from flux_fast_path.fusion import session
from flux_fast_path.fusion.report import text as report_line
from flux_fast_path.kernels import build
from flux_fast_path.nodes import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS, fast_path
from made_up_report import FUSED

PACK = Path(__file__).parents[1]
FILES = ["main", "nodeDefs", "settings", "commands"]


def words(language, name):
    return json.loads((PACK / "locales" / language / f"{name}.json").read_text(encoding="utf-8"))


def keys(tree, path=()):
    if not isinstance(tree, dict):
        return {path}
    return set().union(*(keys(value, (*path, key)) for key, value in tree.items()))


def leaves(tree):
    return [leaf for value in tree.values() for leaf in leaves(value)] if isinstance(tree, dict) else [tree]


def shown_inputs(node_id):
    inputs = NODE_CLASS_MAPPINGS[node_id].INPUT_TYPES()
    return {**inputs.get("required", {}), **inputs.get("optional", {})}


@pytest.mark.parametrize("node_id", sorted(NODE_CLASS_MAPPINGS))
def test_english_says_exactly_what_the_node_says(node_id):
    node, said = NODE_CLASS_MAPPINGS[node_id], words("en", "nodeDefs")[node_id]
    assert said["display_name"] == NODE_DISPLAY_NAME_MAPPINGS[node_id]
    assert said["description"] == node.DESCRIPTION
    assert said["inputs"] == {name: {"name": name, "tooltip": spec[1]["tooltip"]} for name, spec in shown_inputs(node_id).items()}
    outputs = zip(getattr(node, "RETURN_NAMES", node.RETURN_TYPES), node.OUTPUT_TOOLTIPS)
    assert said["outputs"] == {str(index): {"name": name, "tooltip": tip} for index, (name, tip) in enumerate(outputs)}


@pytest.mark.parametrize("name", FILES)
def test_chinese_covers_everything_that_english_says(name):
    assert keys(words("zh", name)) == keys(words("en", name))


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("language", ["en", "zh"])
def test_no_text_holds_characters_that_comfyuis_translator_reads_as_commands(language, name):
    assert [text for text in leaves(words(language, name)) if re.search(r"[{}|@]|\\$", text)] == []


def combo_values(node_id):
    return {name: spec[0] for name, spec in shown_inputs(node_id).items() if isinstance(spec[0], list)}


def help_page(language, node_id):
    """Where the frontend asks first in Chinese; English has the name that it asks for in every other language."""
    docs = PACK / "web" / "docs"
    return (docs / node_id / f"{language}.md" if language != "en" else docs / f"{node_id}.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("node_id", sorted(NODE_CLASS_MAPPINGS))
def test_a_help_page_has_the_nodes_name_on_top_and_names_all_that_the_node_shows(language, node_id):
    page, said = help_page(language, node_id), words(language, "nodeDefs")[node_id]
    assert page.startswith(f"# {said['display_name']}\n")
    names = [entry["name"] for group in ("inputs", "outputs") for entry in said[group].values()]
    assert [name for name in names if f"`{name}`" not in page] == []
    assert [value for values in combo_values(node_id).values() for value in values if f"`{value}`" not in page] == []


@pytest.mark.parametrize("node_id", sorted(NODE_CLASS_MAPPINGS))
def test_a_chinese_help_page_has_every_section_and_row_of_the_english_one(node_id):
    def shape(language):
        lines = help_page(language, node_id).splitlines()
        return [sum(line.lstrip().startswith(start) for line in lines) for start in ("#", "|", "-", "1.", "2.")]

    assert shape("zh") == shape("en")


@pytest.mark.parametrize("language", ["en", "zh"])
def test_translated_options_are_options_of_the_node(language):
    """A node needs no translation of its options; one that is no longer an option would never be seen."""
    for node_id in NODE_CLASS_MAPPINGS:
        for name, said in words(language, "nodeDefs")[node_id]["inputs"].items():
            options = set(combo_values(node_id).get(name, []))
            assert set(said.get("options", options)) == options, (node_id, name)


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_help_page_quotes_what_the_node_says(language):
    table = help_page(language, "FluxFastPath").split("`model`" if language == "en" else "`模型`")[-1]
    quoted = {line.split("`")[1] for line in table.splitlines() if line.startswith("| `")}
    clean = {**FUSED, "gpu": "NVIDIA H200", "disabled": [], "saved_ms_per_step": 27.1}
    aside = {**clean, "state": "stepped_aside", "reason": build.unavailable(torch.device("cuda"), torch.float32)}
    nothing = {**clean, "ops": [{**op, "launches": 0} for op in FUSED["ops"]], "saved_ms_per_step": None}
    ends = [report_line(report).split(" · ")[-1] for report in (nothing, {**clean, "disabled": FUSED["disabled"]}, {**clean, "outcome": "interrupted"})]
    assert quoted >= {report_line(clean), report_line(aside), *(f"… · {end}" for end in ends)}
    others = quoted - {report_line(clean), report_line(aside), *(f"… · {end}" for end in ends)}
    source = inspect.getsource(fast_path) + inspect.getsource(session)
    assert len(others) == 3 and [line for line in others if f'"{line}"' not in source] == []

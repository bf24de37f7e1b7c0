"""Words shown in ComfyUI: the English files say what the nodes say, and Chinese covers all of it."""

import json
import re
from pathlib import Path

import pytest
from flux_fast_path.nodes import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS

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


@pytest.mark.parametrize("node_id", sorted(NODE_CLASS_MAPPINGS))
def test_english_says_exactly_what_the_node_says(node_id):
    node, said = NODE_CLASS_MAPPINGS[node_id], words("en", "nodeDefs")[node_id]
    inputs = node.INPUT_TYPES()
    shown = {**inputs.get("required", {}), **inputs.get("optional", {})}
    assert said["display_name"] == NODE_DISPLAY_NAME_MAPPINGS[node_id]
    assert said["description"] == node.DESCRIPTION
    assert said["inputs"] == {name: {"name": name, "tooltip": spec[1]["tooltip"]} for name, spec in shown.items()}
    outputs = zip(getattr(node, "RETURN_NAMES", node.RETURN_TYPES), node.OUTPUT_TOOLTIPS)
    assert said["outputs"] == {str(index): {"name": name, "tooltip": tip} for index, (name, tip) in enumerate(outputs)}


@pytest.mark.parametrize("name", FILES)
def test_chinese_covers_everything_that_english_says(name):
    assert keys(words("zh", name)) == keys(words("en", name))


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("language", ["en", "zh"])
def test_no_text_holds_characters_that_comfyuis_translator_reads_as_commands(language, name):
    assert [text for text in leaves(words(language, name)) if re.search(r"[{}|@]|\\$", text)] == []


@pytest.mark.parametrize("node_id", sorted(NODE_CLASS_MAPPINGS))
def test_every_node_has_a_help_page_with_its_name_on_top(node_id):
    page = (PACK / "web" / "docs" / f"{node_id}.md").read_text(encoding="utf-8")
    assert page.startswith(f"# {NODE_DISPLAY_NAME_MAPPINGS[node_id]}\n")
    for name in {**NODE_CLASS_MAPPINGS[node_id].INPUT_TYPES().get("required", {})}:
        assert f"`{name}`" in page or name == "model"

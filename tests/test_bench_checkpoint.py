"""`bench sampler --checkpoint`: a user's own file, through core's own loader."""
import json

import pytest
import torch
from flux_fast_path.bench import __main__ as bench
from flux_fast_path.bench import checkpoint

QUICK = ["sampler", "--device", "cuda" if torch.cuda.is_available() else "cpu", "--sizes", "64", "--text", "16", "--steps", "2", "--repeats", "2"]


@pytest.mark.comfyui
def test_a_file_is_sampled_with_and_without_the_node(comfy, tmp_path, tiny_checkpoint, capsys):
    if comfy.version < (0, 4):
        pytest.skip("this core takes FLUX.1-dev's widths for granted")
    assert bench.main([*QUICK, "--checkpoint", tiny_checkpoint, "--leave-free", "8", "--out", str(tmp_path)]) == 0
    section = json.loads(next(tmp_path.iterdir()).read_text())["sections"]["sampler"]
    assert section["identical"] and "UNETLoader" in section["subject"] and not section["left_behind"]
    assert section["arms"]["plain"]["hashes"] == section["arms"]["FLUX Fast Path"]["hashes"]
    assert ("8 GiB of the card left free" in section["sampler"]) == torch.cuda.is_available()
    assert section["fused"] == torch.cuda.is_available()


def test_a_file_is_only_for_the_sampler(tiny_checkpoint, capsys):
    with pytest.raises(SystemExit):
        bench.main(["model", "--checkpoint", tiny_checkpoint])
    assert "for the sampler alone" in capsys.readouterr().err


def test_a_file_that_is_not_there_is_said_before_anything_runs(tmp_path, capsys):
    with pytest.raises(SystemExit):
        bench.main(["sampler", "--checkpoint", str(tmp_path / "flux.safetensors")])
    assert "no such file" in capsys.readouterr().err


def test_a_file_needs_comfyui(tiny_checkpoint, monkeypatch, capsys):
    monkeypatch.delenv("COMFYUI_PATH", raising=False)
    assert bench.main([*QUICK, "--checkpoint", tiny_checkpoint]) == 2
    assert "COMFYUI_PATH is not set" in capsys.readouterr().err


def test_the_command_writes_a_file_that_names_its_keys_as_flux_does(tmp_path):
    from safetensors import safe_open
    checkpoint.main([str(tmp_path / "random.safetensors"), "--size", "tiny", "--dtype", "fp16", "--seed", "3"])
    with safe_open(str(tmp_path / "random.safetensors"), "pt") as file:
        names = set(file.keys())
        assert file.get_tensor("img_in.weight").dtype == torch.float16
    assert "double_blocks.1.img_attn.norm.query_norm.scale" in names and "single_blocks.2.linear2.weight" in names

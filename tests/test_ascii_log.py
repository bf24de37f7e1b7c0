"""No line of ours breaks a console that writes ASCII only: on Windows each "−" would be answered with a traceback of logging's own."""

import ast
import io
import logging
from pathlib import Path

import pytest
import torch
from flux_fast_path.fusion import copies, report, session
from flux_fast_path.fusion.ascii_log import ascii_line
from flux_fast_path.kernels import build, nvrtc
from flux_fast_path.nodes import fast_path
from made_up_report import FUSED

PACK = Path(__file__).parents[1]
GPU = "NVIDIA GeForce RTX™ 4090 中文"
LOG = logging.getLogger("flux_fast_path")


@pytest.fixture
def console(monkeypatch):
    """What an ASCII console was given; anything that logging could not write there fails the test."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)
    handler = logging.StreamHandler(stream)
    handler.handleError = lambda record: pytest.fail(f"logging failed on {record.getMessage()!r}")
    LOG.addHandler(handler)
    level = LOG.level
    LOG.setLevel(logging.DEBUG)
    yield lambda: stream.buffer.getvalue().decode("ascii")
    LOG.removeHandler(handler)
    LOG.setLevel(level)


class Finished:
    outcome, direct = "finished", False

    def to_dict(self):
        return {"text": report.text({**FUSED, "gpu": GPU})}


def test_the_line_of_a_run_is_readable_in_ascii(console):
    session.Application("token", lambda run, nodes: None, {"nodes": [], "lineage": []}).tell(Finished())
    assert "57/57 blocks | 114 gates | proven on NVIDIA GeForce RTX\\u2122 4090 \\u4e2d\\u6587 | -15.0 ms/step" in console()


def test_a_build_that_fails_on_a_gpu_and_in_a_folder_with_other_letters(console, monkeypatch):
    monkeypatch.setattr(build, "_modules", {})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=None: GPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: (_ for _ in ()).throw(nvrtc.KernelError("D:\\Künstler\\x.cu…")))
    build.unavailable(torch.device("cuda", 0), torch.bfloat16)
    assert r"D:\K\xfcnstler\x.cu..." in console()


def test_a_reason_that_a_node_stepped_aside_for(console):
    fast_path.stood_aside("FLUX Fast Path", type("Modèle", (), {})(), None)
    assert r"Mod\xe8le is not a ComfyUI MODEL" in console()


def test_a_second_copy_in_a_folder_with_other_letters(console, monkeypatch):
    monkeypatch.setattr(copies, "sys", type("sys", (), {"modules": {"ünï": type("module", (), {copies.MARK: True})}}))
    assert copies.another_is_active("中文") and r"\xfcn\xef is in use" in console()


def test_a_traceback_is_in_ascii_too(console):
    try:
        raise OSError("C:\\Künstler")
    except OSError:
        LOG.warning("a fused operation failed", exc_info=True)
    assert "Traceback" in console() and r"K\xfcnstler" in console()


def call_sites():
    for path in sorted(p for folder in ("fusion", "kernels", "nodes") for p in (PACK / folder).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and getattr(node.func.value, "id", None) == "log":
                yield pytest.param(node, id=f"{path.name}:{node.lineno}")


@pytest.mark.parametrize("call", list(call_sites()))
def test_every_call_that_logs_comes_out_whole_whatever_it_is_given(console, call):
    words = call.args[0].value
    getattr(LOG, call.func.attr)(words, *[f"−1 · {GPU} 2×"] * words.count("%"))
    assert console().count(r"-1 | NVIDIA GeForce RTX\u2122 4090 \u4e2d\u6587 2x") == words.count("%")


def test_every_logger_of_the_pack_is_the_one_with_the_filter():
    for path in (p for folder in ("fusion", "kernels", "nodes") for p in (PACK / folder).glob("*.py")):
        text = path.read_text(encoding="utf-8")
        assert text.count("getLogger(") == text.count('getLogger("flux_fast_path")'), path.name


def test_the_line_of_a_run_has_nothing_left_to_escape():
    assert ascii_line("57/57 blocks · 114 gates · −27.1 ms/step · 2 × NVIDIA H200 …") == "57/57 blocks | 114 gates | -27.1 ms/step | 2 x NVIDIA H200 ..."


def test_a_record_that_logging_itself_cannot_read_is_left_to_logging(monkeypatch):
    monkeypatch.setattr(logging, "raiseExceptions", False)
    LOG.warning("%d", "no number")

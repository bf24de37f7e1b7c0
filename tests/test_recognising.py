"""Which models are FLUX.1 in code that was checked, and the reason that every other one gets. COMFYUI_PATH adds core's own classes."""
import functools
import importlib.util
import inspect
import linecache

import comfy_harness as harness
import pytest
import torch
from flux_fast_path.bench import reference_flux
from flux_fast_path.fusion import recognise, session
from flux_fast_path.fusion.recognise import KNOWN_BLOCKS, KNOWN_LOOPS, block_digest, digest, loop_digest, why_not_model

CORE_CHANGED = "core version not recognised"


@pytest.fixture
def model():
    return reference_flux.reference_flux("tiny")


def test_the_reference_transformer_is_recognised(model):
    assert why_not_model(model) is None
    assert KNOWN_BLOCKS[block_digest(reference_flux.DoubleStreamBlock, reference_flux.SingleStreamBlock)] == "bench/reference_flux.py"
    assert KNOWN_LOOPS[loop_digest(reference_flux.Flux)] == "bench/reference_flux.py"


@pytest.mark.comfyui
def test_this_core_is_recognised(comfy):
    from comfy.ldm.flux.layers import DoubleStreamBlock, SingleStreamBlock
    from comfy.ldm.flux.model import Flux
    assert "ComfyUI" in KNOWN_BLOCKS[block_digest(DoubleStreamBlock, SingleStreamBlock)]
    assert "ComfyUI" in KNOWN_LOOPS[loop_digest(Flux)]


def named(name, *bases, **attributes):
    return type(name, bases or (torch.nn.Module,), attributes)


class Chroma(reference_flux.Flux):
    pass


def in_place(model):
    model.compile(backend="eager")
    return model


LOOK_ALIKES = {
    "nothing": (lambda m: None, "not a torch module"),
    "an object": (lambda m: object(), "not a torch module"),
    "a linear": (lambda m: torch.nn.Linear(2, 2), "Linear is not FLUX.1"),
    "UNetModel": (lambda m: named("UNetModel")(), "UNetModel is not FLUX.1"),
    "Chroma": (lambda m: Chroma("tiny", **reference_flux._COMMON, **reference_flux.SIZES["tiny"]), "Chroma is not FLUX.1"),
    "no blocks at all": (lambda m: named("Flux")(), "no double or no single blocks"),
    "OptimizedModule": (lambda m: torch.compile(m, backend="eager"), "compiled"),
    "another model compiled": (lambda m: torch.compile(named("UNetModel")(), backend="eager"), "UNetModel is not FLUX.1"),
    "another model compiled in place": (lambda m: in_place(named("UNetModel")()), "UNetModel is not FLUX.1"),
    "a Flux compiled in place": (in_place, "compiled"),
}


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_a_look_alike_gets_a_reason(model, name):
    make, reason = LOOK_ALIKES[name]
    assert reason in why_not_model(make(model))


def delete(path):
    def act(model):
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, None)

    return act


def replace(path, module):
    def act(model):
        parent, _, name = path.rpartition(".")
        model.get_submodule(parent)._modules[name] = module(model)

    return act


CHANGES = {
    "global modulation (FLUX.2)": (lambda m: setattr(m.params, "global_modulation", True), "global_modulation"),
    "SiLU (FLUX.2)": (lambda m: setattr(m.params, "mlp_silu_act", True), "mlp_silu_act"),
    "yak": (lambda m: setattr(m.params, "yak_mlp", True), "yak_mlp"),
    "double blocks only": (lambda m: m.single_blocks.__init__(), "no double or no single blocks"),
    "no img_mod": (delete("double_blocks.1.img_mod"), "a double block has no img_mod"),
    "no txt_mlp": (delete("double_blocks.0.txt_mlp"), "a double block has no txt_mlp"),
    "no modulation": (delete("single_blocks.2.modulation"), "a single block has no modulation"),
    "no linear1": (delete("single_blocks.0.linear1"), "a single block has no linear1"),
    "one block of another class": (replace("double_blocks.1", lambda m: named("Other", reference_flux.DoubleStreamBlock)(256, 2, 4.0)), "different classes"),
    "blocks of another kind": (replace("single_blocks.0", lambda m: torch.nn.Identity()), "different classes"),
    "a compiled block": (lambda m: m.double_blocks[0].compile(backend="eager"), "compiled"),
    "compiled blocks": (lambda m: [replace(f"single_blocks.{i}", lambda m, i=i: torch.compile(m.single_blocks[i], backend="eager"))(m) for i in range(3)], "compiled"),
    "no qkv": (delete("double_blocks.0.img_attn.qkv"), "qkv"),
    "no query_norm": (delete("single_blocks.0.norm.query_norm"), "query_norm"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_structure_gets_a_reason(model, name):
    change, reason = CHANGES[name]
    change(model)
    assert reason in (why_not_model(model) or "")


# --- code ---


def source_of(name, text, path):
    """A module made of `text`; its source can be read back, as that of any file."""
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SOURCE = inspect.getsource(reference_flux)
EDITS = {
    "an extra keyword": ("attn_mask=None, modulation_dims_img=None", "attn_mask=None, extra=None, modulation_dims_img=None"),
    "another formula": ("x += apply_mod(output, mod.gate, None, modulation_dims)", "x += 2 * apply_mod(output, mod.gate, None, modulation_dims)"),
    "apply_mod": ("return tensor * m_mult if m_add is None else", "return m_mult * tensor if m_add is None else"),
    "Modulation": ("out = self.lin(F.silu(vec))", "out = self.lin(F.gelu(vec))"),
    "QKNorm": ("return self.query_norm(q).to(v), self.key_norm(k).to(v)", "return self.query_norm(q), self.key_norm(k)"),
    "the last layer": ("return self.linear(apply_mod(self.norm_final(x), (1 + scale), shift, modulation_dims))", "h = self.norm_final(x); x.zero_(); return self.linear(apply_mod(h, (1 + scale), shift, modulation_dims))"),
    "attention": ("q, k = (apply_rope_old_core if old_core else apply_rope)(q, k, pe)", "q, k = apply_rope(q, k, pe)"),
}


@pytest.mark.parametrize("name", EDITS)
def test_a_core_whose_code_differs_is_not_recognised(name, tmp_path):
    old, new = EDITS[name]
    assert SOURCE.count(old) >= 1
    changed = source_of("changed_flux", SOURCE.replace(old, new), tmp_path / "changed_flux.py")
    assert CORE_CHANGED in (why_not_model(changed.reference_flux("tiny")) or "")


def test_comments_and_layout_do_not_matter(tmp_path):
    lines = [f"{line}  # a remark" if line.strip().endswith((")", ":")) and '"""' not in line else line for line in SOURCE.splitlines()]
    same = source_of("commented_flux", "\n".join(lines).replace("\n\n", "\n\n\n"), tmp_path / "commented_flux.py")
    assert why_not_model(same.reference_flux("tiny")) is None


def test_code_without_source_is_not_recognised():
    space = {"__name__": "made_at_run_time"}
    exec(compile(SOURCE, "<made at run time>", "exec"), _module(space))  # noqa: S102
    assert CORE_CHANGED in why_not_model(space["reference_flux"]("tiny"))


def _module(space):
    import sys
    import types
    sys.modules[space["__name__"]] = types.ModuleType(space["__name__"])
    return space


def test_code_that_names_a_file_it_was_not_read_from_is_not_recognised():
    space = {"__name__": "made_at_run_time"}
    exec(compile(SOURCE.replace("x += apply_mod(output, mod.gate", "x -= apply_mod(output, mod.gate"), reference_flux.__file__, "exec"), _module(space))  # noqa: S102
    linecache.checkcache()
    assert CORE_CHANGED in (why_not_model(space["reference_flux"]("tiny")) or "")


def wrapped(original):
    @functools.wraps(original)
    def forward(*args, **kwargs):
        return original(*args, **kwargs)

    return forward


class Callable:
    def __init__(self, function):
        functools.update_wrapper(self, function)
        self.function = function

    def __call__(self, *args, **kwargs):
        return self.function(*args, **kwargs)


@pytest.mark.parametrize("wrap", [wrapped, lambda f: (lambda *a, **k: f(*a, **k)), functools.partialmethod, Callable, functools.lru_cache, torch.compile, torch.no_grad()],
                         ids=["functools.wraps", "lambda", "partialmethod", "callable object", "lru_cache", "torch.compile", "no_grad"])
@pytest.mark.parametrize("cls", [reference_flux.DoubleStreamBlock, reference_flux.SingleStreamBlock, reference_flux.Modulation, reference_flux.QKNorm], ids=lambda c: c.__name__)
def test_a_forward_wrapped_by_another_pack_is_not_recognised(model, cls, wrap, monkeypatch):
    monkeypatch.setattr(cls, "forward", wrap(cls.forward))
    assert f"core version not recognised: another pack has changed its {cls.__name__}.forward" in why_not_model(model)


@pytest.mark.parametrize("name", ["apply_mod", "attention"])
def test_a_helper_replaced_by_another_pack_is_not_recognised(model, name, monkeypatch):
    monkeypatch.setattr(reference_flux, name, wrapped(getattr(reference_flux, name)))
    assert f"core version not recognised: another pack has changed its {name}" in why_not_model(model)


def test_a_block_with_a_forward_of_its_own_keeps_it(model):
    """Recognised as FLUX.1 all the same: that block alone stays as it is, the others are mounted."""
    block = model.double_blocks[0]
    block.forward = theirs = wrapped(block.forward)
    assert why_not_model(model) is None
    notes = []
    with session.mounted(session.plan_for(model), note=notes.append) as count:
        assert block.__dict__["forward"] is theirs and count.mounted == len(model.double_blocks) + len(model.single_blocks) - 1
    assert block.__dict__["forward"] is theirs and any("another pack" in note for note in notes)


def test_a_loop_replaced_by_another_pack_does_not_share_silu(model, monkeypatch):
    monkeypatch.setattr(reference_flux.Flux, "forward", wrapped(reference_flux.Flux.forward))
    assert loop_digest(type(model)) not in KNOWN_LOOPS


def test_a_digest_asks_each_function_once(monkeypatch):
    digest(harness.snapshot)
    monkeypatch.setattr(recognise, "_source_tokens", None)
    assert digest(harness.snapshot) == digest(harness.snapshot)

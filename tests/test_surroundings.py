"""What lies outside the model: where it changes what eager torch computes, or wants to see each operation, core runs as it is."""
import pytest
import torch
import torch.nn.functional as F
from comfy_harness import assert_bits_equal, assert_untouched, snapshot
from flux_fast_path.fusion import surroundings
from flux_fast_path.fusion.rope import AttentionLayouts
from flux_fast_path.kernels.qk_norm_rope import Stream
from fusion_scene import DEVICE, assert_same, noise, ours, report_of, run
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = pytest.mark.usefixtures("one_thread")


class Watched(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Counted(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("around, reason", [
    (lambda: torch.autocast(DEVICE, torch.bfloat16), "torch.autocast is on"),
    (Watched, "a Watched of another pack watches"),
    (Counted, "a Counted of another pack watches"),
], ids=["autocast", "function mode", "dispatch mode"])
def test_where_torch_itself_behaves_otherwise_core_runs_as_it_is(fused, patcher, around, reason):
    before = snapshot(patcher)
    with around():
        wanted = run(patcher)
    mine = ours(patcher)
    with around():
        assert_bits_equal(run(mine), wanted)
    told = report_of(mine)
    assert told["state"] == "stepped_aside" and reason in told["reason"] and not fused
    assert_untouched(patcher, before)
    assert assert_same(patcher)["state"] == "fused" and fused, "and fused again once it is over"


@pytest.mark.parametrize("owner, name", [(F, "layer_norm"), (F, "gelu"), (torch, "addcmul"), (torch, "cat")])
def test_a_torch_function_that_another_pack_replaces_while_we_are_there_is_theirs(fused, patcher, monkeypatch, owner, name):
    """Their picture is what it would be without us, whether or not their function differs from torch's."""
    plain, original = run(patcher), getattr(owner, name)
    mine = ours(patcher)
    assert_bits_equal(run(mine), plain)
    fused.clear()
    monkeypatch.setattr(owner, name, lambda *args, **kwargs: original(*args, **kwargs) * 1.5)
    wanted = run(patcher)
    assert not torch.equal(wanted, plain)
    assert_bits_equal(run(mine), wanted)
    assert name in report_of(mine)["reason"] and not fused


def test_a_default_device_is_nothing_to_step_aside_for():
    with torch.inference_mode(), torch.device(DEVICE):
        assert surroundings.why_not(DEVICE) is None


# --- attention, through which the memory order of q and k is proven ---


def proven(layouts):
    """Whether token-major q and k would be handed on, for one shape of two streams; the operation itself is torch's here."""
    text, image, v = noise(1, 4, 3 * 256, seed=1), noise(1, 12, 3 * 256, seed=2), noise(1, 2, 16, 128, seed=3)
    streams = tuple(Stream(base, 0, 256, 2, 128, None, None) for base in (text, image))
    q, k = (torch.cat([base.view(1, -1, 3, 2, 128)[:, :, i] for base in (text, image)], 1) for i in range(2))  # (1, 16, 2, 128)

    def both(token_major):
        return [x.transpose(1, 2) if token_major else x.transpose(1, 2).contiguous() for x in (q, k)]

    return layouts.proven(both, streams, [v])


def attention(q, k, v, pe=None):
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


@pytest.fixture
def layouts(inference):
    made = AttentionLayouts(lambda: attention)
    made.verdicts = {}  # not those of other tests
    return made


def test_torchs_own_attention_takes_either_memory_order(layouts):
    assert proven(layouts) and list(layouts.verdicts.values()) == [True]


def test_an_attention_that_a_pack_put_in_torchs_place_gets_cores_memory_order(layouts, monkeypatch):
    """It may sum over tokens in the order they lie in; one sample would not tell."""
    original, asked = F.scaled_dot_product_attention, []
    with monkeypatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", lambda *args: asked.append(1) or original(*args))
        assert not proven(layouts) and not asked and not layouts.verdicts
    assert proven(layouts)


def test_another_attention_backend_proves_its_own_order(layouts):
    assert proven(layouts)
    was = torch.backends.cuda.flash_sdp_enabled()
    torch.backends.cuda.enable_flash_sdp(not was)
    try:
        assert proven(layouts) and len(layouts.verdicts) == 2
    finally:
        torch.backends.cuda.enable_flash_sdp(was)


def strict(q, k, v, pe=None, asked=[]):  # noqa: B006
    asked.append(1)
    if not q.is_contiguous():
        raise ValueError("q is not contiguous")
    return attention(q, k, v)


def test_an_attention_that_takes_only_cores_memory_order_is_asked_once(layouts, caplog):
    layouts.attention = lambda: strict
    assert not proven(layouts) and not proven(layouts) and not caplog.records
    assert len(strict.__defaults__[1]) == 2, "once in each order"


def full(q, k, v, pe=None):
    raise torch.cuda.OutOfMemoryError


def test_without_room_for_a_second_attention_the_next_call_asks_again(layouts):
    layouts.attention = lambda: full
    assert not proven(layouts) and not layouts.verdicts
    layouts.attention = lambda: attention
    assert proven(layouts)

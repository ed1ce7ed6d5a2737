"""megamoe.attention on a CPU: right, an operator as torch wants it, and plain about what it does not do."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch.autograd import forward_ad

import megamoe
from conformance.fakes.device_on_machine import device_on_machine
from megamoe.contract import UnsupportedError
from megamoe.torch_ops import attention as module
from megamoe.torch_ops.calls import DeviceCall


def qkv(t: int, s_k: int, heads: int = 2, kv_heads: int = 1, hd: int = 64) -> tuple[torch.Tensor, ...]:
    source = torch.Generator().manual_seed(t * s_k)
    shapes = (1, heads, t, hd), (1, kv_heads, s_k, hd), (1, kv_heads, s_k, hd)
    return tuple(torch.randn(shape, generator=source).bfloat16() for shape in shapes)


def by_hand(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, window: int | None, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    t, s_k, group = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    k, v = (one.double().repeat_interleave(group, dim=1) for one in (k, v))
    position = torch.arange(t)[:, None] + s_k - t
    key = torch.arange(s_k)
    hidden = (causal & (key > position)) | (key <= position - (window or 1 << 30))
    logits = (q.double() @ k.mT * (scale or q.shape[3] ** -0.5)).masked_fill(hidden, -torch.inf)
    return logits.softmax(dim=-1) @ v, logits.logsumexp(dim=-1)


@pytest.mark.parametrize(
    ("causal", "window", "scale"), [(False, None, None), (True, None, 0.3), (True, 5, None)], ids=str
)
def test_it_is_what_the_definition_says(causal: bool, window: int | None, scale: float | None) -> None:
    q, k, v = qkv(3, 20)
    o, lse = megamoe.attention(q, k, v, causal=causal, window=window, scale=scale, return_lse=True)
    wanted, wanted_lse = by_hand(q, k, v, causal=causal, window=window, scale=scale)
    assert (o.double() - wanted).abs().max() < 0.02, "o"
    assert (lse.double() - wanted_lse).abs().max() < 1e-3, "lse"
    alone = megamoe.attention(q, k, v, causal=causal, window=window, scale=scale)
    assert torch.equal(alone, o), "asking for lse changes o"


def test_tensors_of_any_strides_are_read() -> None:
    q, k, v = (one.transpose(1, 2).contiguous().transpose(1, 2) for one in qkv(3, 20))
    shifted = torch.cat((torch.zeros(1), k.flatten())).bfloat16()[1:].view(k.shape)
    assert not q.is_contiguous()
    assert shifted.data_ptr() % 16
    wanted = megamoe.attention(*qkv(3, 20))
    assert torch.equal(megamoe.attention(q, shifted, v), wanted), "a copy was not made, or of the wrong elements"


def test_it_is_an_operator_as_torch_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # What is asked here is asked of the operator; the kernel would run a dozen times.
    monkeypatch.setattr(module, "_call_of", lambda lse, *given: lambda tensors: _by_torch(*tensors))
    given, options = qkv(3, 20), {"causal": True}
    torch.library.opcheck(torch.ops.megamoe.attention.default, given, options)
    torch.library.opcheck(
        torch.ops.megamoe.attention_with_lse.default, given, options, test_utils=("test_schema", "test_faketensor")
    )

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return megamoe.attention(q * 2, k, v, causal=True) + 1

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*given), step(*given)), "torch.compile changes what it computes"


def _by_torch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    o, lse = by_hand(q, k, v, causal=True, window=None, scale=None)
    return o.bfloat16(), lse.float()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("op", [megamoe.attention, torch.ops.megamoe.attention])
def test_a_derivative_is_refused_however_it_is_asked_for(
    op: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_call_of", lambda lse, *given: lambda tensors: _by_torch(*tensors))
    q, k, v = qkv(3, 20)

    def dual() -> object:
        with torch.no_grad(), forward_ad.dual_level():
            return op(forward_ad.make_dual(q, q), k, v)

    for call in (
        dual,
        lambda: torch.func.jvp(lambda one: op(one, k, v), (q,), (q,)),
        lambda: torch.func.grad(lambda one: op(q, k, one).float().sum())(v),
        lambda: op(q, k.clone().requires_grad_(), v),
        lambda: torch.compile(op, backend="aot_eager")(q.clone().requires_grad_(), k, v),
    ):
        with pytest.raises(RuntimeError, match="has no backward, and no forward derivative"):
            call()
    with torch.no_grad():
        assert not op(q.clone().requires_grad_(), k, v).requires_grad


@pytest.mark.parametrize("empty", ["batch", "t"])
def test_nothing_has_an_empty_output(empty: str) -> None:
    q, k, v = qkv(3, 20)
    q, k, v = (q[:, :, :0], k, v) if empty == "t" else (q[:0], k[:0], v[:0])
    o, lse = megamoe.attention(q, k, v, causal=True, return_lse=True)
    assert (o.shape, o.dtype, lse.shape, lse.dtype) == (q.shape, torch.bfloat16, q.shape[:3], torch.float32)
    with pytest.raises(ValueError, match="window=0"):
        megamoe.attention(q, k, v, window=0)


def _large() -> object:
    return megamoe.attention(*(one.expand(256, -1, -1, -1) for one in qkv(1024, 4096, 1)))


@pytest.mark.parametrize(
    ("call", "error", "sentence"),
    [
        (
            lambda q, k, v: megamoe.attention(q.float(), k, v),
            ValueError,
            r"must be bfloat16.*q float32 \[1, 2, 3, 64\]",
        ),
        (lambda q, k, v: megamoe.attention(q[0], k, v), ValueError, "four dimensions"),
        (lambda q, k, v: megamoe.attention(q, k, v[:, :, 1:]), ValueError, "k and v must have one shape"),
        (lambda q, k, v: megamoe.attention(q[..., :32], k[..., :32], v[..., :32]), ValueError, "64, 128, 256, 512"),
        (lambda q, k, v: megamoe.attention(q, k, v, window=0), ValueError, "window=0"),
        (lambda q, k, v: megamoe.attention(q, k, v, scale=9.0), ValueError, "0.001..4.0"),
        (
            lambda q, k, v: megamoe.attention(q, k, v, scale="1"),
            ValueError,
            "scale is '1'; it must be a number",
        ),
        (lambda q, k, v: megamoe.attention(q, k, v, window=1.5), ValueError, "window is 1.5; it must be an integer"),
        (lambda q, k, v: megamoe.attention(q, k, v, causal="no"), ValueError, "causal is 'no'; it must be True or"),
        (lambda q, k, v: megamoe.attention(q, k, v, backend=7), ValueError, "backend is 7; it must be text or None"),
        (lambda q, k, v: megamoe.attention(q.tolist(), k, v), ValueError, "it must be a tensor"),
        (lambda q, k, v: megamoe.attention(q, k.expand(1, 3, -1, -1), v.expand(1, 3, -1, -1)), ValueError, "heads"),
        (lambda q, k, v: megamoe.attention(q, k, v, backend="none"), UnsupportedError, "no backend named 'none'"),
        (lambda q, k, v: megamoe.attention(q.requires_grad_(), k, v), RuntimeError, "has no backward"),
        (lambda q, k, v: _large(), ValueError, "which takes small sizes"),
        (lambda q, k, v: megamoe.attentoin(q, k, v), AttributeError, "its operators are attention"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_it_does_not_do_is_said(call: Callable[..., object], error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        call(*qkv(3, 20))


def test_a_fake_tensor_is_checked_too() -> None:
    with pytest.raises(ValueError, match="must be bfloat16"):
        torch.ops.megamoe.attention(*(one.float().to("meta") for one in qkv(3, 20)))
    with pytest.raises(ValueError, match="heads of q must be a multiple"):
        torch.ops.megamoe.attention(*(one.to("meta") for one in qkv(3, 20, heads=2, kv_heads=3)))


@pytest.mark.parametrize("op", [megamoe.attention, torch.ops.megamoe.attention, torch.ops.megamoe.attention_with_lse])
@pytest.mark.parametrize("odd", range(3))
def test_tensors_of_several_devices_are_no_fakes(op: Callable[..., object], odd: int) -> None:
    given = [one.to("meta") if index == odd else one for index, one in enumerate(qkv(3, 20))]
    with pytest.raises(ValueError, match="q, k and v must be on one device; they are on"):
        op(*given)


def test_megamoe_alone_imports_neither_torch_nor_a_backend() -> None:
    script = "import megamoe, sys; print([name for name in sys.modules if name.split('.')[0] in ('torch', 'backends')])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def _device_call(given: tuple[torch.Tensor, ...], backend: str) -> DeviceCall:
    shapes, dtypes = (one.shape for one in given), (one.dtype for one in given)
    call = module._call_of.__wrapped__(True, *shapes, *dtypes, 0, 0, 0, True, None, None, backend)
    assert isinstance(call, DeviceCall)
    return call


def test_a_call_on_a_device_computes_the_same_and_gives_its_workspaces_back() -> None:
    given = qkv(1, 520)
    with device_on_machine() as device:
        call = _device_call(given, "ptx")
        device.know(*given)
        o, lse = call(given)
        other = tuple(one.flip(2).contiguous() for one in given)
        device.know(*other)
        again = call(other)
        assert device.done["launched"] == 2
        assert device.live() == 5, "more than the outputs and the block that small workspaces share is kept"
        workspaces = device.given[5:]
        call(given)
        assert device.given[5:] == workspaces, "small workspaces share no block"
        device.capturing = True
        call(given)
        assert not set(device.given[5:]) & set(workspaces), "a graph would share its workspaces with other calls"
        device.capturing = False
        device.fails = True
        with pytest.raises(RuntimeError, match="the driver refuses"):
            call(given)
        strided = [one.mT.contiguous().mT for one in given]
        device.fails = False
        device.know(*strided)
        copied = call(strided)
    for found, tensors in (((o, lse), given), (again, other), (copied, given)):
        wanted, wanted_lse = by_hand(*tensors, causal=True, window=None, scale=None)
        assert (found[0].double() - wanted).abs().max() < 0.02, "the call used tensors of another call"
        assert (found[1].double() - wanted_lse).abs().max() < 1e-3


def test_a_first_call_in_a_graph_is_refused_with_the_way_out() -> None:
    with device_on_machine() as device:
        device.capturing = True
        with pytest.raises(RuntimeError, match="call it once before"):
            _device_call(qkv(1, 30), "ptx")


def test_a_device_that_nothing_is_written_for_is_said() -> None:
    with device_on_machine() as device, pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "unavailable", lambda target: "this is an NVIDIA T4 with 7.5")
        with pytest.raises(UnsupportedError, match=r"^this is an NVIDIA T4 with 7.5$"):
            _device_call(qkv(1, 30), "ptx")

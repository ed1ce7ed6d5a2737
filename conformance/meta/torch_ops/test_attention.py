"""megamoe.attention on a CPU: correct, a well-formed torch operator, and explicit about what it does not support."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch.autograd import forward_ad

import megamoe
from conformance.fakes.device_on_machine import device_on_machine
from megamoe.contract import NoProgramError, UnsupportedError
from megamoe.torch_ops import attention as module
from megamoe.torch_ops import sequences
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
    # These tests exercise the operator. The kernel itself would run a dozen times.
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


def of_sequences(page: int, **changed: object) -> tuple[tuple[torch.Tensor, ...], megamoe.SequenceLengths]:
    """q, k and v of three sequences, one without queries, and their lengths. What is in no sequence is NaN."""
    queries, keys, source = [2, 0, 3], [20, 9, 5], torch.Generator().manual_seed(page)
    q = torch.randn(5, 2, 64, generator=source).bfloat16()
    starts = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    if not page:
        k, v = (torch.randn(34, 1, 64, generator=source).bfloat16() for _ in range(2))
        lengths = {"cu_seqlens_k": torch.tensor([0, 20, 29, 34], dtype=torch.int32)}
    else:
        k, v = (torch.full((6, page, 1, 64), torch.nan).bfloat16() for _ in range(2))
        table = torch.tensor([[4, 0, 99], [2, -1, -1], [1, 99, -1]], dtype=torch.int32)
        for number, length in enumerate(keys):
            for key in range(length):
                for cache in (k, v):
                    cache[table[number, key // page], key % page] = torch.randn(1, 64, generator=source)
        lengths = {"seqused_k": torch.tensor(keys, dtype=torch.int32), "block_table": table}
    given = {"cu_seqlens_q": starts, "max_seqlen_q": max(queries), "max_seqlen_k": 24, **lengths, **changed}
    return (q, k, v), megamoe.SequenceLengths(**given)


def keys_of(cache: torch.Tensor, lengths: megamoe.SequenceLengths, number: int) -> torch.Tensor:
    """[1, kv_heads, keys, hd] of one sequence."""
    if lengths.cu_seqlens_k is not None:
        return cache[slice(*lengths.cu_seqlens_k[number : number + 2].tolist())].transpose(0, 1)[None]
    assert lengths.block_table is not None
    assert lengths.seqused_k is not None
    length, page = int(lengths.seqused_k[number]), cache.shape[1]
    pages = lengths.block_table[number, : -(-length // page)].long()
    return cache[pages].flatten(0, 1)[:length].transpose(0, 1)[None]


@pytest.mark.parametrize("page", [0, 16])
def test_sequences_are_each_what_the_definition_says(page: int) -> None:
    (q, k, v), lengths = of_sequences(page)
    o, lse = megamoe.attention(q, k, v, causal=True, lengths=lengths, return_lse=True)
    assert (o.shape, lse.shape) == (q.shape, q.shape[:2]), "o is as q, lse a number for each row of it"
    for number, (start, end) in enumerate(((0, 2), (2, 2), (2, 5))):
        own = q[start:end].transpose(0, 1)[None]
        wanted, wanted_lse = by_hand(
            own, keys_of(k, lengths, number), keys_of(v, lengths, number), causal=True, window=None, scale=None
        )
        off = (o[start:end].double() - wanted[0].transpose(0, 1)).abs()
        assert not len(off) or off.max() < 0.02, f"o of sequence {number}"
        off = (lse[start:end].double() - wanted_lse[0].mT).abs()
        assert not len(off) or off.max() < 1e-3, f"lse of sequence {number}"


def test_pages_are_taken_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequences, "fmha_call", lambda sizes, inputs, device, *_: (sizes.page_size, inputs, device))
    (q, k, v), lengths = of_sequences(16)
    tensors = (q, k, v, None, lengths.cu_seqlens_q, None, lengths.seqused_k, lengths.block_table)
    given = tuple(None if one is None else sequences.Given(one.shape, one.dtype, 0) for one in tensors)
    asked = sequences._call_of.__wrapped__(given, 3, 24, True)
    assert asked == (16, ("q", "k", "v", "cu_seqlens_q", "seqused_k", "block_table"), 0)


def test_sequences_on_two_devices_are_refused() -> None:
    """Checked in the operator itself: the dispatcher passes it CPU and GPU tensors together."""
    (q, k, v), lengths = of_sequences(0)
    tensors = (q, k, v, None, lengths.cu_seqlens_q, lengths.cu_seqlens_k, None, None)
    given = [None if one is None else sequences.Given(one.shape, one.dtype, 0) for one in tensors]
    given[5] = sequences.Given(torch.Size([4]), torch.int32, -1)
    with pytest.raises(ValueError, match="q, k, v, sinks and lengths must be on one device"):
        sequences._call_of(tuple(given), 3, 24, True)


def test_a_latent_tensor_and_sinks() -> None:
    q, k, _ = qkv(3, 20)
    sinks = torch.tensor([1.0, 4.0])
    o, lse = megamoe.attention(q, k, sinks=sinks, return_lse=True)
    plain, plain_lse = by_hand(q, k, k, causal=False, window=None, scale=None)
    wanted_lse = torch.logaddexp(plain_lse, sinks.double()[:, None])
    assert (lse.double() - wanted_lse).abs().max() < 1e-3, "lse counts the sink"
    assert (o.double() - plain * (plain_lse - wanted_lse).exp()[..., None]).abs().max() < 0.02, "the sink has no value"


def test_sequences_are_an_operator_as_torch_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def call(*given: object) -> Callable[..., list[torch.Tensor]]:
        return lambda tensors: [tensors[0] * 2, tensors[0].float().sum(dim=-1)]

    monkeypatch.setattr(sequences, "_call_of", call)
    for page in (0, 16):
        (q, k, v), lengths = of_sequences(page)
        tensors = (lengths.cu_seqlens_q, lengths.cu_seqlens_k, lengths.seqused_k, lengths.block_table)
        given = (q, k, v, None, *tensors, 3, 24, True)
        torch.library.opcheck(torch.ops.megamoe.sequence_attention.default, given)
        compiled = torch.compile(
            lambda *qkv, lengths=lengths: megamoe.attention(*qkv, lengths=lengths), backend="aot_eager", fullgraph=True
        )
        assert torch.equal(compiled(q, k, v), q * 2), "torch.compile changes what it computes"


@pytest.mark.parametrize(
    ("page", "changed", "sentence"),
    [
        (0, {"cu_seqlens_k": None}, "either cu_seqlens_k, or seqused_k and block_table"),
        (16, {"block_table": None}, "either cu_seqlens_k, or seqused_k and block_table"),
        (0, {"cu_seqlens_q": torch.tensor([0, 2, 2, 5])}, "cu_seqlens_q must be int32"),
        (0, {"cu_seqlens_k": torch.tensor([0, 34], dtype=torch.int32)}, r"cu_seqlens_k must have the shape \[4\]"),
        (0, {"max_seqlen_k": 19}, "must go from 0 to 34, the tokens of k, in steps of 0 to 19, max_seqlen_k"),
        (0, {"max_seqlen_k": "24"}, "max_seqlen_k is '24'; it must be an integer"),
        (16, {"max_seqlen_k": 49}, r"block_table must be \[3, 4 or more\] for 49 keys"),
        (16, {"seqused_k": torch.tensor([20, 9, 33], dtype=torch.int32)}, "seqused_k must be from 0 to 24"),
        (
            16,
            {"seqused_k": torch.tensor([20, 17, 5], dtype=torch.int32)},
            r"name pages from 0 to 5; it names \[2, -1\]",
        ),
        (16, {"max_seqlen_q": 1}, r"breaks the constraint .*t is max_seqlen_q, 1, "),
        (0, {"max_seqlen_k": 65537}, r"outside of its limits.* s_k max_seqlen_k, 65537"),
    ],
)
def test_lengths_that_cannot_be_are_refused(page: int, changed: dict[str, object], sentence: str) -> None:
    (q, k, v), lengths = of_sequences(page, **changed)
    with pytest.raises(ValueError, match=sentence):
        megamoe.attention(q, k, v, lengths=lengths)


def test_no_query_at_all_has_an_empty_output() -> None:
    (q, k, v), lengths = of_sequences(0, cu_seqlens_q=torch.zeros(4, dtype=torch.int32))
    o, lse = megamoe.attention(q[:0], k, v, lengths=lengths, return_lse=True)
    assert (o.shape, lse.shape) == ((0, 2, 64), (0, 2)), "nothing was asked for"


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
        (
            lambda q, k, v: megamoe.attention(q, k, v, backend="conformance.fakes.adversaries:BUILDS_NOTHING"),
            NoProgramError,
            "BUILDS_NOTHING' returned None; it must return a megamoe.contract.Program",
        ),
        (lambda q, k, v: megamoe.attention(q.requires_grad_(), k, v), RuntimeError, "has no backward"),
        (lambda q, k, v: _large(), ValueError, "which takes small sizes"),
        (
            lambda q, k, v: megamoe.attention(q, k, v, lengths=(3, 20)),
            ValueError,
            "it must be a megamoe.SequenceLengths",
        ),
        (lambda q, k, v: megamoe.attention(q, k, v, sinks=torch.ones(3)), ValueError, "a sink for each of 2 heads"),
        (lambda q, k, v: megamoe.attention(q, k, sinks=torch.ones(2).double()), ValueError, "sink must be float32"),
        (lambda q, k, v: megamoe.attention(q, 7, sinks=torch.ones(2)), ValueError, "k is 7; it must be a tensor"),
        (lambda q, k, v: megamoe.attentoin(q, k, v), AttributeError, "its operators are attention"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_it_does_not_do_is_said(call: Callable[..., object], error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        call(*qkv(3, 20))


def test_a_reason_that_holds_of_every_target_is_said_once() -> None:
    with pytest.raises(UnsupportedError) as told:
        megamoe.attention(*qkv(3, 20), backend="nope")
    assert str(told.value).count("there is no backend named 'nope'") == 1, f"it is said again: {told.value}"


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
        device.stream = 1
        call(given)
        beside = device.given[5:]
        assert not set(beside) & set(workspaces), "streams, whose calls run side by side, share them"
        device.capturing = True
        call(given)
        shared = {*workspaces, *beside}
        assert not set(device.given[5:]) & shared, "a graph would share its workspaces with other calls"
        device.capturing, device.stream = False, 0
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

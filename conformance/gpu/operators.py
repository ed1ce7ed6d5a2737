"""megamoe's torch operators on a device: python -m conformance.gpu.operators FILE [WORD ...]

Checks them against torch, in torch.compile, CUDA graphs, threads and streams, and without a wait for the device;
measures the CPU time of a warm call. Writes FILE as JSON and prints what failed; the status is the number of failures.
A WORD picks the steps with that word in their names.
"""

from __future__ import annotations

import itertools
import json
import math
import platform
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import megamoe
from megamoe.codec.nvfp4 import global_scale, quantise, swizzle_scales, unswizzle_scales
from megamoe.torch_ops import attention as attention_op
from megamoe.torch_ops.calls import DeviceCall
from megamoe.torch_ops.quantise import quantised_tokens

WARM_UP, ROUNDS, CALLS = 15, 60, 200
"""Warm-up batches, counted batches, and calls a batch. The device is idle before each batch, and its queue never fills
up."""
MIN_COSINE = 0.9999
MIN_NVFP4_COSINE = 0.98
"""Lower limit for a layer against one without quantised activations."""
BACKENDS = ("cutedsl", "ptx")


def cpu_us(call: Callable[[], object]) -> dict[str, float]:
    """Microseconds of CPU time of a warm `call`: the median and the best of the batches' means."""
    means: list[float] = []
    with torch.inference_mode():
        for _ in range(ROUNDS + WARM_UP):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            means.append((time.perf_counter() - start) / CALLS * 1e6)
    torch.cuda.synchronize()
    kept = means[WARM_UP:]
    return {"median": round(statistics.median(kept), 2), "best": round(min(kept), 2)}


@contextmanager
def without_waiting() -> Iterator[None]:
    """Makes torch raise RuntimeError if it waits for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def qkv(batch: int, heads: int, kv_heads: int, t: int, s_k: int, hd: int) -> tuple[torch.Tensor, ...]:
    """Returns random bf16 q, k and v."""
    shapes = (batch, heads, t, hd), (batch, kv_heads, s_k, hd), (batch, kv_heads, s_k, hd)
    return tuple(torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes)


def expected(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """Computes attention with torch, in float32."""
    t, s_k = q.shape[2], k.shape[2]
    mask = torch.ones(t, s_k, device=q.device, dtype=torch.bool).tril(s_k - t) if causal else None
    group = q.shape[1] // k.shape[1]
    k, v = (one.float().repeat_interleave(group, dim=1) for one in (k, v))
    return torch.nn.functional.scaled_dot_product_attention(q.float(), k, v, mask)


def cosine(one: torch.Tensor, other: torch.Tensor) -> float:
    """Cosine of two tensors over all elements."""
    return float(torch.nn.functional.cosine_similarity(one.double().flatten(), other.double().flatten(), dim=0))


def hold(what: str, holds: object) -> None:
    """Raises AssertionError with `what` unless it holds."""
    if not holds:
        raise AssertionError(what)


def attention_is_right(backend: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for sizes in ((1, 1, 1, 1, 128, 128), (2, 8, 2, 4, 700, 64), (1, 4, 4, 300, 600, 128), (1, 8, 1, 1, 8192, 256)):
        q, k, v = qkv(*sizes)
        for causal in (False, True):
            o = megamoe.attention(q, k, v, causal=causal, backend=backend)
            found[f"{sizes} causal={causal}"] = seen = cosine(o, expected(q, k, v, causal))
            hold(f"cosine {seen} at {sizes}", seen >= MIN_COSINE)
    q, k, v = (one.transpose(1, 2) for one in qkv(2, 64, 64, 8, 8, 128))
    _, lse = megamoe.attention(q, k, v, return_lse=True, backend=backend)
    reference = torch.logsumexp(q.float() @ k.float().mT / 128**0.5, dim=-1)
    hold("lse of tensors that are not contiguous", torch.allclose(lse, reference, atol=1e-3))
    return found


def attention_in_graphs_and_streams(backend: str) -> dict[str, bool]:
    q, k, v = qkv(2, 8, 2, 4, 700, 128)
    wanted = megamoe.attention(q, k, v, backend=backend)
    with without_waiting():
        again = megamoe.attention(q, k, v, backend=backend)
    hold("a warm call computes the same", torch.equal(again, wanted))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = megamoe.attention(q, k, v, backend=backend)
    q.copy_(torch.randn_like(q))
    graph.replay()
    hold("a graph computes what a call does", torch.equal(o, megamoe.attention(q, k, v, backend=backend)))
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            megamoe.attention(q[:1], k[:1], v[:1], backend=backend)
        hold("a first call in a capture is refused", False)
    except RuntimeError as error:
        hold(str(error), "call it once before" in str(error))
    wanted = megamoe.attention(q, k, v, backend=backend)
    results: list[bool] = []

    def work() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            mine = torch.randn_like(k), torch.randn_like(v)
            first = megamoe.attention(q, *mine, backend=backend)
            results.extend(torch.equal(megamoe.attention(q, *mine, backend=backend), first) for _ in range(50))

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work) for _ in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    hold("four threads, each with its stream", len(results) == 200 and all(results))
    compiled = torch.compile(lambda q, k, v: megamoe.attention(q * 2, k, v, causal=True, backend=backend) + 1)
    seen, eager = compiled(q, k, v), megamoe.attention(q * 2, k, v, causal=True, backend=backend) + 1
    hold("torch.compile computes what eager does", torch.allclose(seen, eager, atol=2e-2))
    hold("opcheck", torch.library.opcheck(torch.ops.megamoe.attention.default, (q, k, v), {"backend": backend}))
    return {"graphs, streams, threads, compile, opcheck": True}


def attention_cost(backend: str) -> dict[str, Any]:
    q, k, v = qkv(1, 8, 8, 1, 128, 128)
    op, with_lse = torch.ops.megamoe.attention.default, torch.ops.megamoe.attention_with_lse.default
    megamoe.attention(q, k, v, causal=True, backend=backend)
    sizes, dtypes = (q.shape, k.shape, v.shape), (q.dtype, k.dtype, v.dtype)
    call = attention_op._call_of(False, *sizes, *dtypes, 0, 0, 0, True, None, None, backend)
    assert isinstance(call, DeviceCall)
    outputs = call((q, k, v))
    block = torch.empty(max(call._bytes, 1), dtype=torch.uint8, device="cuda")
    addresses = [one.data_ptr() for one in (q, k, v, *outputs)] + [block.data_ptr() + at for at in call._offsets]
    moved = [torch.empty_like(one) for one in (q, k, v)]
    other = [one.data_ptr() for one in moved] + addresses[3:]
    turns = iter(range(1 << 30))
    stream = torch.cuda.current_stream().cuda_stream
    return {
        "megamoe.attention": cpu_us(lambda: megamoe.attention(q, k, v, causal=True, backend=backend)),
        "torch.ops.megamoe.attention": cpu_us(lambda: op(q, k, v, True, None, None, backend)),
        "torch.ops.megamoe.attention_with_lse": cpu_us(lambda: with_lse(q, k, v, True, None, None, backend)),
        "launch path: allocate, address, launch": cpu_us(lambda: call((q, k, v))),
        "launch alone": cpu_us(lambda: call._loaded.launch(addresses, stream)),
        "launch alone, other tensors each time": cpu_us(
            lambda: call._loaded.launch(addresses if next(turns) % 2 else other, stream)
        ),
    }


def dispatcher_cost(_: str) -> dict[str, Any]:
    """Measures the dispatcher's cost of a Python operator that does nothing, registered in either way."""
    library = torch.library.Library("megamoe_cost", "DEF")
    library.define("plain(Tensor q, Tensor k, Tensor v, bool causal, int? window, float? scale, str? name) -> Tensor")
    library.impl("plain", lambda q, k, v, causal, window, scale, name: torch.empty_like(q), "CUDA")

    @torch.library.custom_op("megamoe_cost::custom", mutates_args=())
    def custom(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, window: int | None, scale: float | None,
        name: str | None,
    ) -> torch.Tensor:  # fmt: skip
        return torch.empty_like(q)

    q, k, v = qkv(1, 8, 8, 1, 128, 128)
    plain = torch.ops.megamoe_cost.plain.default
    attend = torch.nn.functional.scaled_dot_product_attention
    return {
        "empty_like": cpu_us(lambda: torch.empty_like(q)),
        "torch.library.Library, empty_like": cpu_us(lambda: plain(q, k, v, True, None, None, None)),
        "torch.library.custom_op, empty_like": cpu_us(lambda: custom(q, k, v, True, None, None, None)),
        "torch scaled_dot_product_attention": cpu_us(lambda: attend(q, k, v)),
    }


def layer(experts: int, hidden: int, intermediate: int, tokens: int, topk: int) -> tuple[Any, ...]:
    """x, weights, ids and routing weights of a random layer; activations fit the calibration."""
    up_shape, down_shape = (experts, intermediate, hidden), (experts, hidden, intermediate)
    gate, up = (torch.randn(up_shape, device="cuda", dtype=torch.bfloat16) / hidden**0.5 for _ in range(2))
    down = torch.randn(down_shape, device="cuda", dtype=torch.bfloat16) / intermediate**0.5
    weights = megamoe.MoeWeights.quantised(gate, up, down, torch.full((experts,), 8.0, device="cuda"))
    x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
    ids = torch.stack([torch.randperm(experts, device="cuda")[:topk] for _ in range(tokens)])
    return x, weights, ids, torch.softmax(torch.randn(tokens, topk, device="cuda"), dim=1)


def dequantised_layer(x: torch.Tensor, weights: Any, ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """f32, computed from the dequantised weights and the activations as they are."""
    y = torch.zeros(x.shape, device=x.device)
    for expert in range(weights.num_experts):
        gate, up, down = weights.dequantised(expert)
        share = (w * (ids == expert)).sum(dim=1, keepdim=True)
        y += share * ((torch.nn.functional.silu(x.float() @ gate.T) * (x.float() @ up.T)) @ down.T)
    return y


def moe_is_right(backend: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for sizes in ((4, 256, 128, 1, 2), (8, 512, 256, 40, 2), (16, 1024, 512, 300, 4)):
        x, weights, ids, w = layer(*sizes)
        y = megamoe.moe(x, weights, ids, w, backend=backend)
        found[str(sizes)] = seen = cosine(y, dequantised_layer(x, weights, ids, w))
        hold(f"cosine {seen} at {sizes}", seen >= MIN_NVFP4_COSINE)
    with without_waiting():
        again = megamoe.moe(x, weights, ids, w, backend=backend)
    hold("a warm call computes the same", torch.equal(again, y))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = megamoe.moe(x, weights, ids, w, backend=backend)
    x.copy_(torch.randn_like(x))
    graph.replay()
    hold("a graph computes what a call does", torch.equal(captured, megamoe.moe(x, weights, ids, w, backend=backend)))
    weights.w2_codes.copy_(weights.w2_codes.flip(0))
    changed = megamoe.moe(x, weights, ids, w, backend=backend)
    hold("new weights", cosine(changed, dequantised_layer(x, weights, ids, w)) >= MIN_NVFP4_COSINE)
    graph.replay()
    hold("a graph sees new weights that a call has prepared", torch.equal(captured, changed))
    return found


def replay_us(call: Callable[[], object], replays: int = 12, warm: int = 2) -> float:
    """Median microseconds of device time of `call` in a graph; the L2 holds what the last replay left.

    The first `warm` replays do not count.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    times: list[float] = []
    for _ in range(replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times[warm:])


def moe_cost(backend: str) -> dict[str, Any]:
    found = {f"{n} tokens, 48 experts, 7168 / 3072, topk 8": _layer_cost(n, backend) for n in (8, 64, 512)}
    x, weights, ids, w = layer(4, 256, 128, 1, 2)
    megamoe.moe(x, weights, ids, w, backend=backend)
    return {**found, "megamoe.moe, CPU us": cpu_us(lambda: megamoe.moe(x, weights, ids, w, backend=backend))}


def _layer_cost(tokens: int, backend: str) -> dict[str, float]:
    x, weights, ids, w = layer(48, 7168, 3072, tokens, 8)
    start = time.perf_counter()
    megamoe.moe(x, weights, ids, w, backend=backend)
    torch.cuda.synchronize()
    first = time.perf_counter() - start
    return {
        "first call, s": round(first, 2),
        "device us": round(replay_us(lambda: megamoe.moe(x, weights, ids, w, backend=backend)), 1),
        "of it quantisation of x": round(replay_us(lambda: quantised_tokens(x, weights.x_gs)), 1),
        "quantisation by the codec": round(replay_us(lambda: by_the_codec(x)), 1),
    }


def by_the_codec(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Same as quantised_tokens."""
    gs = global_scale(x, per=1)
    codes, sf = quantise(x, gs, check=False)
    return codes, swizzle_scales(sf), gs


QUERIES, KEYS = (4, 0, 1, 3), (700, 30, 0, 9)
"""Lengths of each sequence."""


def sequences(page: int) -> tuple[tuple[torch.Tensor, ...], megamoe.SequenceLengths]:
    """q, k and v of hd 128, and lengths: packed keys, or pages of `page` keys. The rest is NaN."""
    starts = torch.tensor([0, *itertools.accumulate(QUERIES)], device="cuda", dtype=torch.int32)
    q = torch.randn(sum(QUERIES), 8, 128, device="cuda", dtype=torch.bfloat16)
    given: dict[str, Any] = {"cu_seqlens_q": starts, "max_seqlen_q": 4, "max_seqlen_k": 704}
    if not page:
        ends = torch.tensor([0, *itertools.accumulate(KEYS)], device="cuda", dtype=torch.int32)
        k, v = (torch.randn(sum(KEYS), 2, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        return (q, k, v), megamoe.SequenceLengths(**given, cu_seqlens_k=ends)
    used = torch.tensor(KEYS, device="cuda", dtype=torch.int32)
    table = torch.randperm(4 * 704 // page, device="cuda").int().view(4, -1)
    k, v = (torch.full((table.numel(), page, 2, 128), math.nan, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for number, length in enumerate(KEYS):
        key = torch.arange(length, device="cuda")
        for cache in (k, v):
            values = torch.randn(length, 2, 128, device="cuda", dtype=torch.bfloat16)
            cache[table[number, key // page].long(), key % page] = values
    return (q, k, v), megamoe.SequenceLengths(**given, seqused_k=used, block_table=table)


def keys_of(cache: torch.Tensor, lengths: megamoe.SequenceLengths, number: int) -> torch.Tensor:
    """[1, kv_heads, keys, hd] of one sequence."""
    if lengths.block_table is not None:
        cache = cache[lengths.block_table[number].long()].flatten(0, 1)[: KEYS[number]]
    else:
        cache = cache[sum(KEYS[:number]) :][: KEYS[number]]
    return cache.transpose(0, 1)[None]


def sequences_are_right(backend: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for page in (0, 16):
        (q, k, v), lengths = sequences(page)

        def call(*qkv: torch.Tensor, lengths: megamoe.SequenceLengths = lengths) -> torch.Tensor:
            o = megamoe.attention(*qkv, causal=True, lengths=lengths, backend=backend)
            assert isinstance(o, torch.Tensor)
            return o

        def compare(o: torch.Tensor, what: str, given: Any = (q, k, v, lengths, page)) -> None:
            q, k, v, lengths, page = given
            for number, t in enumerate(QUERIES):
                own = slice(sum(QUERIES[:number]), sum(QUERIES[: number + 1]))
                if t and not KEYS[number]:
                    hold(f"o of a sequence without keys is 0, {what}, page {page}", not o[own].any())
                elif t:
                    own_k, own_v = (keys_of(cache, lengths, number) for cache in (k, v))
                    wanted = expected(q[own].transpose(0, 1)[None], own_k, own_v, True)
                    seen = cosine(o[own].transpose(0, 1)[None], wanted)
                    found[f"{what}, page {page}, sequence {number}"] = seen
                    hold(f"cosine {seen} of sequence {number}, {what}, page {page}", seen >= MIN_COSINE)

        compare(call(q, k, v), "a call")
        with without_waiting():
            call(q, k, v)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            o = call(q, k, v)
        q.copy_(torch.randn_like(q))
        if lengths.block_table is not None:
            order = torch.randperm(len(k), device="cuda")
            k.copy_(k[order])
            v.copy_(v[order])
            lengths.block_table.copy_(order.argsort()[lengths.block_table.long()])
        graph.replay()
        compare(o, "a graph with other values")
    return found


def quantisation_is_right(_: str) -> dict[str, bool]:
    for tokens, hidden in ((1, 128), (130, 7168), (300, 384)):
        x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
        x *= torch.exp(3 * torch.randn(tokens, hidden // 16, device="cuda")).repeat_interleave(16, dim=1).bfloat16()
        codes, sf, gs = (one.cpu() for one in quantised_tokens(x, torch.empty(0, device="cuda")))
        wanted = quantise(x.cpu(), gs)
        hold(f"global scales of {tokens} x {hidden}", torch.equal(gs, global_scale(x.cpu(), per=1)))
        hold(f"codes of {tokens} x {hidden}", torch.equal(codes, wanted[0]))
        hold(f"scales of {tokens} x {hidden}", torch.equal(unswizzle_scales(sf, tokens, hidden // 16), wanted[1]))
    return {"bit for bit the codec's on a CPU": True}


def main() -> int:
    """Runs every step in turn. A failing step leaves the others alone."""
    torch.manual_seed(0)
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": _processor(),
    }
    failures = 0
    steps: list[tuple[Callable[[str], object], str]] = [(dispatcher_cost, "")]
    for backend in BACKENDS:
        steps += [(step, backend) for step in (attention_cost, attention_is_right, attention_in_graphs_and_streams)]
    steps += [(sequences_are_right, "cutedsl")]
    steps += [(quantisation_is_right, ""), (moe_is_right, "ptx"), (moe_cost, "ptx")]
    for step, backend in steps:
        if not any(word in step.__name__ for word in sys.argv[2:] or [""]):
            continue
        name, start = f"{step.__name__} {backend}".strip(), time.perf_counter()
        try:
            report[name] = step(backend)
        except Exception as error:
            failures += 1
            report[name] = f"{type(error).__name__}: {error}"
            traceback.print_exc()
        Path(sys.argv[1]).write_text(json.dumps(report, indent=1) + "\n")
        print(name, f"{time.perf_counter() - start:.1f} s", json.dumps(report[name], indent=1)[:1600], flush=True)
    return failures


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


if __name__ == "__main__":
    sys.exit(main())

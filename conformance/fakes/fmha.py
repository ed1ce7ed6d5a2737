"""A flash-attention kernel in torch, rounding by rounding: legal in many ways (`Style`) or with one planted fault.

It shares no code with the references, so the judge is tested on results that it did not make itself. Like a kernel, it
computes 128 folded query rows by one tile of keys at a time, with online softmax and bf16 P.

`emulate` is for tests of the judge. The laws use a backend for each fault and style, its name in capitals
(`conformance.fakes.fmha:CORRECT`), and the executor `conformance.fakes.fmha:EXECUTOR`.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Final

import torch

from conformance.fakes.backends import FakeExecutor, NamedBackend
from megamoe.contract import Case, Program, Target, UnsupportedError

ROW_TILE: Final = 128
LOG2_E: Final = math.log2(math.e)
# Faults that the judge catches, in words. Each is a common mistake in kernels.
FAULTS: Final[Mapping[str, str]] = {
    "scale_1_percent": "the softmax scale is 1 % too large",
    "key_dropped": "the last key is never attended to",
    "key_past_s_k": "one zero-filled key past s_k takes part",
    "last_tile_unmasked": "the zero-filled keys of the ragged last tile take part",
    "mask_off_by_one": "the causal or window mask is one key too wide",
    "rows_swapped": "two query rows are swapped in the output",
    "lse_base_2": "lse is a logarithm to base 2",
    "lse_of_rounded_p": "lse is that of the bf16 P, not of the fp32 P",
    "kv_head_modulo": "query head h reads KV head h % kv_heads",
    "bf16_accumulation": "o is rounded to bf16 after every MMA of 16 keys",
    "no_rescale": "o and the row sum are not rescaled when the row maximum grows",
    "no_row_maximum": "exp2 of the logits without subtracting the row maximum",
    "v_blocks_swapped": "two blocks of 8 keys of v are swapped within a tile",
    "fp8_p": "P is rounded to e4m3 instead of bf16",
    "truncated_p": "P is truncated to bf16, not rounded",
    "truncated_o": "o is truncated to bf16, not rounded",
    "last_column_unwritten": "the last column of o is never written",
    "flush_to_zero": "subnormal results are flushed to zero",
    "one_wrong_element": "one element of o is off by a tenth of its row's magnitude",
    "sink_ignored": "sinks take no part in the softmax",
    "sink_scaled": "sinks are multiplied by the softmax scale, as logits are",
    "sink_of_kv_head": "query head h has the sink of head h // (heads // kv_heads)",
    "table_ignored": "the pages of a sequence are taken to lie one behind another, from its first on",
    "next_page": "the last page of a sequence is the one behind it in the cache",
    "page_read_to_its_end": "a sequence has all keys of its last page",
    "longest_length": "every sequence has as many keys as the longest",
    "queries_at_the_end": "query i stands at key i, as if as many keys as queries were there",
}
# Faults that laws catch, and which law. Some are within the judge's tolerance, or right for every case by itself.
LAW_FAULTS: Final[Mapping[str, tuple[str, str]]] = {
    "value_drift": ("o is 4 % too large", "matches_reference"),
    "uninitialised_tail": ("the last query row is garbage", "matches_reference"),
    "schedule_decides_order": ("tiles of keys are added in the order in which they complete", "schedule_independent"),
    "history_leaks": ("a bit of o changes from one run to the next", "bitwise_repeatable"),
    "values_misplaced": ("the probabilities of keys 0 and 1 meet each other's values", "kv_permutation"),
    "position_bias": ("the logit of the last key is 0.1 too large", "kv_permutation"),
    "no_row_maximum": (FAULTS["no_row_maximum"], "logit_shift"),
    "clamped_logits": ("logits are clamped to 120 from above", "logit_shift"),
    "key_past_s_k": (FAULTS["key_past_s_k"], "constant_value"),
    "low_o": ("o is truncated to bf16, not rounded, and 1 ulp low", "constant_value"),
    "tile_by_batch": ("a batch of several is computed in smaller tiles of keys", "batch_invariant"),
    "first_batch_read": ("all sequences read the keys of the first", "batch_invariant"),
    "kv_head_modulo": (FAULTS["kv_head_modulo"], "gqa_equals_expanded_mha"),
    "window_one_short": ("the window hides one key too many", "window_covers_all_equals_full"),
    "mask_off_by_one": (FAULTS["mask_off_by_one"], "causal_equals_visible_prefix"),
    "blind_row_average": ("a row that sees no key is the average of all values", "causal_equals_visible_prefix"),
    "window_ignored": ("a window next to a causal mask is ignored", "causal_equals_visible_prefix"),
    "table_ignored": (FAULTS["table_ignored"], "paged_equals_contiguous"),
    "page_read_to_its_end": (FAULTS["page_read_to_its_end"], "paged_equals_contiguous"),
    "longest_length": (FAULTS["longest_length"], "ragged_equals_sequences"),
    "neighbour_times_zero": ("values behind the last key are multiplied by zero", "ragged_equals_sequences"),
    "rule_broken": ("the machine finds that a rule is broken", "bitwise_repeatable"),
    "stray_store": ("a byte past o is written", "bitwise_repeatable"),
    "executor_raises": ("the executor raises an exception", "bitwise_repeatable"),
}


@dataclass(frozen=True, slots=True)
class Style:
    """Choices that a correct kernel is free to make.

    `tile`: keys at a time. `stale_bits`: how far the subtracted maximum may lag, in log2. `exp2_ulps`: error of exp2.
    `truncate`: sums of 16 products are truncated to fp32. `sum_rounded_p`: o is divided by the sum of the bf16 P, so
    that its rounding cancels in part; lse still uses the fp32 P.
    """

    tile: int = 128
    shuffle_tiles: bool = False
    stale_bits: float = 0.0
    exp2_ulps: float = 0.0
    truncate: bool = False
    sum_rounded_p: bool = False
    seed: int = 0


STYLES: Final[Mapping[str, Style]] = {"correct": Style(), "lagging": Style(tile=32, stale_bits=8.0)}
"""Legal kernels for the laws. The outputs of each have the same bits on every run."""


def styles(seed: int) -> tuple[Style, ...]:
    """Legal kernels for the judge, from the plainest to one that takes every liberty at once."""
    plain = Style(seed=seed)
    return (
        plain,
        replace(plain, tile=64, shuffle_tiles=True),
        replace(plain, tile=32, stale_bits=8.0),
        replace(plain, truncate=True, exp2_ulps=2.0),
        replace(plain, sum_rounded_p=True),
        Style(tile=16, shuffle_tiles=True, stale_bits=8.0, exp2_ulps=2.0, truncate=True, seed=seed),
    )


def emulate(
    case: Case,
    inputs: Mapping[str, torch.Tensor],
    style: Style = STYLES["correct"],
    fault: str | None = None,
    schedule: str = "eager",
) -> dict[str, torch.Tensor]:
    """bf16 o and, if `case` has it, fp32 lse, as a kernel of that style computes them, with the named fault if any."""
    if not case["ragged"]:
        return Kernel(case, style, fault or "", schedule).outputs(inputs)
    written = {"o": torch.empty_like(inputs["q"])}
    if case["lse"]:
        written["lse"] = torch.empty(inputs["q"].shape[:2])
    for number, (start, end) in enumerate(pairwise(inputs["cu_seqlens_q"].tolist())):
        if start < end:
            rows = _rows_of_keys(case, inputs, number, fault)
            own = {name: inputs[name][rows].transpose(0, 1)[None] for name in ("k", "v") if name in inputs}
            own["q"] = inputs["q"][start:end].transpose(0, 1)[None]
            for name, values in _one_sequence(case, {**inputs, **own}, style, fault, schedule).items():
                written[name][start:end] = values[0].transpose(0, 1)
            if rows and fault == "neighbour_times_zero":
                behind = inputs["v" if "v" in inputs else "k"][rows[-1] + 1 : rows[-1] + 2]
                written["o"][start:end] += (0 * behind).sum()
    return written


def _one_sequence(
    case: Case, inputs: Mapping[str, torch.Tensor], style: Style, fault: str | None, schedule: str
) -> dict[str, torch.Tensor]:
    """o [1, heads, t, hd] and lse [1, heads, t] of a sequence that has queries. `inputs`: q, k and v as of batch 1."""
    t, s_k = inputs["q"].shape[2], inputs["k"].shape[2]
    stand = min(t, s_k) if fault == "queries_at_the_end" else s_k
    axes = {**dict(case.axes), "ragged": False, "batch": 1, "t": t, "s_k": stand}
    alone = Kernel(replace(case, axes=tuple(axes.items())), style, fault or "", schedule)
    if s_k:
        return alone.outputs(inputs)
    blind = {"o": torch.zeros_like(inputs["q"])}
    if case["lse"]:
        blind["lse"] = (alone.sinks(inputs) / LOG2_E)[None, :, None].expand(1, -1, t)
    return blind


def _rows_of_keys(case: Case, inputs: Mapping[str, torch.Tensor], number: int, fault: str | None) -> list[int]:
    """The rows of k and v that a kernel uses as the keys of sequence `number`."""
    page, last = case.int("page_size"), len(inputs["k"]) - 1
    if not page:
        starts = inputs["cu_seqlens_k"].tolist()
        lengths = [end - start for start, end in pairwise(starts)]
        length = max(lengths) if fault == "longest_length" else lengths[number]
        return [min(starts[number] + key, last) for key in range(length)]
    lengths, table = inputs["seqused_k"].tolist(), inputs["block_table"][number].tolist()
    length = max(lengths) if fault == "longest_length" else lengths[number]
    if fault == "page_read_to_its_end":
        length = -(-length // page) * page
    pages = table[: -(-length // page)]
    if fault == "table_ignored":
        pages = [pages[0] + i for i in range(len(pages))]
    if fault == "next_page" and pages:
        pages[-1] += 1
    return [min(max(pages[key // page] * page + key % page, 0), last) for key in range(length)]


@dataclass(frozen=True)
class Kernel:
    """One run."""

    case: Case
    style: Style
    fault: str
    schedule: str
    random: torch.Generator = field(init=False, default_factory=torch.Generator)

    def __post_init__(self) -> None:
        self.random.manual_seed(self.style.seed)

    @property
    def key_tile(self) -> int:
        return 32 if self.fault == "tile_by_batch" and self.case.int("batch") > 1 else self.style.tile

    def outputs(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        q, k = inputs["q"].double(), inputs["k"].double()
        v = k if self.case["kv"] == "latent" else inputs["v"].double()
        sinks = self.sinks(inputs)
        o, lse = torch.empty(q.shape), torch.empty(q.shape[:-1])
        for b in range(len(q)):
            read = 0 if self.fault == "first_batch_read" else b
            for kv in range(self.case.int("kv_heads")):
                heads = self.heads_of(kv)
                group = q[b, heads]
                rows = sinks[heads].repeat_interleave(self.case.int("t"))
                here = self.group(group.flatten(0, 1), k[read, kv], v[read, kv], rows)
                o[b, heads], lse[b, heads] = here[0].view_as(group), here[1].view(group.shape[:2])
        o, lse = self.spoilt(o, lse)
        return {"o": o.bfloat16(), "lse": lse} if self.case["lse"] else {"o": o.bfloat16()}

    def sinks(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """fp32 [heads], times log2(e); -inf for a head without a sink."""
        heads, kv_heads = self.case.int("heads"), self.case.int("kv_heads")
        if not self.case["sinks"] or self.fault == "sink_ignored":
            return torch.full((heads,), -math.inf)
        sinks = inputs["sink"] * LOG2_E
        if self.fault == "sink_scaled":
            sinks = sinks * self.scale
        return sinks[torch.arange(heads) // (heads // kv_heads)] if self.fault == "sink_of_kv_head" else sinks

    @property
    def scale(self) -> float:
        """The factor of the logits."""
        given = self.case["scale"]
        return 1.0 / math.sqrt(self.case.int("hd")) if given is None else float(given)

    def spoilt(self, o: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Applies the faults of a whole output to fp32 o and lse."""
        match self.fault:
            case "rows_swapped":
                o[..., [0, -1], :] = o[..., [-1, 0], :]
            case "last_column_unwritten":
                o[..., -1] = math.nan
            case "uninitialised_tail":
                o[:, :, -1] = math.nan
            case "one_wrong_element":
                o[0, 0, -1, 3] += 0.1 * o[0, 0, -1].square().mean().sqrt()
            case "flush_to_zero":
                o = torch.where(o.abs() < torch.finfo(torch.float32).tiny, 0.0, o)
            case "value_drift":
                o = o * 1.04
            case "truncated_o":
                o = _without_low_bits(o)
            case "low_o":
                o = _without_low_bits(o) * (1 - 2.0**-7)
            case "lse_base_2":
                lse = lse * LOG2_E
        return o, lse

    def heads_of(self, kv: int) -> slice:
        """The query heads that read one KV head."""
        kv_heads = self.case.int("kv_heads")
        if self.fault == "kv_head_modulo":
            return slice(kv, None, kv_heads)
        group = self.case.int("heads") // kv_heads
        return slice(kv * group, (kv + 1) * group)

    def group(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """fp32 o [rows, hd] and lse [rows] of the query heads of one KV head, folded into rows."""
        s_k, tile = len(k), self.key_tile
        keys = -(-(s_k + (self.fault == "key_past_s_k")) // tile) * tile
        k, v = (torch.nn.functional.pad(x, (0, 0, 0, keys - s_k)) for x in (k, v))
        if self.fault == "values_misplaced":
            v = v[[1, 0, *range(2, keys)]]
        if self.fault == "v_blocks_swapped":
            v = torch.cat((v[:16].roll(8, dims=0), v[16:]))
        firsts = range(0, len(q), ROW_TILE)
        tiles = [self.row_tile(q[i : i + ROW_TILE], sinks[i : i + ROW_TILE], i, k, v) for i in firsts]
        o, lse = (torch.cat(parts)[: len(q)] for parts in zip(*tiles, strict=True))
        return o, lse

    def row_tile(
        self, q: torch.Tensor, sinks: torch.Tensor, first_row: int, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """128 rows. The last ones may belong to no query: products have whole tiles, as on a tensor core."""
        sinks = torch.nn.functional.pad(sinks, (0, ROW_TILE - len(q)))
        q = torch.nn.functional.pad(q, (0, 0, 0, ROW_TILE - len(q)))
        s = self.logits(q, k).masked_fill_(~self.mask(first_row, len(k)), -math.inf)
        starts = list(range(0, len(k), self.key_tile))
        if self.fault == "schedule_decides_order" and self.schedule != "eager":
            starts.reverse()
        if self.style.shuffle_tiles:
            starts = [starts[i] for i in torch.randperm(len(starts), generator=self.random).tolist()]
        o, lse = self.softmax([(s[:, i : i + self.key_tile], v[i : i + self.key_tile]) for i in starts], sinks)
        if self.fault == "blind_row_average":
            o = torch.where(lse[:, None] == -math.inf, v[: self.case.int("s_k")].mean(dim=0).float(), o)
        return o, lse

    def logits(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """fp32 [rows, keys], times log2(e)."""
        wrong = 1.01 if self.fault == "scale_1_percent" else 1.0
        s = self.matmul(q, k.mT) * torch.tensor(self.scale * LOG2_E * wrong)
        if self.fault == "position_bias":
            s[:, self.case.int("s_k") - 1] += 0.1 * LOG2_E
        return s.clamp(max=120.0 * LOG2_E) if self.fault == "clamped_logits" else s

    def mask(self, first_row: int, keys: int) -> torch.Tensor:
        """bool [rows, keys]: which keys take part."""
        t, s_k, window = self.case.int("t"), self.case.int("s_k"), self.case["window"]
        query = (torch.arange(ROW_TILE) + first_row) % t
        key, position = torch.arange(keys)[None, :], query[:, None] + s_k - t
        bound = {"key_dropped": s_k - 1, "key_past_s_k": s_k + 1, "last_tile_unmasked": keys}.get(self.fault, s_k)
        wider = int(self.fault == "mask_off_by_one")
        seen = (key < bound).expand(ROW_TILE, keys)
        if self.case["causal"]:
            seen = seen & (key <= position + wider)
        if window is not None and not (self.fault == "window_ignored" and self.case["causal"]):
            seen = seen & (key > position - int(window) - wider + int(self.fault == "window_one_short"))
        return seen

    def softmax(
        self, tiles: list[tuple[torch.Tensor, torch.Tensor]], sinks: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """fp32 o [rows, hd] and lse [rows] of tiles of logits and values, in this order. A row begins with its sink."""
        style, fault = self.style, self.fault
        acc, row_max = torch.zeros(ROW_TILE, tiles[0][1].shape[1]), sinks.clone()
        row_sum = rounded_sum = (sinks > -math.inf).float()
        for s, v in tiles:
            highest = torch.maximum(row_max, s.amax(dim=1))
            raised = torch.where(highest > row_max + style.stale_bits, highest, row_max)
            if fault == "no_row_maximum":
                raised = torch.zeros_like(raised)
            shift = torch.where(raised == -math.inf, 0.0, raised)
            factor = torch.exp2(torch.where(row_max == -math.inf, shift, row_max) - shift)
            if fault == "no_rescale":
                factor = torch.ones_like(factor)
            p = torch.exp2(s - shift[:, None])
            if style.exp2_ulps:
                p = p * (1 + style.exp2_ulps * 2.0**-23 * (2 * torch.rand(p.shape, generator=self.random) - 1))
            p_rounded = p.to(torch.float8_e4m3fn).float() if fault == "fp8_p" else p.bfloat16().float()
            if fault == "truncated_p":
                p_rounded = _without_low_bits(p)
            row_sum = row_sum * factor + p.sum(dim=1)
            rounded_sum = rounded_sum * factor + p_rounded.sum(dim=1)
            acc = self.matmul(p_rounded, v, acc * factor[:, None], bf16=fault == "bf16_accumulation")
            row_max = raised
        divisor = rounded_sum if style.sum_rounded_p else row_sum
        o = acc * torch.where(divisor > 0, 1.0 / divisor, 0.0)[:, None]
        lse_sum = rounded_sum if fault == "lse_of_rounded_p" else row_sum
        return o, (row_max + torch.log2(lse_sum)) * math.log(2.0)

    def matmul(
        self, a: torch.Tensor, b: torch.Tensor, start: torch.Tensor | None = None, *, bf16: bool = False
    ) -> torch.Tensor:
        """fp32 start + a @ b, of a float64 b; if the style says so, in steps of K = 16, each truncated to fp32."""
        acc = torch.zeros(a.shape[0], b.shape[1]) if start is None else start
        if not (self.style.truncate or bf16):
            # In fp32, torch's sum of a row depends on the number of rows.
            return (acc.double() + a.double() @ b).float()
        for k in range(0, a.shape[1], 16):
            exact = acc.double() + a[:, k : k + 16].double() @ b[k : k + 16]
            acc = exact.bfloat16().float() if bf16 else _truncated(exact)
        return acc


def _without_low_bits(wide: torch.Tensor) -> torch.Tensor:
    """fp32 truncated to the bits that bf16 has."""
    return (wide.view(torch.int32) & -65536).view(torch.float32)


def _truncated(exact: torch.Tensor) -> torch.Tensor:
    nearest = exact.float()
    return torch.where(nearest.double().abs() > exact.abs(), nearest.nextafter(torch.zeros(())), nearest)


def _write(case: Case, tensors: Mapping[str, torch.Tensor], name: str, schedule: str, run: int) -> str | None:
    if name == "executor_raises":
        raise IndexError("register 300 of 255")
    for output, values in emulate(case, tensors, STYLES.get(name, Style()), name, schedule).items():
        tensors[output].copy_(values)
    o = tensors["o"]
    if name == "history_leaks":
        o.view(torch.int16)[0, 0, 0, 0] ^= run & 1
    if name == "stray_store":
        ctypes.memset(o.data_ptr() + o.nbytes, 0x41, 1)
    return "line 7, warp 2: mbarrier 3 overflows" if name == "rule_broken" else None


class NarrowBackend(NamedBackend):
    """A correct kernel for hd = 64 alone."""

    def build(self, case: Case, target: Target) -> Program:
        if case.int("hd") > 64:
            raise UnsupportedError(f"{case.id}: hd is {case['hd']}; this kernel has 64 alone")
        return super().build(case, target)


EXECUTOR = FakeExecutor(_write)
NARROW = NarrowBackend("narrow", "fmha")
BACKENDS = {name: NamedBackend(name, "fmha") for name in (*LAW_FAULTS, *STYLES, "nothing")}
globals().update({name.upper(): backend for name, backend in BACKENDS.items()})

"""A backend and an executor that compute forward attention with torch, correctly or with one planted fault.

It shares no code with the references: 128 folded query rows by 128 keys at a time, online softmax, bf16 P, as a kernel
does it. Backend `conformance.fakes.fmha:CORRECT`, executor `conformance.fakes.fmha:EXECUTOR`; a fault's
name in capitals is its backend.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch

from conformance.fakes.executor import FakeExecutor
from megamoe.contract import Case, Program, Target, UnsupportedError

ROW_TILE: Final = 128
# Fault: what goes wrong, and the law that it breaks.
FAULTS: Final[Mapping[str, tuple[str, str]]] = {
    "value_drift": ("o is 4 % too large", "matches_reference"),
    "uninitialised_tail": ("the last query row is garbage", "matches_reference"),
    "schedule_decides_order": ("tiles of keys are added in the order in which they complete", "schedule_independent"),
    "history_leaks": ("a bit of o changes from one run to the next", "bitwise_repeatable"),
    "values_misplaced": ("the probabilities of keys 0 and 1 meet each other's values", "kv_permutation"),
    "position_bias": ("the logit of the last key is 0.1 too large", "kv_permutation"),
    "no_row_maximum": ("exp2 of the logits as they are", "logit_shift"),
    "clamped_logits": ("logits are clamped to 120 from above", "logit_shift"),
    "ghost_key": ("a zero-filled key past s_k takes part", "constant_value"),
    "truncated_o": ("o is truncated to bf16, not rounded, and 1 ulp low", "constant_value"),
    "tile_by_batch": ("a batch of several is computed in smaller tiles of keys", "batch_invariant"),
    "first_batch_read": ("all sequences read the keys of the first", "batch_invariant"),
    "head_modulo": ("query head h reads KV head h % kv_heads", "gqa_equals_expanded_mha"),
    "window_one_short": ("the window hides one key too many", "window_covers_all_equals_full"),
    "causal_one_too_far": ("a row sees the key after its own position", "causal_equals_visible_prefix"),
    "blind_row_average": ("a row that sees no key is the average of all values", "causal_equals_visible_prefix"),
    "window_ignored": ("a window next to a causal mask is ignored", "causal_equals_visible_prefix"),
    "rule_broken": ("the machine finds that a rule is broken", "bitwise_repeatable"),
    "stray_store": ("a byte past o is written", "bitwise_repeatable"),
    "executor_raises": ("the executor raises an exception", "bitwise_repeatable"),
}
LEGAL: Final[Mapping[str, str]] = {
    "correct": "the plain kernel",
    "lagging": "the maximum that P is relative to lags behind by up to 8 bits, tiles of 32 keys",
}


@dataclass(frozen=True)
class FakeBackend:
    """Writes the case and a fault into the program. Declines hd=512 when it is named "narrow"."""

    name: str

    def targets(self, op: str) -> tuple[Target, ...]:
        return ("sm_100a",)

    def build(self, case: Case, target: Target) -> Program:
        if self.name == "narrow" and case.int("hd") > 64:
            raise UnsupportedError(f"{case.id}: hd is {case['hd']}; this kernel has 64 alone")
        if self.name == "nothing":
            raise UnsupportedError(f"{case.id}: this backend has no kernel that works")
        return Program(target, f"{self.name}\n{case.id}", ())


def emulate(case: Case, tensors: Mapping[str, torch.Tensor], name: str, schedule: str, run: int) -> str | None:
    """Writes the outputs of `case`; returns what breaks a rule of the machine, if the fault is to break one."""
    if name == "executor_raises":
        raise IndexError("register 300 of 255")
    Kernel(case, name, schedule, run).write(tensors)
    return "line 7, warp 2: mbarrier 3 overflows" if name == "rule_broken" else None


@dataclass(frozen=True)
class Kernel:
    """One run."""

    case: Case
    fault: str
    schedule: str
    run: int

    @property
    def key_tile(self) -> int:
        if self.fault == "lagging" or (self.fault == "tile_by_batch" and self.case.int("batch") > 1):
            return 32
        return 128

    def write(self, tensors: Mapping[str, torch.Tensor]) -> None:
        q, k, v = (tensors[name].float() for name in "qkv")
        for b in range(self.case.int("batch")):
            read = 0 if self.fault == "first_batch_read" else b
            for kv in range(self.case.int("kv_heads")):
                heads = self.heads_of(kv)
                o, lse = self.group(q[b, heads].flatten(0, 1), k[read, kv], v[read, kv])
                tensors["o"][b, heads] = o.view(-1, *tensors["o"].shape[2:])
                if "lse" in tensors:
                    tensors["lse"][b, heads] = lse.view(-1, self.case.int("t"))
        o = tensors["o"]
        if self.fault == "uninitialised_tail":
            o[:, :, -1] = math.nan
        if self.fault == "history_leaks":
            o.view(torch.int16)[0, 0, 0, 0] ^= self.run & 1
        if self.fault == "stray_store":
            ctypes.memset(o.data_ptr() + o.nbytes, 0x41, 1)

    def heads_of(self, kv: int) -> slice:
        """The query heads that read one KV head."""
        kv_heads = self.case.int("kv_heads")
        if self.fault == "head_modulo":
            return slice(kv, None, kv_heads)
        group = self.case.int("heads") // kv_heads
        return slice(kv * group, (kv + 1) * group)

    def group(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """bf16 o [rows, hd] and fp32 lse [rows] of the query heads of one KV head, folded into rows."""
        keys = -(-(self.case.int("s_k") + 1) // 128) * 128
        k, v = (torch.nn.functional.pad(x, (0, 0, 0, keys - len(x))) for x in (k, v))
        if self.fault == "values_misplaced":
            v = v[[1, 0, *range(2, keys)]]
        tiles = [self.row_tile(q[first : first + ROW_TILE], first, k, v) for first in range(0, len(q), ROW_TILE)]
        o, lse = (torch.cat(parts)[: len(q)] for parts in zip(*tiles, strict=True))
        return o, lse

    def row_tile(
        self, q: torch.Tensor, first_row: int, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """128 rows, the last of which may be of no query: products have whole tiles, as a tensor core's do."""
        q = torch.nn.functional.pad(q, (0, 0, 0, ROW_TILE - len(q)))
        s = self.logits(q, k).masked_fill_(~self.mask(first_row, len(k)), -math.inf)
        tiles = [slice(i, i + self.key_tile) for i in range(0, len(k), self.key_tile)]
        if self.fault == "schedule_decides_order" and self.schedule != "eager":
            tiles.reverse()
        o, lse = self.softmax([(s[:, tile], v[tile]) for tile in tiles])
        if self.fault == "blind_row_average":
            o = torch.where(lse[:, None] == -math.inf, v[: self.case.int("s_k")].mean(dim=0), o)
        if self.fault == "value_drift":
            o = o * 1.04
        if self.fault == "truncated_o":
            o = (o.view(torch.int32) & -65536).view(torch.float32) * (1 - 2.0**-7)
        return o.bfloat16(), lse

    def logits(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        scale = self.case["scale"]
        factor = 1.0 / math.sqrt(self.case.int("hd")) if scale is None else float(scale)
        s = q @ k.mT * factor
        if self.fault == "position_bias":
            s[:, self.case.int("s_k") - 1] += 0.1
        if self.fault == "clamped_logits":
            s = s.clamp(max=120.0)
        return s * math.log2(math.e)

    def mask(self, first_row: int, keys: int) -> torch.Tensor:
        t, s_k, window = self.case.int("t"), self.case.int("s_k"), self.case["window"]
        query = (torch.arange(ROW_TILE) + first_row) % t
        key, position = torch.arange(keys)[None, :], query[:, None] + s_k - t
        seen = (key < s_k + (self.fault == "ghost_key")).expand(ROW_TILE, keys)
        if self.case["causal"]:
            seen = seen & (key <= position + (self.fault == "causal_one_too_far"))
        if window is not None and not (self.fault == "window_ignored" and self.case["causal"]):
            seen = seen & (key > position - int(window) + (self.fault == "window_one_short"))
        return seen

    def softmax(self, tiles: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
        acc, row_sum = torch.zeros(ROW_TILE, tiles[0][1].shape[1]), torch.zeros(ROW_TILE)
        reference = torch.full((ROW_TILE,), -math.inf)
        lag = 8.0 if self.fault == "lagging" else 0.0
        for s, v in tiles:
            highest = torch.maximum(reference, s.amax(dim=1))
            raised = torch.where(highest > reference + lag, highest, reference)
            raised = torch.zeros_like(raised) if self.fault == "no_row_maximum" else raised
            shift = torch.where(raised == -math.inf, 0.0, raised)
            factor = torch.exp2(torch.where(reference == -math.inf, shift, reference) - shift)
            p = torch.exp2(s - shift[:, None])
            row_sum = row_sum * factor + p.sum(dim=1)
            acc = acc * factor[:, None] + p.bfloat16().float() @ v
            reference = raised
        inverse = torch.where(row_sum > 0, 1.0 / row_sum, 0.0)
        return acc * inverse[:, None], (reference + torch.log2(row_sum)) * math.log(2.0)


EXECUTOR = FakeExecutor(emulate)
BACKENDS = {name: FakeBackend(name) for name in (*FAULTS, *LEGAL, "narrow", "nothing")}
globals().update({name.upper(): backend for name, backend in BACKENDS.items()})

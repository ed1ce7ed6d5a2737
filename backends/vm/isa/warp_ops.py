"""Exchange between lanes of a warp: shfl, vote, match, redux, elect, activemask (PTX ISA 9.7.13)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir

from backends.vm.bind.binder import Binder
from backends.vm.bind.forms import Step, opcode
from backends.vm.bind.lanes import Cell, truth, writes
from backends.vm.faults import Fault
from backends.vm.machine.code import LANES, WIDTH_OF_VIEW, Key, lanes_in
from backends.vm.machine.undefined import all_bits, lanes_of, no_bits
from backends.vm.machine.warp import Warp
from backends.vm.memory.lane_releases import EVERY
from backends.vm.numerics import f32
from backends.vm.numerics.traced import INDEX, Traced, llvm_type
from backends.vm.numpy_calls import count_nonzero
from backends.vm.ptx.ast import Instruction, Operand

Lanes = npt.NDArray[np.bool_]

_LANE = np.arange(LANES, dtype=np.int64)
_ALL_NAME_ALL = b"\xff" * 4 * LANES


def member_groups(b: Binder, operand: Operand, *, orders: bool = True) -> Callable[[Warp], list[Lanes]]:
    """Groups lanes by membermask. Usually there is one group.

    `orders`: whether the instruction may order accesses of its lanes (backends.vm.memory.lanes).

    Fault if a named lane does not execute the instruction or an executing lane does not name itself (PTX ISA: undefined
    behaviour).
    """
    row = b.source(operand, "u32")
    what = b.instruction.opcode

    def group(warp: Warp, bits: int, executing: Lanes) -> Lanes:
        named = lanes_in(bits) & warp.alive
        if np.array_equal(named, executing):
            return named
        if count_nonzero(executing & ~named):
            lane = int((executing & ~named).argmax())
            raise Fault("diverged", f"{what} is executed by a lane that its mask {bits:#x} does not name", lane=lane)
        absent = np.flatnonzero(named & ~executing).tolist()
        raise Fault("diverged", f"{what} names lanes {absent} in its mask {bits:#x}, which are not executing it with "
                    "that mask")  # fmt: skip

    def groups(warp: Warp) -> list[Lanes]:
        masks = warp.u32[row]
        warp.meetings += orders
        if warp.where is True and masks.tobytes() == _ALL_NAME_ALL:
            return [lanes_in(EVERY)]
        first = masks[warp.mask.argmax()]
        if not count_nonzero(masks != first):
            return [group(warp, int(first), warp.mask)]
        distinct = np.unique(masks[warp.mask]).tolist()
        return [group(warp, bits, warp.mask & (masks == bits)) for bits in distinct]

    return groups


@opcode("shfl.sync.<mode>.b32", section="9.7.9.6", counter="warp", mode="idx up down bfly")
def shfl(b: Binder) -> Step:
    """Read another lane's register. c = clamp | segment mask << 8 (PTX ISA 9.7.9.6)."""
    d, a, lane, limits, mask = b.expect(5)
    first, second = b.pair(d)
    rd = b.destination(first, "u32")
    rp = b.destination(second, "pred") if second is not None else None
    ra, rb, rc = b.source(a, "u32"), b.source(lane, "u32"), b.source(limits, "u32")
    groups, mode = member_groups(b, mask), _mode(b.instruction)

    def step(warp: Warp) -> None:
        groups(warp)
        source, valid = _partner(mode, warp.u32[rb].tobytes(), warp.u32[rc].tobytes())
        if warp.where is not True and count_nonzero(absent := warp.mask & valid & ~warp.mask[source]):
            at = int(np.flatnonzero(absent)[0])
            raise Fault("diverged", f"shfl reads lane {source[at]}, which is not active", lane=at)
        np.copyto(warp.u32[rd], warp.u32[ra][source], where=warp.where)
        if rp is not None:
            np.copyto(warp.pred[rp], valid, where=warp.where)

    def carry(warp: Warp, run: Step) -> object:
        source, _ = _partner(mode, warp.u32[rb].tobytes(), warp.u32[rc].tobytes())
        undefined, lanes, key = warp.undefined, warp.mask, (32, ra)
        hidden, origin = undefined.bits(key)[source], undefined.origin((key,), line)
        outcome = run(warp)
        undefined.put((32, rd), hidden, lanes, origin)
        if rp is not None:
            undefined.put((1, rp), no_bits(1), lanes, None)
        return outcome

    line = b.instruction.line
    b.carry(carry, (32, ra))
    return step


@lru_cache(maxsize=1024)
def _partner(mode: str, offsets: bytes, limits: bytes) -> tuple[npt.NDArray[np.int64], Lanes]:
    """The lane that each lane reads and whether it is in range. `offsets` and `limits` are rows b and c (uint32 [32])
    as bytes."""
    b, c = (np.frombuffer(row, np.uint32).astype(np.int64) for row in (offsets, limits))
    return _partner_of(mode, b, c, _LANE)


def _partner_of(mode: str, b: Any, c: Any, lane: Any) -> tuple[Any, Any]:
    """As _partner, for signed integers. `lane` holds the lane numbers."""
    b, clamp, segment = b & 31, c & 31, c >> 8 & 31
    highest, lowest = (lane & segment) | (clamp & ~segment), lane & segment
    source = {"up": lane - b, "down": lane + b, "bfly": lane ^ b, "idx": lowest | (b & ~segment)}[mode]
    valid = source >= highest if mode == "up" else source <= highest
    return np.where(valid, source, lane), valid


def _mode(instruction: Instruction) -> str:
    return instruction.parts[2]


@writes(shfl)
def _shfl_of_a_whole_warp(b: ir.IRBuilder, cells: Sequence[Cell], mask: Any, instruction: Instruction) -> None:
    """The compiled form, for a full warp whose lanes all name all lanes."""
    *written, a, lane, limits, members = cells
    word, all_lanes = ir.IntType(32), llvm_type(np.int32, (LANES,))

    def every(bits: Any) -> Any:
        return b.icmp_signed("==", b.bitcast(bits, word), ir.Constant(word, -1))

    named = b.icmp_signed("==", members.content(), ir.Constant(all_lanes, [-1] * LANES))
    with b.if_then(b.not_(b.and_(every(truth(b, mask)), every(named)))):
        b.ret(ir.Constant(INDEX, 1))
    number = Traced(b, np.int32, ir.Constant(all_lanes, list(range(LANES))), (LANES,))
    by, within = (Traced(b, np.int32, one.content(), (LANES,)) for one in (lane, limits))
    source, valid = _partner_of(_mode(instruction), by, within, number)
    found: Any = ir.Constant(all_lanes, ir.Undefined)
    for i in range(LANES):
        place = ir.Constant(word, i)
        from_ = b.gep(a.place, [b.extract_element(source.value, place)], source_etype=word)
        found = b.insert_element(found, b.load(from_, typ=word, align=4), place)
    for cell, value in zip(written, (found, valid.value), strict=False):
        cell.written = value


@opcode("vote.sync.<mode>.pred", section="9.7.13.9", counter="warp", mode="all any uni")
def vote(b: Binder) -> Step:
    """Whether a predicate holds in all or any named lanes, or has the same value in all of them."""
    d, p, mask = b.expect(3)
    rd, (rp, negated), groups, mode = b.destination(d, "pred"), b.predicate(p), member_groups(b, mask), b.words["mode"]

    def step(warp: Warp) -> None:
        for named in groups(warp):
            votes = (warp.pred[rp] ^ negated)[named]
            held = count_nonzero(votes)
            everyone, anyone = held == votes.size, held > 0
            outcome = {"all": everyone, "any": anyone, "uni": everyone or not anyone}[mode]
            np.copyto(warp.pred[rd], outcome, where=named)

    def carry(warp: Warp, run: Step) -> object:
        undefined, lanes, hidden = warp.undefined, warp.mask, np.zeros(LANES, np.bool_)
        doubt, origin = undefined.bits((1, rp)), undefined.origin(((1, rp),), line)
        for named in groups(warp):
            known = (warp.pred[rp] ^ negated)[named & ~doubt]
            no, yes = count_nonzero(~known) > 0, count_nonzero(known) > 0
            decided = {"all": no, "any": yes, "uni": no and yes}[mode]
            hidden |= named & (count_nonzero(doubt & named) > 0 and not decided)
        outcome = run(warp)
        undefined.put((1, rd), hidden, lanes, origin)
        return outcome

    line = b.instruction.line
    b.carry(carry, (1, rp))
    return step


@opcode("vote.sync.ballot.b32", section="9.7.13.9", counter="warp")
def ballot(b: Binder) -> Step:
    """The predicates of the named lanes as bits."""
    d, p, mask = b.expect(3)
    rd, (rp, negated), groups = b.destination(d, "u32"), b.predicate(p), member_groups(b, mask)

    def step(warp: Warp) -> None:
        for named in groups(warp):
            votes = (warp.pred[rp] ^ negated) & named
            np.copyto(warp.u32[rd], np.packbits(votes, bitorder="little").view(np.uint32)[0], where=named)

    def carry(warp: Warp, run: Step) -> object:
        undefined, lanes, hidden = warp.undefined, warp.mask, no_bits(32)
        doubt, origin = undefined.bits((1, rp)), undefined.origin(((1, rp),), line)
        for named in groups(warp):
            hidden[named] = np.packbits(doubt & named, bitorder="little").view(np.uint32)[0]
        outcome = run(warp)
        undefined.put((32, rd), hidden, lanes, origin)
        return outcome

    line = b.instruction.line
    b.carry(carry, (1, rp))
    return step


@opcode("activemask.b32", section="9.7.13.11", counter="warp")
def activemask(b: Binder) -> Step:
    """The active lanes as bits."""
    rd = b.destination(b.expect(1)[0], "u32")
    return lambda warp: np.copyto(
        warp.u32[rd], np.packbits(warp.mask, bitorder="little").view(np.uint32)[0], where=warp.where
    )


@opcode("elect.sync", section="9.7.13.14", counter="warp")
def elect(b: Binder) -> Step:
    """Elect the lowest named lane (measured on an H200 with 4 masks). d is its number in every lane.

    It does not order memory (PTX ISA 9.7.13.14), even though kernels let the elected lane arrive or copy for all.
    """
    d, mask = b.expect(2)
    first, second = b.pair(d)
    rd = b.destination(first, "u32")
    rp = b.destination(second, "pred") if second is not None else None
    groups = member_groups(b, mask, orders=False)

    def step(warp: Warp) -> None:
        for named in groups(warp):
            leader = int(named.argmax())
            np.copyto(warp.u32[rd], np.uint32(leader), where=named)
            if rp is not None:
                np.copyto(warp.pred[rp], leader == _LANE, where=named)

    return step


def _carry_to_all(b: Binder, source: tuple[int, int], groups: Callable[[Warp], list[Lanes]], *results: Key) -> None:
    """Carries undefined bits: an undefined operand in one named lane makes the results of all of them undefined."""
    line = b.instruction.line

    def carry(warp: Warp, run: Step) -> object:
        undefined, lanes, lost = warp.undefined, warp.mask, np.zeros(LANES, np.bool_)
        doubt, origin = lanes_of(undefined.bits(source)), undefined.origin((source,), line)
        for named in groups(warp):
            lost |= named & (count_nonzero(doubt & named) > 0)
        outcome = run(warp)
        for key in results:
            undefined.put(key, all_bits(key[0], lost), lanes, origin)
        return outcome

    b.carry(carry, source)


_REDUCE: dict[str, np.ufunc] = {"add": np.add, "min": np.minimum, "max": np.maximum,
                                "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}  # fmt: skip


@opcode("redux.sync.<op>.<type>", section="9.7.13.12", counter="warp", op="add min max", type="u32 s32")
@opcode("redux.sync.<op>.<type>", section="9.7.13.12", counter="warp", op="and or xor", type="b32")
def redux(b: Binder) -> Step:
    """Reduce an integer over the named lanes."""
    d, a, mask = b.expect(3)
    view = "s32" if b.words["type"] == "s32" else "u32"
    rd, ra, groups, operation = (
        b.destination(d, view),
        b.source(a, view),
        member_groups(b, mask),
        _REDUCE[b.words["op"]],
    )

    def step(warp: Warp) -> None:
        rows = getattr(warp, view)
        values = rows[ra].copy()
        for named in groups(warp):
            np.copyto(rows[rd], operation.reduce(values[named], dtype=values.dtype), where=named)

    _carry_to_all(b, (32, ra), groups, (32, rd))
    return step


@opcode("redux.sync.<op>{.abs}{.NaN}.f32", section="9.7.13.12", counter="warp", op="min max")
def redux_float(b: Binder) -> Step:
    """Minimum or maximum float of the named lanes (sm_100a)."""
    d, a, mask = b.expect(3)
    rd, ra, groups = b.destination(d, "f32"), b.source(a, "f32"), member_groups(b, mask)
    nan, absolute = bool(b.words["NaN"]), bool(b.words["abs"])
    choose = f32.minimum if b.words["op"] == "min" else f32.maximum

    def step(warp: Warp) -> None:
        values = np.abs(warp.f32[ra]) if absolute else warp.f32[ra].copy()
        for named in groups(warp):
            left = values[named]
            best = left[:1]
            for lane in range(len(left)):
                best = choose(best, left[lane : lane + 1], nan=nan)
            np.copyto(warp.f32[rd], best, where=named)

    _carry_to_all(b, (32, ra), groups, (32, rd))
    return step


@opcode("match.any.sync.<type>", "match.all.sync.<type>", section="9.7.13.10", counter="warp", type="b32 b64")
def match(b: Binder) -> Step:
    """Lanes that hold the same value (any), or all of them if all do."""
    d, a, mask = b.expect(3)
    first, second = b.pair(d)
    rd = b.destination(first, "u32")
    rp = b.destination(second, "pred") if second is not None else None
    view = "u" + b.words["type"][1:]
    ra, groups, every = b.source(a, view), member_groups(b, mask), b.instruction.parts[1] == "all"
    if rp is not None and not every:
        raise b.error("match.any has no predicate destination")

    def step(warp: Warp) -> None:
        values = getattr(warp, view)[ra].copy()
        for named in groups(warp):
            same = (values[:, None] == values[None, :]) & named[None, :]
            bits = np.packbits(same, axis=1, bitorder="little").view(np.uint32)[:, 0]
            alike = not count_nonzero(values[named] != values[named][0])
            np.copyto(warp.u32[rd], (bits if alike else np.zeros_like(bits)) if every else bits, where=named)
            if rp is not None:
                np.copyto(warp.pred[rp], alike, where=named)

    _carry_to_all(b, (WIDTH_OF_VIEW[view], ra), groups, (32, rd), *([(1, rp)] if rp is not None else []))
    return step

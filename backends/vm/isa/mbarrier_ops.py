"""mbarrier instructions (PTX ISA 9.7.13.15). Phases and parities behave as measured on an H200 (facts.md 6.1)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from backends.vm.bind.binder import Binder
from backends.vm.bind.forms import Step, opcode
from backends.vm.faults import ByLanes, Fault, report
from backends.vm.machine.access import active, resolve, visit
from backends.vm.machine.code import LANES, NEXT, Wait
from backends.vm.machine.cta import Cta
from backends.vm.machine.warp import Warp
from backends.vm.memory.mbarrier import MBarrier
from backends.vm.memory.shared import OFFSET_MASK
from backends.vm.numpy_calls import count_nonzero
from backends.vm.ptx.ast import Operand, Register, Sink

_SPACE = "shared shared::cta shared::cluster"
_SEM = "release relaxed acquire"
_SCOPE = "cta cluster"
Where = tuple[Cta, int]


def places(b: Binder, operand: Operand, *, remote: bool = False) -> Callable[[Warp], Iterator[tuple[Where, list[int]]]]:
    """The mbarriers that the active lanes address: (CTA, offset), each with its lanes."""
    address = b.address(operand)
    space = b.words.get("space", "") or ("" if b.width(getattr(operand, "base", operand)) == 64 else "shared")

    def find(warp: Warp) -> Iterator[tuple[Where, list[int]]]:
        lanes = active(warp)
        every = address(warp)
        where, addresses = resolve(space, every if lanes.size == LANES else every[lanes])
        named = dict.fromkeys(addresses.tolist())
        for value in named:
            cta = warp.cta
            if where == "shared::cluster" and remote:
                cta = warp.cta.cluster.cta_of(value, "an mbarrier operation")
                if cta is not warp.cta:
                    visit(warp, cta, b.instruction.line)
            elif where != "shared::cluster" or value >> 24 != warp.cta.place.cta_rank:
                warp.cta.own_offset(value, "mbarrier operation")
            yield (cta, value & OFFSET_MASK), (lanes if len(named) == 1 else lanes[addresses == value]).tolist()

    return find


@opcode("mbarrier.init{.<space>}.b64", section="9.7.13.15.9", counter="mbarrier", space=_SPACE)
def init(b: Binder) -> Step:
    """Start phase 0 with `count` arrivals pending and expected."""
    a, count = b.expect(2)
    find, row = places(b, a), b.source(count, "u32")

    def step(warp: Warp) -> None:
        for (cta, offset), lanes in find(warp):
            counts = sorted(set(warp.u32[row][lanes].tolist()))
            if len(counts) > 1:
                raise Fault("mbarrier-misuse", f"{len(lanes)} lanes initialise this mbarrier, with counts "
                            f"{', '.join(map(str, counts[:4]))}; which of them stays is undefined", lane=lanes[0],
                            address=offset)  # fmt: skip
            with ByLanes(lanes):
                cta.init_mbarrier(offset, counts[0], warp)

    return step


@opcode("mbarrier.inval{.<space>}.b64", section="9.7.13.15.10", counter="mbarrier", space=_SPACE)
def inval(b: Binder) -> Step:
    """End the mbarrier. Its memory may be reused."""
    find = places(b, b.expect(1)[0])

    def step(warp: Warp) -> None:
        for (cta, offset), _ in find(warp):
            cta.inval_mbarrier(offset)

    return step


@opcode("mbarrier.expect_tx{.<sem>}{.<scope>}{.<space>}.b64", section="9.7.13.15.11", counter="mbarrier", sem="relaxed",
        scope=_SCOPE, space=_SPACE)  # fmt: skip
@opcode("mbarrier.complete_tx{.<sem>}{.<scope>}{.<space>}.b64", section="9.7.13.15.12", counter="mbarrier",
        sem="relaxed", scope=_SCOPE, space=_SPACE)  # fmt: skip
def transactions(b: Binder) -> Step:
    """Raise or lower the transaction count of the current phase."""
    a, count = b.expect(2)
    find, row = places(b, a, remote=True), b.source(count, "u32")
    expects = b.instruction.parts[1] == "expect_tx"

    def step(warp: Warp) -> None:
        warp.cta.machine.engine.repeat()
        for (cta, offset), lanes in find(warp):
            barrier = cta.mbarrier(offset, warp.clock, lanes[0])
            total = int(warp.u32[row][lanes].sum())
            if expects:
                barrier.expect(total)
            else:
                barrier.complete_transactions(total, warp.clock.relaxed(warp.released, warp.agent), _by(warp, b))
        warp.next_epoch()

    return step


def _by(warp: Warp, b: Binder) -> str:
    return f"{warp.name} at PTX line {b.instruction.line}"


_ARRIVE_FORM = "{.<tx>}{.<sem>}{.<scope>}{.<space>}.b64"


@opcode("mbarrier.arrive_drop" + _ARRIVE_FORM, section="9.7.13.15.14", counter="mbarrier", tx="expect_tx", sem=_SEM,
        scope=_SCOPE, space=_SPACE)  # fmt: skip
@opcode("mbarrier.arrive" + _ARRIVE_FORM, "mbarrier.arrive{.<nocomplete>}{.<sem>}{.<scope>}{.<space>}.b64",
        section="9.7.13.15.13", counter="mbarrier", tx="expect_tx", sem=_SEM, scope=_SCOPE, space=_SPACE,
        nocomplete="noComplete")  # fmt: skip
def arrive(b: Binder) -> Step:
    """Arrive. expect_tx first raises the transaction count. The token holds the phase of the arrival."""
    counted = b.words.get("tx") or b.words.get("nocomplete")
    d, *operands = b.expect(3) if counted else b.expect(2, 3)
    if b.words.get("space") == "shared::cluster" and isinstance(d, Register):
        raise b.error(f"with .shared::cluster it returns no token, so `_` must stand where `{d.name}` does")
    find = places(b, operands[0], remote=True)
    row = b.source(operands[1], "u32") if len(operands) > 1 else None
    expects, drop = b.words.get("tx") == "expect_tx", b.instruction.parts[1] == "arrive_drop"
    relaxed, narrow = b.words.get("sem") == "relaxed", b.words.get("scope") == "cta"
    token = None if isinstance(d, Sink) else b.destination(d, "u64")

    def step(warp: Warp) -> None:
        warp.cta.machine.engine.repeat()
        for (cta, offset), lanes in find(warp):
            barrier = cta.mbarrier(offset, warp.clock, lanes[0])
            if token is not None:
                warp.u64[token][lanes] = _token(barrier)
            given = warp.u32[row][lanes] if row is not None else None
            if expects and given is not None:
                barrier.expect(int(given.sum()))
            count = len(lanes) if expects or given is None else int(given.sum())
            barrier.arrive(count, _by(warp, b), *warp.given(relaxed=relaxed, narrow=narrow), drop=drop)
        if not relaxed:
            warp.next_epoch(warp.active_bits())

    return step


def _token(barrier: MBarrier) -> np.uint64:
    # An H200's layout: parity in bit 63, minus the pending count in bits 62..43 (facts.md 6.1).
    return np.uint64((barrier.phase & 1) << 63 | (-barrier.pending & 0xFFFFF) << 43)


@opcode("mbarrier.pending_count.b64", section="9.7.13.15.17", counter="mbarrier")
def pending_count(b: Binder) -> Step:
    """The pending count in a token."""
    d, a = b.expect(2)
    rd, ra = b.destination(d, "u32"), b.source(a, "u64")

    def step(warp: Warp) -> None:
        pending = (np.uint64(1 << 20) - (warp.u64[ra] >> np.uint64(43) & np.uint64(0xFFFFF))) & np.uint64(0xFFFFF)
        np.copyto(warp.u32[rd], pending.astype(np.uint32), where=warp.where)

    return step


_WAIT = "{.<parity>}{.<sem>}{.<scope>}{.<space>}.b64"
_WAIT_WORDS = {"parity": "parity", "sem": "acquire relaxed", "scope": _SCOPE, "space": _SPACE}
Answer = Callable[[Warp], npt.NDArray[np.bool_]]


def _bind_wait(b: Binder) -> tuple[int, Callable[[Warp], tuple[npt.NDArray[np.bool_], list[tuple[MBarrier, int]]]]]:
    d, a, phase, *_ = b.expect(3, 4)
    rd, find = b.destination(d, "pred"), places(b, a)
    by_parity = bool(b.words["parity"])
    relaxed, narrow = b.words["sem"] == "relaxed", b.words["scope"] == "cta"
    row = b.source(phase, "u32" if by_parity else "u64")
    b.unread = _unread(find, b.instruction.parts[1])

    def ask(warp: Warp) -> tuple[npt.NDArray[np.bool_], list[tuple[MBarrier, int]]]:
        answers, before, met = np.zeros(32, np.bool_), None, False
        asked: list[tuple[MBarrier, int]] = []
        values = warp.u32[row] if by_parity else warp.u64[row] >> np.uint64(63)
        for (cta, offset), lanes in find(warp):
            barrier = cta.mbarrier(offset, warp.clock, lanes[0])
            told = values[lanes].tolist()
            parities = dict.fromkeys(told)
            for parity in parities:
                asked.append((barrier, int(parity) & 1))
                passed = barrier.passed(int(parity) & 1)
                if passed:
                    if not met:
                        before, met = warp.acquiring(), True
                    alike = len(parities) == 1
                    answers[lanes if alike else [i for i, one in zip(lanes, told, strict=True) if one == parity]] = True
                if passed and (relaxed or narrow):
                    barrier.completed.over(warp.met)
                if passed:
                    warp.take(barrier.completed, barrier, relaxed=relaxed, narrow=narrow)
        if before is not None:
            warp.have_acquired(before)
        return answers, asked

    return rd, ask


def _unread(find: Callable[[Warp], Iterator[tuple[Where, list[int]]]], what: str) -> Step:
    """A wait whose result nobody reads: it may give up, so it orders nothing, and whoever is told to go on goes on."""

    def step(warp: Warp) -> object:
        for (cta, offset), lanes in find(warp):
            cta.mbarrier(offset, warp.clock, lanes[0])
            report(Fault("wait-result-unread", f"nothing reads the result of this {what}: it may be false, so the wait "
                         "orders nothing, and the program goes on in either case", lane=lanes[0],
                         address=offset))  # fmt: skip
        return NEXT

    return step


@opcode("mbarrier.test_wait" + _WAIT, section="9.7.13.15.16", kind="tail", counter="mbarrier",
        vocabulary=_WAIT_WORDS)  # fmt: skip
def test_wait(b: Binder) -> Step:
    """Whether the phase of a parity or token is over, without waiting."""
    rd, ask = _bind_wait(b)

    def step(warp: Warp) -> object:
        answers, _ = ask(warp)
        np.copyto(warp.pred[rd], answers, where=warp.where)
        return NEXT

    return step


@opcode("mbarrier.try_wait" + _WAIT, section="9.7.13.15.16", kind="tail", counter="mbarrier",
        vocabulary=_WAIT_WORDS)  # fmt: skip
def try_wait(b: Binder) -> Step:
    """As test_wait, but the warp parks while the phase lasts. It gets false only when nothing else can run."""
    rd, ask = _bind_wait(b)

    def step(warp: Warp) -> object:
        answers, asked = ask(warp)
        np.copyto(warp.pred[rd], answers, where=warp.where)
        if count_nonzero(answers):
            return NEXT
        warp.cta.machine.counters["mbarrier_stalls"] += 1
        (first, phase), *others = asked

        def any_passed() -> bool:
            return first.passed(phase) or any(barrier.passed(parity) for barrier, parity in others)

        return Wait(
            ready=any_passed if others else lambda: first.passed(phase),
            reason=lambda: " or ".join(
                f"the phase of parity {parity} of mbarrier {barrier.offset:#x} ({barrier.state()})"
                for barrier, parity in asked
            ),
            again=True,
            expire=lambda: None,
            target=first,
        )

    return step

"""Records one CTA: slices of its warps, its operations, and who touches its memories and barriers.

Instrumented code reports the instructions that move data, synchronise or compute a tile. Recorded memories and barriers
report every access and otherwise behave like the plain ones. They replace the plain ones before the first step, so a
run without a recorder pays nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from backends.vm.machine.code import Block, Code, Step, Wait
from backends.vm.machine.cta import NAMED_BARRIERS
from backends.vm.machine.undefined import BecameUndefined
from backends.vm.memory.clocks import Clock
from backends.vm.memory.definedness import Mask
from backends.vm.memory.mbarrier import MBarrier
from backends.vm.memory.shared import Addresses, Bytes, Granules, SharedMemory
from backends.vm.memory.strong_writes import Strong
from backends.vm.memory.tmem import Index, Part, TensorMemory
from backends.vm.numpy_calls import count_nonzero
from backends.vm.ptx.ast import Immediate, Instruction
from megamoe.contract.trace import (
    CtaTrace,
    MBarrierTrace,
    OperationTrace,
    Party,
    Release,
    RunSlice,
    SmemUse,
    TmemSpan,
    TmemTouch,
    WaitSlice,
    WarpTrace,
)

if TYPE_CHECKING:
    from backends.vm.machine.cta import Cta
    from backends.vm.machine.engine import Operation
    from backends.vm.machine.warp import Warp
    from backends.vm.trace.recorder import Recorder


Verb = Literal["write", "read"]
Bounds = tuple[int, int]
TouchTmem = Callable[[Verb, Bounds, Bounds, str], None]
"""(verb, lanes, columns, action): bounds are inclusive."""
TouchSmem = Callable[[Verb, str, Granules], None]
"""(verb, "generic", "copy" or "tensor core", granules of 4 bytes)."""


def _bounds(part: Part) -> Bounds:
    return (part.start, part.stop - 1) if isinstance(part, slice) else (int(part.min()), int(part.max()))


class RecordedTensorMemory(TensorMemory):
    """Reports reads and writes."""

    __slots__ = ("_touch",)

    def __init__(self, plain: TensorMemory, touch: TouchTmem) -> None:
        for each in fields(plain):
            setattr(self, each.name, getattr(plain, each.name))
        self._touch = touch

    def read(self, index: Index, clock: Clock, stamp: int, action: str) -> bool:
        """As TensorMemory.read."""
        self._touch("read", _bounds(index[0]), _bounds(index[1]), action)
        return super().read(index, clock, stamp, action)

    def begin_write(
        self, index: Index, clock: Clock, stamp: int, line: int, action: str, own: int | None = None
    ) -> None:
        """As TensorMemory.begin_write."""
        self._touch("write", _bounds(index[0]), _bounds(index[1]), action)
        super().begin_write(index, clock, stamp, line, action, own)


class RecordedSharedMemory(SharedMemory):
    """Reports which granules are read and written, and by which proxy."""

    def __init__(self, plain: SharedMemory, touch: TouchSmem) -> None:
        self.__dict__.update(plain.__dict__)
        self.place = None
        self._touch = touch

    def load(
        self, offsets: Addresses, size: int, clock: Clock, stamp: int, *, strong: Strong | None = None,
        lanes: Addresses | None = None, meetings: int = 0,
    ) -> tuple[Bytes, Mask | None]:  # fmt: skip
        """As SharedMemory.load."""
        self._touch("read", "generic", _covered(offsets, size))
        return super().load(offsets, size, clock, stamp, strong=strong, lanes=lanes, meetings=meetings)

    def store(
        self, offsets: Addresses, values: Bytes, clock: Clock, stamp: int, line: int, *, strong: Strong | None = None
    ) -> bool:
        """As SharedMemory.store."""
        self._touch("write", "generic", _covered(offsets, values.shape[1]))
        return super().store(offsets, values, clock, stamp, line, strong=strong)

    def async_read(self, granules: Granules, clock: Clock, stamp: int, what: str) -> bool:
        """As SharedMemory.async_read."""
        self._touch("read", "tensor core" if "mma" in what or "tcgen05" in what else "copy", granules)
        return super().async_read(granules, clock, stamp, what)

    def async_write_begins(
        self, granules: Granules, clock: Clock, line: int, what: str, *, generic: bool = False
    ) -> None:
        """As SharedMemory.async_write_begins."""
        self._touch("write", "copy", granules)
        super().async_write_begins(granules, clock, line, what, generic=generic)


def _covered(offsets: Addresses, size: int) -> Granules:
    return ((offsets[:, None] >> 2) + np.arange(max(size // 4, 1))).ravel()


class RecordedMBarrier(MBarrier):
    """Reports every test of a phase."""

    __slots__ = ("_asked",)

    def __init__(self, plain: MBarrier, asked: Callable[[MBarrier], None]) -> None:
        for each in fields(plain):
            setattr(self, each.name, getattr(plain, each.name))
        self._asked = asked

    def passed(self, parity: int) -> bool:
        """As MBarrier.passed."""
        self._asked(self)
        return super().passed(parity)


# Instructions that report to a recorder: they move data, synchronise or compute a tile.


_NOTABLE = frozenset(
    ("tcgen05", "wgmma", "mma", "cp", "mbarrier", "bar", "barrier", "ld", "st", "red", "atom", "stmatrix", "ldmatrix",
     "ex2", "setmaxnreg", "griddepcontrol")
)  # fmt: skip
_SPACES = ("global", "shared", "local", "const", "param")


def mnemonic(instruction: Instruction) -> str:
    """A short name of an instruction, such as "tcgen05.mma" or "cp.async.bulk.tensor.shared.global"."""
    parts = instruction.parts
    spaces = [part.partition("::")[0] for part in parts[1:] if part.partition("::")[0] in _SPACES]
    if parts[0] == "cp":
        verb = [part for part in parts[1:] if part in ("reduce", "async", "bulk", "tensor", "prefetch", "commit_group")]
        waits = [part for part in parts if part.startswith("wait_")]
        return ".".join(["cp", *verb, *waits, *spaces])
    if parts[0] in ("ld", "st", "red", "atom"):
        return f"{parts[0]}.{spaces[0] if spaces else 'generic'}"
    if parts[0] == "setmaxnreg":
        counts = [str(operand.value) for operand in instruction.operands if isinstance(operand, Immediate)]
        return " ".join([f"setmaxnreg.{parts[1]}", *counts])
    if parts[0] == "ex2":
        return "ex2"
    return ".".join(part for part in parts[: 3 if parts[0] == "barrier" else 2])


def notable(instruction: Instruction) -> bool:
    """Whether the instruction reports to a recorder. Parameter loads do not."""
    return instruction.parts[0] in _NOTABLE and mnemonic(instruction) != "ld.param"


def instrumented(code: Code, recorder: Recorder) -> Code:
    """`code` in which every notable step reports itself to `recorder`."""

    def reporting(step: Step, instruction: Instruction) -> Step:
        return _reporting(code, instruction, step, recorder) if notable(instruction) else step

    def copy(block: Block) -> Block:
        steps = [reporting(step, block.instructions[index]) for index, step in enumerate(block.steps)]
        tail = block.tail and reporting(block.tail, block.instructions[-1])
        return replace(block, steps=steps, tail=tail, find_runs=None)

    return replace(code, blocks=[copy(block) for block in code.blocks])


def _reporting(code: Code, instruction: Instruction, step: Step, recorder: Recorder) -> Step:
    guard = instruction.guard
    row = code.rows.rows[guard.register][1] if guard is not None else None
    name = mnemonic(instruction)

    def run(warp: Warp) -> object:
        if guard is not None and row is not None:
            lanes = warp.mask & (~warp.pred[row] if guard.negated else warp.pred[row])
            if not count_nonzero(lanes):
                return step(warp)
        cta = recorder.cta_of(warp)
        if cta is None:
            return step(warp)
        cta.executes(warp, name)
        with recorder.instruction(warp, instruction):
            try:
                outcome = step(warp)
            except BecameUndefined:
                cta.executed(warp, instruction, None)
                raise
        cta.executed(warp, instruction, outcome)
        return outcome

    return run


# The trace of one CTA: slices of its warps, its operations, and who touches its memories and barriers.


MAX_RANGES = 24
States = dict[object, tuple[int, ...]]


@dataclass(slots=True)
class _Use:
    """Granules of shared memory that one PTX line touches."""

    granules: npt.NDArray[np.bool_]
    warps: set[int] = field(default_factory=set[int])


@dataclass(slots=True)
class _Parked:
    """A wait that has begun: the machine's Wait, its slice, and the key of the release that ends it."""

    wait: Wait
    slice: WaitSlice
    key: object


class RecordedCta:
    """Observes the memories of `cta` and keeps its trace. `number` counts the launch's recorded CTAs."""

    def __init__(self, recorder: Recorder, cta: Cta, number: int) -> None:
        self.recorder, self.cta, self.number = recorder, cta, number
        self.trace = CtaTrace(cta.place.ctaid, cta.place.cta_rank, cta.smem.dynamic_offset,
                              [WarpTrace(warp.index) for warp in cta.warps])  # fmt: skip
        cta.smem = RecordedSharedMemory(cta.smem, self._touch_smem)
        cta.tmem = RecordedTensorMemory(cta.tmem, self._touch_tmem)
        self._runs: list[RunSlice | None] = [None] * len(cta.warps)
        self._parked: list[_Parked | None] = [None] * len(cta.warps)
        self._keys: dict[int, tuple[Wait, object]] = {}
        self._uses: dict[tuple[str, str, int], _Use] = {}
        self._mbarriers: dict[int, MBarrierTrace] = {}
        self._parties: dict[tuple[int, str, str, int, int], Party] = {}

    # ---- warps

    def resumes(self, warp: Warp) -> None:
        """Close the warp's wait slice, unless its wait is not over."""
        parked = self._parked[warp.index]
        if parked is None or (warp.strands[0].wait is parked.wait and not parked.wait.ready()):
            return
        self._parked[warp.index] = None
        done = parked.slice
        done.ends = self.recorder.step
        done.release = self.recorder.releases.get(parked.key)
        if done.release is not None and done.release.step < done.begins:
            done.release = None

    def ran(self, warp: Warp) -> None:
        """Add a block that the warp has executed to its run slice. The step count includes the block."""
        step = self.recorder.step
        run = self._runs[warp.index]
        if run is None:
            run = self._runs[warp.index] = RunSlice(step - 1, step)
            if self.recorder.room():
                self.trace.warps[warp.index].runs.append(run)
        run.ends = step
        run.blocks += 1

    def parks(self, warp: Warp) -> None:
        """Open a wait slice if the warp ended its turn in a wait."""
        wait = warp.waiting()
        parked = self._parked[warp.index]
        if wait is None or (parked is not None and parked.wait is wait):
            return
        self._runs[warp.index] = None
        latest = self._keys.get(warp.index)
        key = latest[1] if latest is not None and latest[0] is wait else self._key_of(warp, wait)
        tail = warp.code.blocks[warp.strands[0].block].instructions[-1]
        step = self.recorder.step
        waits = self.trace.warps[warp.index].waits
        if waits and waits[-1].ends == step and waits[-1].line == tail.line and waits[-1].release is None:
            piece = waits[-1]
        else:
            piece = WaitSlice(step, step, tail.line, mnemonic(tail), _target(key), wait.reason())
            if self.recorder.room():
                waits.append(piece)
        self._parked[warp.index] = _Parked(wait, piece, key)

    def _key_of(self, warp: Warp, wait: Wait) -> object:
        """The key in `Recorder.releases` of whatever ends the wait."""
        if wait.target is not None:
            for offset, barrier in self.cta.mbarriers.items():
                if barrier is wait.target:
                    return "mbarrier", self.number, offset
        opcode = mnemonic(warp.code.blocks[warp.strands[0].block].instructions[-1])
        if opcode.startswith("cp.async"):
            return "groups", self.number, warp.index
        if opcode.startswith("barrier.cluster"):
            return "cluster", 0, id(self.cta.cluster)
        if opcode == "tcgen05.alloc":
            return "tmem", self.number, 0
        return opcode, self.number, warp.index

    def executes(self, warp: Warp, name: str) -> None:
        """Count a notable instruction that the warp executes."""
        opcodes = self.trace.warps[warp.index].opcodes
        opcodes[name] = opcodes.get(name, 0) + 1
        run = self._runs[warp.index]
        if run is None:
            run = self._runs[warp.index] = RunSlice(self.recorder.step, self.recorder.step)
            if self.recorder.room():
                self.trace.warps[warp.index].runs.append(run)
        run.opcodes[name] = run.opcodes.get(name, 0) + 1

    def executed(self, warp: Warp, instruction: Instruction, outcome: object) -> None:
        """Observe what the instruction created, such as mbarriers. `outcome` is its Wait, if it waits."""
        if instruction.parts[0] == "mbarrier" and instruction.parts[1] == "init":
            for offset, barrier in self.cta.mbarriers.items():
                if not isinstance(barrier, RecordedMBarrier):
                    self.cta.mbarriers[offset] = RecordedMBarrier(barrier, self._asked)
                    self._mbarriers[offset] = MBarrierTrace(offset, barrier.expected, instruction.line)
                    self.trace.mbarriers.append(self._mbarriers[offset])
        if instruction.parts[0] == "tcgen05" and "alloc" in instruction.parts[1]:
            self._note_spans(warp)
        if isinstance(outcome, Wait) and instruction.parts[0] in ("bar", "barrier") and self._barrier is not None:
            self._keys[warp.index] = outcome, ("barrier", self.number, self._barrier)

    # ---- barriers

    _barrier: int | None = None

    def barrier_states(self) -> States:
        """The state of every mbarrier and barrier, to find later which ones have changed."""
        states: States = {
            ("mbarrier", self.number, offset): (barrier.phase, barrier.pending, barrier.transactions)
            for offset, barrier in self.cta.mbarriers.items()
        }
        for number in range(NAMED_BARRIERS):
            barrier = self.cta.named.get(number)
            states["barrier", self.number, number] = (barrier.generation, barrier.arrived) if barrier else (0, 0)
        states["cluster", 0, id(self.cta.cluster)] = (self.cta.cluster.generation,)
        return states

    def note_arrivals(self, before: States, by: Release) -> None:
        """Attribute every change since `before` to the running agent."""
        self._barrier = None
        for key, state in self.barrier_states().items():
            old = before.get(key)
            if old is None or old == state:
                continue
            kind, _, which = key if isinstance(key, tuple) else ("", 0, 0)
            if kind == "mbarrier":
                self._count(which, "arrives")
            elif kind == "barrier":
                self._barrier = which
            if state[0] != old[0]:
                self.recorder.releases[key] = by
                if kind == "mbarrier" and which in self._mbarriers and self.recorder.room():
                    self._mbarriers[which].phases.append(by.step)

    def _asked(self, barrier: MBarrier) -> None:
        instruction = self.recorder.doing.instruction
        if instruction is not None and instruction.parts[1:2] in (("try_wait",), ("test_wait",)):
            self._count(barrier.offset, "waits")

    def _count(self, offset: int, role: str) -> None:
        mbarrier, doing = self._mbarriers.get(offset), self.recorder.doing
        if mbarrier is None:
            return
        if doing.operation is not None:
            _, operation = doing.operation
            agent, warp, line, opcode = operation.agent, operation.warp, operation.line, operation.what
        elif doing.warp is not None and doing.instruction is not None:
            agent, warp = "warp", doing.warp.index
            line, opcode = doing.instruction.line, mnemonic(doing.instruction)
        else:
            return
        key = (offset, role, agent, warp, line)
        party = self._parties.get(key)
        if party is None:
            party = self._parties[key] = Party(agent, warp, line, opcode)
            (mbarrier.arrivals if role == "arrives" else mbarrier.waits).append(party)
        party.times += 1

    # ---- operations and memories

    def issued(self, warp: Warp, operation: Operation) -> OperationTrace:
        """Record that a warp of this CTA issues an operation."""
        agent = "copy" if operation.queue is None else "tensor core"
        trace = OperationTrace(self.recorder.next_operation(), operation.what, agent, warp.index, operation.line,
                               operation.text, self.recorder.step)  # fmt: skip
        self.trace.operations.append(trace)
        for touch in self.recorder.unclaimed:
            touch.operation = trace.number
        self.recorder.unclaimed.clear()
        return trace

    def _touch_tmem(self, verb: Verb, lanes: Bounds, columns: Bounds, action: str) -> None:
        doing = self.recorder.doing
        if doing.warp is None or doing.instruction is None or not self.recorder.room():
            return
        touch = TmemTouch(self.recorder.step, verb, mnemonic(doing.instruction), doing.warp.index,
                          doing.instruction.line, lanes, columns)  # fmt: skip
        self.trace.tmem.append(touch)
        if not action.startswith(("tcgen05.ld", "tcgen05.st")):
            self.recorder.unclaimed.append(touch)

    def _note_spans(self, warp: Warp) -> None:
        live = {(one.first, one.columns, one.line) for one in self.cta.tmem.allocations}
        for span in self.trace.tmem_spans:
            key = (span.first, span.columns, span.line)
            if span.ends is None and key not in live:
                span.ends = self.recorder.step
                self.recorder.releases["tmem", self.number, 0] = Release(self.recorder.step, self.number, warp.index)
            live.discard(key)
        self.trace.tmem_spans.extend(TmemSpan(*key, begins=self.recorder.step) for key in sorted(live))

    def _touch_smem(self, verb: Verb, by: str, granules: Granules) -> None:
        doing = self.recorder.doing
        if doing.warp is None or doing.instruction is None:
            return
        use = self._uses.get((verb, by, doing.instruction.line))
        if use is None:
            use = self._uses[verb, by, doing.instruction.line] = _Use(np.zeros(self.cta.smem.data.size // 4, np.bool_))
        use.granules[granules[granules < use.granules.size]] = True
        use.warps.add(doing.warp.index)

    def end(self) -> None:
        """Complete the trace at the end of the launch."""
        self.trace.smem = [
            SmemUse(verb, by, line, sorted(use.warps), _ranges(use.granules))
            for (verb, by, line), use in sorted(self._uses.items(), key=lambda item: item[0][2])
        ]
        for warp, trace in zip(self.cta.warps, self.trace.warps, strict=True):
            parked = self._parked[warp.index]
            if parked is not None:
                parked.slice.ends = self.recorder.step
            for block, times in zip(warp.code.blocks, warp.executed, strict=True):
                for name, number in block.classes.items() if times else ():
                    trace.classes[name] = trace.classes.get(name, 0) + number * times


def _target(key: object) -> str:
    kind, _, which = key if isinstance(key, tuple) else ("", 0, 0)
    if kind == "mbarrier":
        return f"mbarrier {which:#x}"
    return {"barrier": f"barrier {which}", "groups": "its bulk copies", "cluster": "the cluster barrier",
            "tmem": "free tensor memory"}.get(str(kind), str(kind))  # fmt: skip


def _ranges(granules: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Runs of set granules as half-open byte ranges. Beyond MAX_RANGES, the smallest gaps are closed."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], granules, [False]]).astype(np.int8))).reshape(-1, 2) * 4
    while len(edges) > MAX_RANGES:
        gaps = edges[1:, 0] - edges[:-1, 1]
        keep = gaps > max(int(np.sort(gaps)[len(edges) - MAX_RANGES - 1]), int(gaps.min()))
        edges = np.stack([edges[np.concatenate([[True], keep]), 0], edges[np.concatenate([keep, [True]]), 1]], axis=1)
    return [(int(first), int(behind)) for first, behind in edges]

"""Runs only the kernel that a mutant changes, and plays the other launches of its program back.

Launches before the first one of that kernel leave the bytes of the unchanged program. So do later launches, if the
kernel has left the program's own bytes and each is defined where it is there. Launches that may overlap (programmatic
dependent launch) count as one: `Tape.groups`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import accumulate

import msgspec
import numpy as np

from backends.vm import executor as machine
from backends.vm.bind.function import Relatives, bind_function
from backends.vm.load import load
from backends.vm.machine.code import BoundFunction
from backends.vm.machine.machine import PEAKS, LaunchRequest, Machine
from backends.vm.machine.scheduler import Schedule
from backends.vm.memory.definedness import Origin
from backends.vm.memory.global_memory import Buffer, Bytes
from backends.vm.ptx.comments import blanked
from backends.vm.ptx.parser import parse
from conformance.kernels.mutants.mutant import Edit, Mutant
from megamoe.contract import HostProgram, Program

_ENTRY = re.compile(r"\.entry\s+([\w$]+)")


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """Contents of a writable buffer: its bytes, which of them are defined, and the origins of the undefined ones."""

    name: str
    data: Bytes
    state: Bytes | None
    origins: Mapping[int, Origin]

    @classmethod
    def of(cls, buffer: Buffer) -> Kept:
        """Copies the current contents of `buffer`."""
        state = None if buffer.state is None else buffer.state.copy()
        return cls(buffer.name, buffer.data.copy(), state, dict(buffer.sources.by_unit))

    def is_in(self, buffer: Buffer) -> bool:
        """Whether `buffer` holds the same bytes, and the same of them are defined."""
        if self.name != buffer.name or not np.array_equal(self.data, buffer.data):
            return False
        if self.state is None or buffer.state is None:
            return self.state is buffer.state
        return np.array_equal(self.state, buffer.state)

    def put_into(self, buffer: Buffer) -> None:
        """Writes these contents to `buffer`."""
        buffer.data[:] = self.data
        buffer.state = None if self.state is None else self.state.copy()
        buffer.sources.by_unit = dict(self.origins)


@dataclass(frozen=True, slots=True)
class Mark:
    """The end of a launch of the unchanged program: memory, counters, and the state of the schedule."""

    entry: str
    dependent: bool
    kept: tuple[Kept, ...]
    counted: Counter[str]
    schedule: Schedule


@dataclass(slots=True)
class Tape:
    """The launches of one run of a program, in order."""

    marks: list[Mark] = field(default_factory=list[Mark])

    @property
    def groups(self) -> list[int]:
        """The group number of each launch. A launch that may overlap the one before it is in the same group."""
        return list(accumulate(int(not mark.dependent) for mark in self.marks))


class Recording(Machine):
    """A machine that writes a tape."""

    def __init__(self, tape: Tape, *given: object) -> None:
        super().__init__(*given)  # pyright: ignore[reportArgumentType]
        self._tape = tape

    def perform(self, asked: LaunchRequest) -> None:
        """Performs the launch, and adds a mark at its end."""
        before, marks = Counter(self.counters), self._tape.marks
        super().perform(asked)
        known = marks[-1].kept if marks else ()
        buffers = _writable(self)
        same = [one if one.is_in(buffer) else None for one, buffer in zip(known, buffers, strict=False)]
        same += [None] * (len(buffers) - len(same))
        kept = tuple(one or Kept.of(buffer) for one, buffer in zip(same, buffers, strict=True))
        peaks = {name: self.counters[name] for name in PEAKS if name in self.counters}
        counted = Counter({name: count - before[name] for name, count in self.counters.items()} | peaks)
        marks.append(Mark(asked.function.name, asked.dependent, kept, counted, deepcopy(self.schedule)))


class Playing(Machine):
    """A machine that runs the launches of `entry` as `changed` builds it, and plays the tape's launches that are the
    same.

    `touched`: the groups that run.
    """

    def __init__(self, tape: Tape, entry: str, changed: Callable[[], BoundFunction], *given: object) -> None:
        super().__init__(*given)  # pyright: ignore[reportArgumentType]
        self._marks, self._groups = tape.marks, tape.groups
        self.touched = {group for mark, group in zip(self._marks, self._groups, strict=True) if mark.entry == entry}
        self._entry, self._changed = entry, changed
        self._at = 0
        self._in_step = True
        self._left: Mark | None = None

    def perform(self, asked: LaunchRequest) -> None:
        """Performs the launch, or plays it from the tape."""
        name = asked.function.name
        mark = self._marks[self._at] if self._at < len(self._marks) else None
        if mark is not None and (mark.entry, mark.dependent) == (name, asked.dependent) and self._plays():
            self._play(mark, asked.function)
            return
        self._wind()
        self._in_step = self._in_step and mark is not None
        self._at += 1
        super().perform(replace(asked, function=self._changed()) if name == self._entry else asked)

    def _plays(self) -> bool:
        """Whether the next launch finds the memory of the unchanged program, and is not in a changed group."""
        group = self._groups[self._at]
        if group in self.touched or not self._in_step:
            return False
        if self._left is None and self._at and self._groups[self._at - 1] != group:
            buffers, kept = _writable(self), self._marks[self._at - 1].kept
            self._in_step = len(buffers) == len(kept) and all(map(Kept.is_in, kept, buffers))
        # The first launch that uses a variable of the module gives it a place.
        places = [(one.name, one.data.size) for one in self._marks[self._at].kept]
        self._in_step &= places == [(buffer.name, buffer.data.size) for buffer in _writable(self)]
        return self._in_step

    def _play(self, mark: Mark, function: BoundFunction) -> None:
        for name, count in mark.counted.items():
            self.counters[name] = max(self.counters[name], count) if name in PEAKS else self.counters[name] + count
        self.note_last(function)
        self._left = mark
        self._at += 1
        if self._at == len(self._marks):
            self._wind()

    def _wind(self) -> None:
        """Sets memory and the schedule to the end of the last played launch."""
        if self._left is None:
            return
        for kept, buffer in zip(self._left.kept, _writable(self), strict=True):
            kept.put_into(buffer)
        self.schedule = deepcopy(self._left.schedule)
        self._left = None


def _writable(one: Machine) -> list[Buffer]:
    """By name: the host chooses where a host program's buffers are."""
    return sorted((buffer for buffer in one.memory.buffers if buffer.writable), key=lambda buffer: buffer.name)


def recorder(tape: Tape) -> machine.VmExecutor:
    """Returns an executor that records its runs on `tape`."""
    made = machine.VmExecutor()
    made.machines = partial(Recording, tape)
    return made


def player(tape: Tape, program: Program | HostProgram, mutant: Mutant) -> machine.VmExecutor | None:
    """Returns an executor that runs `program` with the mutant's change; None unless a single kernel of the tape
    changes."""
    entry = entry_of(program.ptx, mutant)
    if entry is None or all(mark.entry != entry for mark in tape.marks):
        return None
    made = machine.VmExecutor()
    made.machines = partial(Playing, tape, entry, lambda: _changed(program.ptx, mutant, entry))
    return made


@lru_cache(maxsize=4)
def _changed(ptx: str, mutant: Mutant, entry: str) -> BoundFunction:
    """Parses `entry` with the mutant's change, among the variables and functions of the text."""
    whole = load(ptx, machine.PARSED).module
    others = tuple(Edit(begin, end, "") for name, (begin, end) in bodies(ptx).items() if name != entry)
    alone = parse(replace(mutant, edits=(*mutant.edits, *others)).text_of(ptx))
    function = alone.functions[entry]
    functions = {**whole.functions, entry: function}
    changed = msgspec.structs.replace(whole, functions=functions)
    return bind_function(changed, function, relatives=_relatives(ptx, entry))


@lru_cache(maxsize=4)
def _relatives(ptx: str, entry: str) -> Relatives:
    """The parts of the unchanged `entry` that its mutants reuse."""
    whole, found = load(ptx, machine.PARSED).module, Relatives()
    bind_function(whole, whole.functions[entry], relatives=found)
    return found


def entry_of(ptx: str, mutant: Mutant) -> str | None:
    """The kernel whose body has all edits of a mutant, or None."""
    for name, (begin, end) in bodies(ptx).items():
        if mutant.edits and all(begin <= edit.begin and edit.end <= end for edit in mutant.edits):
            return name
    return None


@lru_cache(maxsize=4)
def bodies(ptx: str) -> Mapping[str, tuple[int, int]]:
    """Returns the place of each kernel's body, between its braces."""
    text = blanked(ptx)
    braces = [(found.start(), 1 if found[0] == "{" else -1) for found in re.finditer(r"[{}]", text)]
    depths = list(accumulate(step for _, step in braces))
    found: dict[str, tuple[int, int]] = {}
    for entry in _ENTRY.finditer(text):
        first = next(at for at, (place, _) in enumerate(braces) if place > entry.end())
        last = next(at for at in range(first, len(braces)) if depths[at] == 0)
        found[entry[1]] = (braces[first][0] + 1, braces[last][0])
    return found

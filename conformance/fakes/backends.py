"""Backends that write a name and a case into their programs, and an executor that does what the name says.

Here the names are ways to misbehave; conformance.fakes.fmha and nvfp4_moe have styles and faults of a kernel. Workers
import each by name, as `conformance.fakes.backends:RAISES`, like a user's backend.
"""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Protocol

import torch

from megamoe.contract import Case, Execution, Program, RunOptions, Target, UnsupportedError
from megamoe.ops import reference
from megamoe.runner import process
from megamoe.runner.wire import Frame
from megamoe.spec.load import load_specs
from megamoe.spec.spec import Spec

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class NamedBackend:
    """Writes `name`, a style or a fault, and the case into the program. `op`: its only op; None for any.

    `build` itself acts on three names: "raises", "declines" and "nothing".
    """

    name: str
    op: str | None = None

    def targets(self, op: str) -> tuple[Target, ...]:
        return ("sm_100a",) if self.op in (None, op) else ()

    def build(self, case: Case, target: Target) -> Program:
        if self.name == "raises":
            raise RuntimeError("the tile of 96 does not divide 128")
        if self.name == "declines":
            raise UnsupportedError("hd=64 needs a tile that this backend does not have")
        if self.name == "nothing":
            raise UnsupportedError(f"{case.id}: this backend has no kernel that works")
        return Program(target, f"{self.name}\n{case.id}", ())


class Emulate(Protocol):
    """Writes the outputs of `case` into `tensors`, in the style or with the fault `name`.

    `run` counts the runs of the executor. Returns the machine rule that was broken, or None.
    """

    def __call__(self, case: Case, tensors: Tensors, name: str, schedule: str, run: int) -> str | None: ...


@dataclass(eq=False)
class FakeExecutor:
    """Emulates what the program names. It counts its runs: this history leaks into results."""

    emulate: Emulate
    name: str = "fake"
    reason: str | None = None
    counters: Mapping[str, int] = field(default_factory=dict[str, int])
    runs: int = 0

    def unavailable(self, target: Target) -> str | None:
        return self.reason

    def run(self, program: Program, tensors: Tensors, options: RunOptions) -> Execution:
        name, case_id = program.ptx.split("\n")
        self.runs += 1
        case = specs()[case_id.partition(":")[0]].parse_case(case_id)
        return Execution(self.counters, self.emulate(case, tensors, name, options.schedule, self.runs))


@cache
def specs() -> dict[str, Spec]:
    """The specs of the repository, by op, read once."""
    return load_specs()


def _hang(tensors: Tensors) -> None:
    time.sleep(3600)


def _exit(tensors: Tensors) -> None:
    os._exit(3)


def _exit_quietly(tensors: Tensors) -> None:
    os._exit(0)


def _segfault(tensors: Tensors) -> None:
    ctypes.string_at(0)


def _leave(tensors: Tensors) -> None:
    sys.exit("the kernel author called exit")


def _write_nan(tensors: Tensors) -> None:
    tensors["o"].view(-1)[5] = float("nan")


def _write_past_the_end(tensors: Tensors) -> None:
    o = tensors["o"]
    ctypes.memset(o.data_ptr() + o.nbytes, 0x41, 1)


def _change_an_input(tensors: Tensors) -> None:
    tensors["k"].view(-1)[0] += 1


def _scale(tensors: Tensors) -> None:
    tensors["o"].mul_(0.5)


def _dawdle(tensors: Tensors) -> None:
    time.sleep(0.3)


BEHAVIOURS: dict[str, Callable[[Tensors], None]] = {
    "hangs": _hang,
    "dawdles": _dawdle,
    "exits": _exit,
    "exits_quietly": _exit_quietly,
    "segfaults": _segfault,
    "leaves": _leave,
    "writes_nan": _write_nan,
    "writes_past_the_end": _write_past_the_end,
    "changes_an_input": _change_an_input,
    "scales": _scale,
}


def _misbehave(case: Case, tensors: Tensors, name: str, schedule: str, run: int) -> str | None:
    """Writes the simulated reference of FMHA into the outputs first, unless the launch is refused."""
    if name == "is_refused":
        return "kernel faulty: a grid of 2147483647 CTAs"
    for output, value in reference("fmha").simulated(case, {part: tensors[part] for part in "qkv"}).items():
        written = value.shape[-1] // 2 if name == "stops_half_way" else value.shape[-1]
        tensors[output][..., :written] = value[..., :written]
    if name in BEHAVIOURS:
        BEHAVIOURS[name](tensors)
    broken = "line 12, warp 0, lane 3: ld.shared reads 4 bytes at 0x10 that nobody wrote"
    return broken if name == "breaks_a_rule" else None


def write_files(request: Frame) -> Frame:
    """Request to a runner: writes `bytes` of memory to a file, over and over the same place, in a child if `forks`."""
    if request.told["forks"] and os.fork():
        os.wait()
        return Frame({})
    with tempfile.TemporaryFile() as file:
        for _ in range(request.told["bytes"] >> 20):
            file.write(bytes(1 << 20))
            file.seek(0)
    time.sleep(request.told["seconds"])
    if request.told["forks"]:
        os._exit(0)
    return Frame({})


def have_children(request: Frame) -> Frame:
    """Request to a runner: has `count` children, in sessions of their own, for some `seconds`."""
    if all(os.fork() for _ in range(request.told["count"])):
        time.sleep(request.told["seconds"])
        return Frame({})
    os.setsid()
    time.sleep(request.told["seconds"])
    os._exit(0)


def end_in_a_way(request: Frame) -> Frame:
    """Request to a runner: starts `programs`, which do not hold its pipe, then ends by `signal` or with `status`."""
    started = [subprocess.Popen(["sleep", "30"]) for _ in range(request.told.get("programs", 0))]
    for one in started:
        one.wait()
    if "signal" in request.told:
        os.kill(os.getpid(), request.told["signal"])
    os._exit(request.told["status"])


def slow_keeper(control: socket.socket) -> None:
    """A keeper that takes half a second until it reports how a runner ended, as on a busy machine."""
    end_the_left = process._end_the_left  # pyright: ignore[reportPrivateUsage]

    def slowly(runners: set[int]) -> None:
        time.sleep(0.5)
        end_the_left(runners)

    process._end_the_left = slowly  # pyright: ignore[reportPrivateUsage]
    process.keep(control)


def hold_memory(request: Frame) -> Frame:
    """Request to a runner: holds `bytes` of memory for a while."""
    held = bytearray(request.told["bytes"])
    held[::4096] = b"x" * len(held[::4096])
    time.sleep(request.told["seconds"])
    return Frame({"held": len(held)})


def die_at_start(environment: Mapping[str, str], module: str) -> None:
    """A `start_worker` that exits at once."""
    os._exit(9)


EXECUTOR = FakeExecutor(_misbehave, counters={"instructions": 7})
BROKEN_MACHINE = FakeExecutor(_misbehave, "broken", "it has no such tensor cores")
RAISES = NamedBackend("raises")
DECLINES = NamedBackend("declines")
WORKS = NamedBackend("works")
HANGS = NamedBackend("hangs")
DAWDLES = NamedBackend("dawdles")
EXITS = NamedBackend("exits")
EXITS_QUIETLY = NamedBackend("exits_quietly")
SEGFAULTS = NamedBackend("segfaults")
LEAVES = NamedBackend("leaves")
WRITES_NAN = NamedBackend("writes_nan")
WRITES_PAST_THE_END = NamedBackend("writes_past_the_end")
CHANGES_AN_INPUT = NamedBackend("changes_an_input")
SCALES = NamedBackend("scales")
STOPS_HALF_WAY = NamedBackend("stops_half_way")
BREAKS_A_RULE = NamedBackend("breaks_a_rule")
IS_REFUSED = NamedBackend("is_refused")
EMPTY = NamedBackend("empty", "none")
NOT_A_BACKEND = 17

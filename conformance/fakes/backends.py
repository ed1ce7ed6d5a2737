"""Backends that misbehave, one way each, and an executor that acts on it.

Workers find them by name, as `conformance.fakes.backends:RAISES`, the way a user brings a backend. The text of a
program is the behaviour and the case. The executor writes the simulated reference first, then misbehaves.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from megamoe.contract import Case, Execution, Program, RunOptions, Target, UnsupportedError
from megamoe.ops import reference
from megamoe.spec.load import load_specs

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class FakeBackend:
    """Names a behaviour of FakeExecutor. "raises" and "declines" happen in `build`."""

    name: str

    def targets(self, op: str) -> tuple[Target, ...]:
        return ("sm_100a",)

    def build(self, case: Case, target: Target) -> Program:
        if self.name == "raises":
            raise RuntimeError("the tile of 96 does not divide 128")
        if self.name == "declines":
            raise UnsupportedError("hd=64 needs a tile that this backend does not have")
        return Program(target, f"{self.name}\n{case.id}", ())


class EmptyBackend(FakeBackend):
    """Has no kernel of any op."""

    def __init__(self) -> None:
        super().__init__("empty")

    def targets(self, op: str) -> tuple[Target, ...]:
        return ()


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


def _nothing(tensors: Tensors) -> None:
    pass


BEHAVIOURS: dict[str, Callable[[Tensors], None]] = {
    "works": _nothing,
    "hangs": _hang,
    "exits": _exit,
    "exits_quietly": _exit_quietly,
    "segfaults": _segfault,
    "leaves": _leave,
    "writes_nan": _write_nan,
    "writes_past_the_end": _write_past_the_end,
    "changes_an_input": _change_an_input,
    "scales": _scale,
    "stops_half_way": _nothing,
    "breaks_a_rule": _nothing,
}


@dataclass(frozen=True)
class FakeExecutor:
    """Writes the simulated reference into the outputs, then misbehaves as the program says."""

    name: str = "fake"
    reason: str | None = None

    def unavailable(self, target: Target) -> str | None:
        return self.reason

    def run(self, program: Program, tensors: Tensors, options: RunOptions) -> Execution:
        behaviour, case_id = program.ptx.split("\n")
        case = load_specs()["fmha"].parse_case(case_id)
        inputs = {name: tensors[name] for name in ("q", "k", "v")}
        for name, value in reference("fmha").simulated(case, inputs).items():
            written = value.shape[-1] // 2 if behaviour == "stops_half_way" else value.shape[-1]
            tensors[name][..., :written] = value[..., :written]
        BEHAVIOURS[behaviour](tensors)
        violation = "line 12, warp 0, lane 3: ld.shared reads 4 bytes at 0x10 that nobody wrote"
        return Execution({"instructions": 7}, violation if behaviour == "breaks_a_rule" else None)


def die_at_start(environment: Mapping[str, str], module: str) -> None:
    """A `start_worker` that dies."""
    os._exit(9)


EXECUTOR = FakeExecutor()
BROKEN_MACHINE = FakeExecutor("broken", "it has no such tensor cores")
RAISES = FakeBackend("raises")
DECLINES = FakeBackend("declines")
WORKS = FakeBackend("works")
HANGS = FakeBackend("hangs")
EXITS = FakeBackend("exits")
EXITS_QUIETLY = FakeBackend("exits_quietly")
SEGFAULTS = FakeBackend("segfaults")
LEAVES = FakeBackend("leaves")
WRITES_NAN = FakeBackend("writes_nan")
WRITES_PAST_THE_END = FakeBackend("writes_past_the_end")
CHANGES_AN_INPUT = FakeBackend("changes_an_input")
SCALES = FakeBackend("scales")
STOPS_HALF_WAY = FakeBackend("stops_half_way")
BREAKS_A_RULE = FakeBackend("breaks_a_rule")
EMPTY = EmptyBackend()
NOT_A_BACKEND = 17

"""The instructions that report to a recorder: those that move data, synchronise or compute a tile."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from backends.vm.machine.code import Block, Code, Step
from backends.vm.ptx.ast import Immediate, Instruction

if TYPE_CHECKING:
    from backends.vm.machine.warp import Warp
    from backends.vm.trace.recorder import Recorder

_NOTABLE = frozenset(
    ("tcgen05", "wgmma", "mma", "cp", "mbarrier", "bar", "barrier", "ld", "st", "red", "atom", "stmatrix", "ldmatrix",
     "ex2", "setmaxnreg", "griddepcontrol")
)  # fmt: skip
_SPACES = ("global", "shared", "local", "const", "param")


def mnemonic(instruction: Instruction) -> str:
    """An instruction in a few words of PTX, such as "tcgen05.mma" or "cp.async.bulk.tensor.shared.global"."""
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
    """Whether a recorder hears of the instruction. Parameter loads are of no interest."""
    return instruction.parts[0] in _NOTABLE and mnemonic(instruction) != "ld.param"


def instrumented(code: Code, recorder: Recorder) -> Code:
    """`code` with every notable step reporting itself to `recorder`."""

    def reporting(step: Step, instruction: Instruction) -> Step:
        return _reporting(code, instruction, step, recorder) if notable(instruction) else step

    def copy(block: Block) -> Block:
        steps = [reporting(step, block.instructions[index]) for index, step in enumerate(block.steps)]
        tail = block.tail and reporting(block.tail, block.instructions[-1])
        return replace(block, steps=steps, tail=tail)

    return replace(code, blocks=[copy(block) for block in code.blocks])


def _reporting(code: Code, instruction: Instruction, step: Step, recorder: Recorder) -> Step:
    guard = instruction.guard
    row = code.rows.rows[guard.register][1] if guard is not None else None
    name = mnemonic(instruction)

    def run(warp: Warp) -> object:
        if guard is not None and row is not None:
            lanes = warp.mask & (~warp.pred[row] if guard.negated else warp.pred[row])
            if not np.count_nonzero(lanes):
                return step(warp)
        cta = recorder.cta_of(warp)
        if cta is None:
            return step(warp)
        cta.executes(warp, name)
        with recorder.instruction(warp, instruction):
            outcome = step(warp)
        cta.executed(warp, instruction, outcome)
        return outcome

    return run

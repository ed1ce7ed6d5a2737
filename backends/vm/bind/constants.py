"""Constants that an operand cannot be, as ptxas 13.5 refuses them. The same values in registers are found at run time.

ptxas takes a thread count of 0 or more than a CTA has, and bytes of any number, so they are left to the run.
"""

from __future__ import annotations

from collections.abc import Iterator

from backends.vm.machine.cta import NAMED_BARRIERS
from backends.vm.memory.mbarrier import MAX_COUNT
from backends.vm.memory.tmem import COUNTS
from backends.vm.ptx.ast import Immediate, Instruction


def impossible(instruction: Instruction) -> str | None:
    """The reason why a constant operand cannot be what it is, or None."""
    name, parts = instruction.parts[0], instruction.parts
    if name in ("bar", "barrier") and not {"cluster", "warp"} & set(parts):
        return next(_of_barrier(instruction), None)
    if name == "mbarrier":
        return _of_mbarrier(instruction)
    if name == "tcgen05" and parts[1] in ("alloc", "dealloc"):
        columns = _constant(instruction, 1)
        if columns is not None and columns not in COUNTS:
            return f"the number of columns is {columns}; it must be a power of two in 32..512 (PTX ISA 9.7.16.7.1)"
    return None


def _constant(instruction: Instruction, position: int) -> int | None:
    """The value of an operand that is an integer literal."""
    operands = instruction.operands
    operand = operands[position] if position < len(operands) else None
    return operand.value if isinstance(operand, Immediate) and operand.kind == "int" else None


def _of_barrier(instruction: Instruction) -> Iterator[str]:
    reduces, operands = "red" in instruction.parts, len(instruction.operands)
    number = _constant(instruction, int(reduces))
    if number is not None and not 0 <= number < NAMED_BARRIERS:
        yield f"barrier {number} does not exist; there are 0..{NAMED_BARRIERS - 1} (PTX ISA 9.7.13.1)"
    # The last operand of a reduction is its predicate.
    threads = _constant(instruction, 2 if reduces else 1) if operands > 2 * reduces + 1 else None
    if threads is None:
        return
    if threads % 32:
        yield f"the thread count is {threads}; it must be a multiple of 32 (PTX ISA 9.7.13.1)"
    if threads == 0 and "arrive" in instruction.parts:
        yield "the thread count is 0; arrive needs a positive one (PTX ISA 9.7.13.1)"


def _of_mbarrier(instruction: Instruction) -> str | None:
    parts = instruction.parts
    value = _constant(instruction, 1 if parts[1] == "init" else 2)
    if value is None:
        return None
    if parts[1] == "init" and not 1 <= value <= MAX_COUNT:
        return f"the count is {value}; it must be in 1..{MAX_COUNT} (PTX ISA 9.7.13.15.9)"
    if parts[1] in ("arrive", "arrive_drop") and "expect_tx" not in parts and value <= 0:
        return f"the count is {value}; it must be positive (PTX ISA 9.7.13.15.13, 9.7.13.15.14)"
    if "parity" in parts and value not in (0, 1):
        return f"the parity is {value}; it must be 0 or 1 (PTX ISA 9.7.13.15.16)"
    return None

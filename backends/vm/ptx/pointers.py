"""Which parameters of a kernel are pointers into global memory, as far as its text says so cheaply.

The attribute .ptr says it (PTX ISA 5.1.6.3). nvcc leaves it out: then a parameter is a pointer if it is loaded whole
into a register that nothing else writes, and that register is the base of an access to global memory or the source of
cvta.to. A parameter to which the kernel adds something first is not recognised.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from backends.vm.ptx.ast import Address, Instruction, Operand, Pair, Register, Symbol, Variable, Vector

POINTER_BYTES: Final = 8
_ACCESSES: Final = frozenset(["ld", "ldu", "st", "atom", "red"])
_OTHER_SPACES: Final = ("shared", "local", "param", "const")


def with_pointers(params: Sequence[Variable], instructions: Sequence[Instruction]) -> tuple[Variable, ...]:
    """`params` of a kernel of these instructions, with `pointer` set in each one that is known to be a pointer."""
    asked = {one.name for one in params if one.size == POINTER_BYTES and not one.pointer}
    if not asked:
        return tuple(params)
    holds = dict[str, str]()
    writes = Counter[str]()
    used = set[str]()
    for one in instructions:
        match one.operands:
            case [Register(name), Address(Symbol(parameter), 0)] if one.parts[:2] == ("ld", "param"):
                writes[name] += 1
                if parameter in asked:
                    holds[name] = parameter
                continue
            case [Register(), Register(source)] if one.parts[:2] == ("cvta", "to") and one.parts[2] == "global":
                used.add(source)
            case _ if one.parts[0] in _ACCESSES and not any(part.startswith(_OTHER_SPACES) for part in one.parts):
                used.update(each.base.name for each in one.operands
                            if isinstance(each, Address) and isinstance(each.base, Register))  # fmt: skip
            case _:
                pass
        # An instruction with a destination names it first. A store has an address there.
        writes.update(name for each in one.operands[:1] for name in _registers(each))
    known = {holds[name] for name in used if name in holds and writes[name] == 1}
    return tuple(msgspec.structs.replace(one, pointer=True) if one.name in known else one for one in params)


def _registers(operand: Operand) -> Iterator[str]:
    match operand:
        case Register(name):
            yield name
        case Vector(items):
            yield from (name for each in items for name in _registers(each))
        case Pair(first, second):
            yield from (*_registers(first), *_registers(second))
        case _:
            pass

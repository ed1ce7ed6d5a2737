"""The roles of warps, inferred from the instructions that each executed, never from names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from megamoe.contract.trace import WarpTrace

Opcodes = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Role:
    """Warps with the same role. `evidence`: the opcodes that decided it, with their counts over all these warps."""

    name: str
    warps: tuple[int, ...]
    evidence: tuple[tuple[str, int], ...]
    registers: int | None
    """Registers per thread after the last setmaxnreg; None if none was executed."""


def _any(*prefixes: str) -> Callable[[Opcodes], int]:
    return lambda opcodes: sum(times for name, times in opcodes.items() if name.startswith(prefixes))


_TMA_LOADS = _any("cp.async.bulk.tensor.shared", "cp.async.bulk.shared")
_TMA_STORES = _any("cp.async.bulk.tensor.global", "cp.async.bulk.global", "cp.reduce")
_MMA = _any("tcgen05.mma", "wgmma.mma", "mma.sync")
_EX2 = _any("ex2")
_TMEM_LOADS, _TMEM_STORES = _any("tcgen05.ld"), _any("tcgen05.st")
_GLOBAL_STORES, _SHARED_STORES = _any("st.global"), _any("st.shared", "stmatrix")
MAX_STRAY_EX2 = 8
"""A warp with at most this many exponentials is no softmax warp: a rescale factor or a final scale needs some."""


def _hands_probabilities_on(opcodes: Opcodes) -> bool:
    """Whether the exponentials feed an mma (softmax) rather than activate the result of a GEMM."""
    return bool(_TMEM_STORES(opcodes) or _MMA(opcodes) or (_SHARED_STORES(opcodes) and not _GLOBAL_STORES(opcodes)))


def role_name(opcodes: Opcodes) -> str:
    """The role of a warp with these opcode counts, in words."""
    names: list[str] = []
    if _TMA_LOADS(opcodes):
        names.append("TMA producer")
    if _any("tcgen05.mma")(opcodes):
        names.append("MMA issuer")
    elif _MMA(opcodes):
        names.append("MMA")
    exponentials = _EX2(opcodes) > MAX_STRAY_EX2
    softmax = exponentials and _hands_probabilities_on(opcodes)
    if softmax:
        names.append("softmax")
    elif exponentials:
        names.append("activation")
    epilogue = bool(_TMA_STORES(opcodes) or (_GLOBAL_STORES(opcodes) and not softmax))
    if not exponentials and _TMEM_LOADS(opcodes) and (_TMEM_STORES(opcodes) or not epilogue):
        names.append("correction" if _TMEM_STORES(opcodes) else "accumulator reader")
    if epilogue:
        names.append("epilogue")
    if not names:
        names.append("set-up" if _any("tcgen05.alloc", "mbarrier.init")(opcodes) else "idle")
    return ", ".join(names)


def roles(warps: Sequence[WarpTrace]) -> list[Role]:
    """The roles of a CTA's warps, sorted by number of warps, largest first, then by first warp."""
    groups: dict[str, list[WarpTrace]] = {}
    for warp in warps:
        groups.setdefault(role_name(warp.opcodes), []).append(warp)
    found = [_role(name, group) for name, group in groups.items()]
    return sorted(found, key=lambda role: (-len(role.warps), role.warps))


_TELLING = ("tcgen05.mma", "tcgen05.commit", "tcgen05.ld", "tcgen05.st", "tcgen05.cp", "tcgen05.alloc", "wgmma", "mma",
            "cp.", "ex2", "st.global", "st.shared", "ld.shared")  # fmt: skip


def _role(name: str, group: Sequence[WarpTrace]) -> Role:
    totals: dict[str, int] = {}
    registers: int | None = None
    for warp in group:
        for opcode, times in warp.opcodes.items():
            if opcode.startswith("setmaxnreg"):
                last = opcode.rpartition(" ")[2]
                registers = int(last) if last.isdigit() else registers
            elif opcode.startswith(_TELLING) and "group" not in opcode and "fence" not in opcode:
                totals[opcode] = totals.get(opcode, 0) + times
    evidence = tuple(sorted(totals.items(), key=lambda item: -item[1]))
    return Role(name, tuple(warp.index for warp in group), evidence, registers)


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers in words: 0-3, 8."""
    parts: list[str] = []
    start = previous = numbers[0] if numbers else 0
    for number in [*numbers[1:], None] if numbers else []:
        if number is not None and number == previous + 1:
            previous = number
            continue
        parts.append(str(start) if start == previous else f"{start}-{previous}")
        start = previous = number if number is not None else previous
    return ", ".join(parts)

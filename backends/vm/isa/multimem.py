"""multimem.* on one device: a multicast address maps to one memory, so each is an ordinary load, store or reduction
(PTX ISA 9.7.9.14). With several devices it would be a reduction over, or a broadcast to, all of them."""

from __future__ import annotations

import numpy as np

from backends.vm.bind.binder import Binder
from backends.vm.bind.forms import Step, opcode
from backends.vm.isa.memory_access import atomic
from backends.vm.machine import access
from backends.vm.machine.code import LANES
from backends.vm.machine.warp import Warp
from backends.vm.memory.strong_writes import STRONG, Strong

_SECTION = "9.7.9.14"
_ORDER = "relaxed acquire"
_SCOPES = "cta cluster gpu sys"
_INTEGERS = "b32 b64 u32 s32 u64 s64"
_FLOATS = "f16 f16x2 bf16 bf16x2 f32 f64 e4m3x4 e5m2x4"
_BITS = {"f16": 16, "bf16": 16, "f64": 64, "b64": 64, "u64": 64, "s64": 64}


def _elements(b: Binder) -> tuple[str, int]:
    """The view of the registers, and how many there are."""
    return f"u{_BITS.get(b.words['type'], 32)}", int((b.words.get("vec") or "v1")[1:])


@opcode("multimem.ld_reduce{.weak}{.global}.<op>.<type>", section=_SECTION, counter="memory",
        op="min max add and or xor", type=_INTEGERS)  # fmt: skip
@opcode("multimem.ld_reduce.<sem>.<scope>{.global}.<op>.<type>", section=_SECTION, counter="memory", sem=_ORDER,
        scope=_SCOPES, op="min max add and or xor", type=_INTEGERS)  # fmt: skip
@opcode("multimem.ld_reduce{.weak}{.global}.<op>{.<acc>}{.<vec>}.<type>", section=_SECTION, counter="memory",
        op="min max add", acc="acc::f16 acc::f32", vec="v2 v4 v8", type=_FLOATS)  # fmt: skip
@opcode("multimem.ld_reduce.<sem>.<scope>{.global}.<op>{.<acc>}{.<vec>}.<type>", section=_SECTION, counter="memory",
        sem=_ORDER, scope=_SCOPES, op="min max add", acc="acc::f16 acc::f32", vec="v2 v4 v8", type=_FLOATS)  # fmt: skip
def ld_reduce(b: Binder) -> Step:
    """Load: a reduction over one memory is its content."""
    d, address = b.expect(2)
    view, count = _elements(b)
    rows = [b.destination(item, view) for item in b.vector(d, count)]
    place, sem, scope = b.address(address), b.words.get("sem", ""), b.words.get("scope", "")
    strong = Strong(scope, "load") if sem else None
    dtype = np.dtype(f"u{int(view[1:]) // 8}")

    def step(warp: Warp) -> None:
        addresses = place(warp)[warp.mask]
        if sem:
            access.synchronise(warp, "global", addresses, sem, scope, acquire=True)
        loaded = access.load(warp, "global", addresses, dtype.itemsize * count, strong=strong).view(dtype)
        for column, row in enumerate(rows):
            getattr(warp, view)[row][warp.mask] = loaded[:, column]

    return step


@opcode("multimem.st{.<sem>}{.<scope>}{.global}{.<vec>}.<type>", section=_SECTION, counter="memory",
        sem="weak relaxed release", scope=_SCOPES, vec="v2 v4 v8", type=f"{_INTEGERS} {_FLOATS}")  # fmt: skip
def multimem_store(b: Binder) -> Step:
    """Store to the one memory."""
    address, source = b.expect(2)
    view, count = _elements(b)
    rows = [b.source(item, view) for item in b.vector(source, count)]
    place, sem, scope, line = b.address(address), b.words["sem"], b.words["scope"], b.instruction.line
    strong = Strong(scope) if sem in STRONG else None
    dtype = np.dtype(f"u{int(view[1:]) // 8}")

    def step(warp: Warp) -> None:
        values = np.empty((LANES, count), dtype)
        for column, row in enumerate(rows):
            values[:, column] = getattr(warp, view)[row]
        addresses = place(warp)[warp.mask]
        access.store(warp, "global", addresses, values[warp.mask].view(np.uint8), line, strong=strong)
        if strong:
            access.synchronise(warp, "global", addresses, sem, scope, release=True, overwrites=True)

    return step


@opcode("multimem.red{.<sem>}{.<scope>}{.<space>}.<op>.<type>", section=_SECTION, counter="memory",
        sem="relaxed release", scope=_SCOPES, space="global", op="min max add and or xor", type=_INTEGERS)  # fmt: skip
@opcode("multimem.red{.<sem>}{.<scope>}{.<space>}.<op>.<type>", section=_SECTION, counter="memory",
        sem="relaxed release", scope=_SCOPES, space="global", op="add", type="f32 f64")  # fmt: skip
@opcode("multimem.red{.<sem>}{.<scope>}{.<space>}.<op>{.<vec>}.<type>", section=_SECTION, counter="memory",
        sem="relaxed release", scope=_SCOPES, space="global", op="min max add", vec="v2 v4 v8",
        type="f16 f16x2 bf16 bf16x2")  # fmt: skip
@opcode("multimem.red{.<sem>}{.<scope>}{.<space>}.<op>.<vec>.<type>", section=_SECTION, counter="memory",
        sem="relaxed release", scope=_SCOPES, space="global", op="add", vec="v2 v4", type="f32")  # fmt: skip
def multimem_reduce(b: Binder) -> Step:
    """Reduce into the one memory."""
    address, source = b.expect(2)
    return atomic(b, None, address, source)

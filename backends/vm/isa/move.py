"""mov in its three shapes (copy, pack, unpack), selp, prmt and cvta (PTX ISA 9.7.9)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from backends.vm.bind.binder import Binder
from backends.vm.bind.forms import Step, opcode
from backends.vm.faults import counted
from backends.vm.machine.code import LANES
from backends.vm.machine.special import components, reads_in_part
from backends.vm.machine.warp import Warp
from backends.vm.memory.global_memory import LOCAL_WINDOW, PARAM_WINDOW, SHARED_WINDOW
from backends.vm.numerics.traced import is_traced, taken
from backends.vm.numpy_calls import count_nonzero
from backends.vm.ptx.ast import Operand, Register, Sink, Vector

_VIEW = {16: "u16", 32: "u32", 64: "u64", 128: "u64x2"}
Words = npt.NDArray[np.uint32]
_PAIR = {(32, 16): "u16x2", (64, 32): "u32x2"}
"""The view of a register as two halves, by its width and the halves' width."""
_SCALARS = "b16 u16 s16 b32 u32 s32 f32 b64 u64 s64 f64"
_CLOCKS = {
    "%clock": 32,
    "%clock_hi": 32,
    "%clock64": 64,
    "%globaltimer": 64,
    "%globaltimer_lo": 32,
    "%globaltimer_hi": 32,
}


def bits_of(type_name: str) -> int:
    """Width in bits of a PTX scalar type name."""
    return int(type_name.lstrip("bfuse"))


@opcode("mov.<type>", section="9.7.9.3", counter="move", type=_SCALARS + " b128")
def mov(b: Binder) -> Step:
    """Copy a register, a literal or an address, or pack or unpack a vector of narrower registers."""
    d, a = b.expect(2)
    width = bits_of(b.words["type"])
    if isinstance(a, Register) and a.name in _CLOCKS:
        return _clock(b, d, a.name, width)
    if isinstance(a, Register) and width == 128:
        a = _whole(a)
    if isinstance(d, Vector):
        return _unpack(b, d, a, width)
    if isinstance(a, Vector):
        return _pack(b, d, a, width)
    view = _VIEW[width]
    rd, (wide, ra) = b.destination(d, view), _read(b, a, width)
    if wide != view:
        return lambda warp: np.copyto(getattr(warp, view)[rd], getattr(warp, wide)[ra], where=warp.where,
                                      casting="unsafe")  # fmt: skip

    def step(warp: Warp) -> None:
        rows = getattr(warp, view)
        if warp.where is True:
            rows[rd][...] = rows[ra]
        else:
            rows[rd][warp.mask] = rows[ra][warp.mask]

    return _fast_copy(rd, ra, view) if width in (32, 64) else step


def _fast_copy(rd: int, ra: int, view: str) -> Step:
    if view == "u32":
        return lambda warp: np.copyto(warp.u32[rd], warp.u32[ra], where=warp.where)
    return lambda warp: np.copyto(warp.u64[rd], warp.u64[ra], where=warp.where)


def _read(b: Binder, a: Operand, width: int) -> tuple[str, int]:
    """View and row of a source, which is wider if it is a special register that is read in part."""
    view = _VIEW[width]
    if isinstance(a, Register) and reads_in_part(a.name, width):
        return f"u{b.width(a)}", b.source(a, view, wider=True)
    return view, b.source(a, view)


def _whole(a: Operand) -> Operand:
    """The components of a special register that is a vector; any other operand itself."""
    names = components(a.name) if isinstance(a, Register) else ()
    return Vector(tuple(map(Register, names))) if names else a


def _clock(b: Binder, d: Operand, name: str, width: int) -> Step:
    """Copy or unpack a clock, which counts the steps of the launch."""
    if width != _CLOCKS[name]:
        raise b.error(f"`{name}` holds {_CLOCKS[name]} bits, and `mov.{b.words['type']}` copies {width}")
    items = b.vector(d)
    part = width // len(items)
    if part not in (16, 32, 64):
        raise b.error(f"{width} bits do not make {counted(len(items), 'part')}")
    view = _VIEW[part]
    rows = [(part * at, b.destination(item, view)) for at, item in enumerate(items)]

    def step(warp: Warp) -> None:
        elapsed = warp.cta.machine.step_budget - warp.cta.machine.steps_left
        for low, row in rows:
            value = np.array(elapsed >> low & (2**part - 1), f"u{part // 8}")
            np.copyto(getattr(warp, view)[row], value, where=warp.where)

    return step


@opcode("mov.<vec>.<type>", section="9.7.9.3", counter="move", vec="v2 v4", type="b16 u16 s16 b32 u32 s32 f32")
@opcode("mov.<vec>.<type>", section="9.7.9.3", counter="move", vec="v2", type="b64 u64 s64 f64")
def mov_vector(b: Binder) -> Step:
    """Copy a vector of registers, or a special register that is a vector (PTX ISA 10.1). Section 9.7.9.3 does not list
    it; ptxas 13.5 makes the machine code of one mov for each element."""
    d, a = b.expect(2)
    count, width = int(b.words["vec"][1:]), bits_of(b.words["type"])
    view = _VIEW[width]
    sources = [_read(b, item, width) for item in b.braced(_whole(a), count)]
    targets = [b.destination(item, view) for item in b.braced(d, count)]

    def step(warp: Warp) -> None:
        values = [np.array(getattr(warp, wide)[row]) for wide, row in sources]
        for row, value in zip(targets, values, strict=True):
            np.copyto(getattr(warp, view)[row], value, where=warp.where, casting="unsafe")

    return step


@opcode("mov.pred", section="9.7.9.3", counter="move")
def mov_pred(b: Binder) -> Step:
    """Copy a predicate."""
    d, a = b.expect(2)
    rd, ra = b.destination(d, "pred"), b.source(a, "pred")
    return lambda warp: np.copyto(warp.pred[rd], warp.pred[ra], where=warp.where)


def _pack(b: Binder, d: Operand, a: Vector, width: int) -> Step:
    part = width // len(a.items)
    if part not in (16, 32, 64) and not (part == 8 and width in (16, 32)):
        raise b.error(f"{width} bits are not made of {counted(len(a.items), 'part')}")
    view, whole = _VIEW[max(part, 16)], _VIEW[width]
    if pair := _PAIR.get((width, part)):
        first, second = [b.source(item, view) for item in a.items]
        rd = b.destination(d, pair)

        def join(warp: Warp) -> None:
            rows, out = getattr(warp, view), getattr(warp, pair)[rd]
            np.copyto(out[:, 0], rows[first], where=warp.where)
            np.copyto(out[:, 1], rows[second], where=warp.where)

        return join
    rd = b.destination(d, whole)
    sources = [b.source(item, view) for item in a.items]
    dtype = np.dtype(f"u{part // 8}")

    def step(warp: Warp) -> None:
        rows = getattr(warp, view)
        packed = np.empty((LANES, len(sources)), dtype)
        for column, row in enumerate(sources):
            packed[:, column] = rows[row]
        out = getattr(warp, whole)[rd]
        np.copyto(out.view(dtype).reshape(LANES, -1), packed, where=True if warp.where is True else warp.mask[:, None])

    return step


def _unpack(b: Binder, d: Vector, a: Operand, width: int) -> Step:
    part = width // len(d.items)
    if part not in (16, 32, 64) and not (part == 8 and width in (16, 32)):
        raise b.error(f"{width} bits do not make {counted(len(d.items), 'part')}")
    view, whole = _VIEW[max(part, 16)], _VIEW[width]
    targets = [(column, b.destination(item, view)) for column, item in enumerate(d.items) if not isinstance(item, Sink)]
    if pair := _PAIR.get((width, part)):
        row_a = b.source(a, pair)

        def split(warp: Warp) -> None:
            parts, rows = getattr(warp, pair)[row_a], getattr(warp, view)
            for column, row in targets:
                np.copyto(rows[row], parts[:, column], where=warp.where)

        return split
    ra = b.source(a, whole)
    dtype = np.dtype(f"u{part // 8}")

    def step(warp: Warp) -> None:
        parts = np.array(getattr(warp, whole)[ra]).view(dtype).reshape(LANES, -1)
        rows = getattr(warp, view)
        for column, row in targets:
            np.copyto(rows[row], parts[:, column], where=warp.where)

    return step


@opcode("selp.<type>", section="9.7.6.3", counter="move", type=_SCALARS)
def selp(b: Binder) -> Step:
    """d = p ? a : c."""
    d, a, c, p = b.expect(4)
    view = _VIEW[bits_of(b.words["type"])]
    if b.words["type"] in ("f32", "f64"):
        view = b.words["type"]
    rd, ra, rc = b.destination(d, view), b.source(a, view), b.source(c, view)
    rp, negated = b.predicate(p)

    def step(warp: Warp) -> None:
        rows = getattr(warp, view)
        chosen = np.where(warp.pred[rp], rows[rc], rows[ra]) if negated else np.where(warp.pred[rp], rows[ra], rows[rc])
        np.copyto(rows[rd], chosen, where=warp.where)

    return step


# Selectors of the special modes (PTX ISA 9.7.9.7), by the low two bits of the third source.
_PRMT_MODES = {
    "f4e": (0x3210, 0x4321, 0x5432, 0x6543),
    "b4e": (0x5670, 0x6701, 0x7012, 0x0123),
    "rc8": (0x0000, 0x1111, 0x2222, 0x3333),
    "ecl": (0x3210, 0x3211, 0x3222, 0x3333),
    "ecr": (0x0000, 0x1110, 0x2210, 0x3210),
    "rc16": (0x1010, 0x3232, 0x1010, 0x3232),
}


@opcode("prmt.b32{.<mode>}", section="9.7.9.7", counter="move", mode=" ".join(_PRMT_MODES))
def prmt(b: Binder) -> Step:
    """Pick four bytes out of eight. In default mode selector nibbles of 8 and up replicate the sign."""
    special = _PRMT_MODES.get(b.words["mode"])
    selectors = None if special is None else np.array(special, np.uint32)
    d, a, c, selector = b.expect(4)
    rd = b.destination(d, "u32")
    ra, rc, rs = (b.source(item, "u32") for item in (a, c, selector))

    def step(warp: Warp) -> None:
        low, high, control = warp.u32[ra], warp.u32[rc], warp.u32[rs]
        if selectors is not None:
            control = taken(selectors, control & 3)
        pick = _computed_bytes if is_traced(control) else _picked_bytes
        np.copyto(warp.u32[rd], pick(low, high, control), where=warp.where)

    return step


def _picked_bytes(low: Words, high: Words, control: Words) -> Words:
    pool = np.empty((LANES, 2), np.uint32)
    pool[:, 0], pool[:, 1] = low, high
    first = int(control[0])
    if first & 0x8888 == 0 and not count_nonzero(control != control[0]):
        chosen = pool.view(np.uint8).take([first & 7, first >> 4 & 7, first >> 8 & 7, first >> 12 & 7], axis=1)
    else:
        chosen = _pick_bytes(pool.view(np.uint8), control)
    return chosen.view(np.uint32)[:, 0]


def _computed_bytes(low: Words, high: Words, control: Words) -> Words:
    """As `_picked_bytes`, with arithmetic only."""
    pool = high.astype(np.uint64) << np.uint64(32) | low.astype(np.uint64)
    found = np.zeros_like(low)
    for place in (0, 4, 8, 12):
        pick = control >> np.uint32(place)
        byte = (pool >> (pick.astype(np.uint64) & np.uint64(7)) * np.uint64(8)).astype(np.uint32) & np.uint32(0xFF)
        sign = np.where(byte & np.uint32(0x80) != 0, np.uint32(0xFF), np.uint32(0))
        found |= np.where(pick & np.uint32(8) != 0, sign, byte) << np.uint32(2 * place)
    return found


def _pick_bytes(pool: npt.NDArray[np.uint8], control: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint8]:
    picks = control[:, None] >> np.array([0, 4, 8, 12], np.uint32)
    chosen = np.take_along_axis(pool, (picks & 7).astype(np.intp), axis=1)
    return np.where(picks & 8 != 0, np.where(chosen & 0x80, 0xFF, 0), chosen).astype(np.uint8)


_WINDOW = {"shared": SHARED_WINDOW, "shared::cta": SHARED_WINDOW, "shared::cluster": SHARED_WINDOW,
           "local": LOCAL_WINDOW, "param": PARAM_WINDOW, "global": 0, "const": 0}  # fmt: skip


@opcode("cvta{.to}.<space>.u64", "cvta{.to}.<space>.u32", section="9.7.9.20", counter="move", space=" ".join(_WINDOW))
def cvta(b: Binder) -> Step:
    """Convert between a state space's own addresses and generic ones: add or remove the space's window."""
    d, a = b.expect(2)
    rd, ra = b.destination(d, "u64"), b.source(a, "u64")
    window = np.uint64(_WINDOW[b.words["space"]])
    if not window:
        return lambda warp: np.copyto(warp.u64[rd], warp.u64[ra], where=warp.where)
    if b.words["to"]:
        return lambda warp: np.copyto(warp.u64[rd], warp.u64[ra] & ~window, where=warp.where)
    return lambda warp: np.copyto(warp.u64[rd], warp.u64[ra] | window, where=warp.where)


@opcode(
    "isspacep.<space>",
    section="9.7.9.19",
    counter="move",
    space="shared shared::cta shared::cluster local param const global",
)
def isspacep(b: Binder) -> Step:
    """Whether a generic address is in a state space."""
    d, a = b.expect(2)
    rd, ra = b.destination(d, "pred"), b.source(a, "u64")
    window = _WINDOW[b.words["space"]] >> 56
    if b.words["space"] == "const":
        # Constants are in the window of global memory here; on a GPU they have their own.
        def step(warp: Warp) -> None:
            at = warp.u64[ra]
            found = np.zeros(at.shape, np.bool_)
            for base, size in warp.cta.machine.constants():
                found |= (at >= np.uint64(base)) & (at < np.uint64(base + size))
            np.copyto(warp.pred[rd], found, where=warp.where)

        return step
    return lambda warp: np.copyto(warp.pred[rd], warp.u64[ra] >> np.uint64(56) == window, where=warp.where)

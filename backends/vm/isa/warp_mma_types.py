"""The mma.sync types that warp_mma lacks: f64, u4, s4, b1, FP6 and FP4, block-scaled, and m8n8k4 of f16 (PTX ISA
9.7.14.5). Also wmma with its opaque fragments (9.7.14.4)."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import cast

import numpy as np
import numpy.typing as npt

from backends.vm.bind.binder import Binder
from backends.vm.bind.forms import Step, opcode
from backends.vm.faults import Fault
from backends.vm.isa.warp_mma import summed, whole_warp
from backends.vm.machine import access
from backends.vm.machine.warp import Warp
from backends.vm.numerics import f64
from backends.vm.numerics.formats import E2M1, Rounding, decode
from backends.vm.ptx.ast import Operand
from backends.vm.tensor.operand_types import scale_factors, to_float32
from backends.vm.tensor.warp_fragments import (
    LANES,
    Raw,
    WarpFragment,
    accumulator_fragment,
    operand_fragment,
    quarter_fragment,
    wmma_fragment,
)

_SECTION = "9.7.14.5.14"
_INTEGER_BITS = {"u4": 4, "s4": 4, "u8": 8, "s8": 8, "b1": 1}
_S32_MIN, _S32_MAX = -(2**31), 2**31 - 1
_NARROW = "e4m3 e5m2 e3m2 e2m3 e2m1"

Float64 = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Product = Callable[[Warp, Raw, Raw, Raw], Raw]
"""Raw D from raw A [m, k], B [k, n] and C [m, n]."""


def _shape(b: Binder) -> tuple[int, int, int]:
    m, n, k = (int(one) for one in re.findall(r"\d+", b.words["shape"]))
    return m, n, k


class HeldFragment:
    """A vector operand that holds a fragment."""

    def __init__(self, b: Binder, operand: Operand, fragment: WarpFragment, *, written: bool = False) -> None:
        row_of = b.destination if written else b.source
        self._fragment = fragment
        self._rows = [row_of(item, fragment.view) for item in b.braced(operand, fragment.registers)]

    def registers(self, warp: Warp) -> Raw:
        """The registers, [registers, 32]."""
        rows = getattr(warp, self._fragment.view)
        return np.stack([rows[row] for row in self._rows])

    def matrix(self, warp: Warp) -> Raw:
        """The matrix of raw elements."""
        return self._fragment.matrix(self.registers(warp))

    def put(self, warp: Warp, registers: Raw) -> None:
        """Write [registers, 32]."""
        rows = getattr(warp, self._fragment.view)
        for row, words in zip(self._rows, registers, strict=True):
            rows[row][...] = words

    def put_matrix(self, warp: Warp, matrix: Raw) -> None:
        """Write raw elements."""
        self.put(warp, self._fragment.packed(matrix))


def _whole(
    b: Binder, fragments: tuple[WarpFragment, WarpFragment, WarpFragment, WarpFragment], product: Product, flops: int
) -> Step:
    """The product of whole fragments D, A, B, C. Later operands belong to the instruction family."""
    d, *sources = b.operands[:4]
    out = HeldFragment(b, d, fragments[0], written=True)
    left, right, addend = (HeldFragment(b, one, fragment) for one, fragment in zip(sources, fragments[1:], strict=True))
    what = b.instruction.opcode

    def step(warp: Warp) -> None:
        whole_warp(warp, what)
        out.put_matrix(warp, product(warp, left.matrix(warp), right.matrix(warp), addend.matrix(warp)))
        counters = warp.cta.machine.counters
        counters["mma_instructions"] += 1
        counters["mma_flops"] += flops

    return step


@opcode("mma.sync.aligned.<shape>.row.col{.<rnd>}.f64.f64.f64.f64", section=_SECTION, counter="mma",
        shape="m8n8k4 m16n8k4 m16n8k8 m16n8k16", rnd="rn rz rm rp")  # fmt: skip
def mma_double(b: Binder) -> Step:
    """f64: one fused multiply-add after another along K, each rounded, as on an H200."""
    b.expect(4)
    m, n, k = _shape(b)
    c = accumulator_fragment(m, 64)
    product = _double_product(cast(Rounding, b.words["rnd"] or "rn"))
    return _whole(b, (c, operand_fragment("a", m, k, 64), operand_fragment("b", n, k, 64), c), product, 2 * m * n * k)


def _double_product(rounding: Rounding) -> Product:
    def product(warp: Warp, a: Raw, right: Raw, c: Raw) -> Raw:
        left, others, total = (one.view(np.float64) for one in (a, right, c))
        for k in range(left.shape[1]):
            column, row = np.broadcast_arrays(left[:, k : k + 1], others[k : k + 1])
            total = f64.fma(column.ravel(), row.ravel(), total.ravel(), rounding=rounding).reshape(c.shape)
        return total.view(np.uint64)

    return product


@opcode("mma.sync.aligned.m8n8k16.row.col{.satfinite}.s32.<a>.<b>.s32", section=_SECTION, counter="mma",
        a="u8 s8", b="u8 s8")  # fmt: skip
@opcode("mma.sync.aligned.<shape>.row.col{.satfinite}.s32.<a>.<b>.s32", section=_SECTION, counter="mma",
        shape="m8n8k32 m16n8k32 m16n8k64", a="u4 s4", b="u4 s4")  # fmt: skip
def mma_integer(b: Binder) -> Step:
    """Integers of 4 or 8 bits into s32, exact. The result wraps, or is clamped with `.satfinite`."""
    b.expect(4)
    m, n, k = _shape(b) if "shape" in b.words else (8, 8, 16)
    bits = _INTEGER_BITS[b.words["a"]]
    c = accumulator_fragment(m, 32)
    product = integer_product(b.words["a"], b.words["b"], saturates=bool(b.words["satfinite"]))
    return _whole(
        b, (c, operand_fragment("a", m, k, bits), operand_fragment("b", n, k, bits), c), product, 2 * m * n * k
    )


def _integers(raw: Raw, type_name: str) -> Integers:
    bits, values = _INTEGER_BITS[type_name], raw.astype(np.int64)
    return (values ^ (1 << (bits - 1))) - (1 << (bits - 1)) if type_name[0] == "s" else values


def integer_product(left: str, right: str, *, saturates: bool) -> Product:
    """The exact product of integers of these types. The sum wraps, or is clamped."""

    def product(warp: Warp, a: Raw, others: Raw, c: Raw) -> Raw:
        total = _integers(a, left) @ _integers(others, right) + c.astype(np.uint32).view(np.int32)
        return (np.clip(total, _S32_MIN, _S32_MAX) if saturates else total).astype(np.uint32)

    return product


@opcode("mma.sync.aligned.<shape>.row.col.s32.b1.b1.s32.<op>.popc", section=_SECTION, counter="mma",
        shape="m8n8k128 m16n8k128 m16n8k256", op="xor and")  # fmt: skip
def mma_bits(b: Binder) -> Step:
    """Add to C the number of positions along K where both bits are one, or differ."""
    b.expect(4)
    m, n, k = _shape(b)
    differs = b.words["op"] == "xor"
    c = accumulator_fragment(m, 32)

    def product(warp: Warp, a: Raw, right: Raw, addend: Raw) -> Raw:
        left, others = a.astype(np.int64), right.astype(np.int64)
        both = left @ others
        counted = left.sum(axis=1)[:, None] + others.sum(axis=0)[None, :] - 2 * both if differs else both
        return (counted + addend.astype(np.int64)).astype(np.uint32)

    return _whole(b, (c, operand_fragment("a", m, k, 1), operand_fragment("b", n, k, 1), c), product, 2 * m * n * k)


# FP8, FP6 and FP4 of sm_120a. Elements of mxf4 kinds are packed. Others take a byte: FP6 the low six bits, FP4 bits
# 5 to 2 (PTX ISA 9.7.14.2).


@opcode("mma.sync.aligned.m16n8k32.row.col.kind::f8f6f4.<d>.<a>.<b>.<c>", section=_SECTION, counter="mma",
        d="f16 f32", a=_NARROW, b=_NARROW, c="f16 f32")  # fmt: skip
def mma_narrow(b: Binder) -> Step:
    """FP8, FP6 and FP4 elements, each in a byte."""
    b.expect(4)
    a_type, b_type, c_type = b.words["a"], b.words["b"], b.words["c"]
    if b.words["d"] != c_type:
        raise b.error(f"D is {b.words['d']} and C {c_type}: they must be of one type")
    c = accumulator_fragment(16, 16 if c_type == "f16" else 32)

    def product(warp: Warp, a: Raw, right: Raw, addend: Raw) -> Raw:
        return summed(warp, to_float32(a, a_type), to_float32(right, b_type), addend, c_type, a_type)

    fragments = (c, operand_fragment("a", 16, 32, 8), operand_fragment("b", 8, 32, 8), c)
    return _whole(b, fragments, product, 2 * 16 * 8 * 32)


@opcode("mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale{.scale_vec::1X}.f32.<a>.<b>.f32.ue8m0",
        section=_SECTION, counter="mma", a=_NARROW, b=_NARROW)  # fmt: skip
@opcode("mma.sync.aligned.m16n8k64.row.col.kind::mxf4.block_scale{.scale_vec::2X}.f32.e2m1.e2m1.f32.ue8m0",
        "mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.<size>.f32.e2m1.e2m1.f32.<scale>",
        section=_SECTION, counter="mma", size="scale_vec::2X scale_vec::4X", scale="ue8m0 ue4m3")  # fmt: skip
def mma_scaled(b: Binder) -> Step:
    """`d, a, b, c, sfa, {byte, thread}, sfb, {byte, thread}`: scales blocks along K of A and B (9.7.14.3).

    Computes in float64 and rounds once, because the order of the hardware is not documented.
    """
    parts = b.instruction.parts
    packed = "m16n8k64" in parts
    k, blocks = (64, 4 if "scale_vec::4X" in parts else 2) if packed else (32, 1)
    a_type, b_type = b.words.get("a", "e2m1"), b.words.get("b", "e2m1")
    if parts[-1] == "ue4m3" and blocks != 4:
        raise b.error("scale factors of type ue4m3 need .scale_vec::4X")
    operands = b.expect(8)
    scales = [_Scales(b, operands[at], operands[at + 1], blocks, parts[-1], pair=at == 4) for at in (4, 6)]
    c = accumulator_fragment(16, 32)

    def product(warp: Warp, a: Raw, right: Raw, addend: Raw) -> Raw:
        left, others = (
            (decode(one, E2M1) if packed else to_float32(one, kind).astype(np.float64))
            for one, kind in ((a, a_type), (right, b_type))
        )
        sfa, sfb = (np.repeat(one.factors(warp), k // blocks, axis=1) for one in scales)
        total = (left * sfa) @ (others * sfb.T) + addend.astype(np.uint32).view(np.float32)
        found = total.astype(np.float32)
        return np.where(np.isnan(found), np.uint32(0x7FFF_FFFF), found.view(np.uint32))

    bits = 4 if packed else 8
    fragments = (c, operand_fragment("a", 16, k, bits), operand_fragment("b", 8, k, bits), c)
    return _whole(b, fragments, product, 2 * 16 * 8 * k)


class _Scales:
    """The scale factors of A or B. For A (`pair`), a pair of lanes of each quad holds rows l / 4 and l / 4 + 8."""

    def __init__(self, b: Binder, data: Operand, selector: Operand, blocks: int, kind: str, *, pair: bool) -> None:
        self._row = b.source(data, "u32")
        byte, thread = b.braced(selector, 2)
        self._byte, self._thread = b.source(byte, "u16"), b.source(thread, "u16")
        self._blocks, self._kind, self._pair = blocks, kind, pair

    def factors(self, warp: Warp) -> Float64:
        """float64 [16 rows or 8 columns, blocks]."""
        byte, thread = int(warp.u16[self._byte][0]), int(warp.u16[self._thread][0])
        threads = 2 if self._pair else 4
        if byte not in range(0, 4, self._blocks) or thread >= threads:
            raise Fault("scale-selector", f"the selector of the scale factors of {'A' if self._pair else 'B'} is "
                        f"{{{byte}, {thread}}}; with {self._blocks} blocks the byte is one of "
                        f"{', '.join(map(str, range(0, 4, self._blocks)))} and the thread below {threads}")  # fmt: skip
        lanes = np.arange(8)[None, :] * 4 + (2 * thread + np.arange(2)[:, None] if self._pair else thread)
        words = warp.u32[self._row][lanes.ravel()].astype(np.uint32)
        shifts = (8 * (byte + np.arange(self._blocks))).astype(np.uint32)
        codes = words[:, None] >> shifts & np.uint32(0xFF)
        return scale_factors(codes, self._kind).astype(np.float64)


@opcode("mma.sync.aligned.m8n8k4.<alayout>.<blayout>.<d>.f16.f16.<c>", section=_SECTION, counter="mma",
        alayout="row col", blayout="row col", d="f16 f32", c="f16 f32")  # fmt: skip
def mma_quarters(b: Binder) -> Step:
    """Four products of 8x4 and 4x8, each among eight lanes (9.7.14.5.1)."""
    d_type, c_type = b.words["d"], b.words["c"]
    if c_type == "f32" and d_type != "f32":
        raise b.error("D must be f32 where C is")
    d, *sources = b.expect(4)
    counts = (4 if d_type == "f16" else 8, 2, 2, 4 if c_type == "f16" else 8)
    rows = [[b.source(item, "u32") for item in b.braced(one, count)]
            for one, count in zip(sources, counts[1:], strict=True)]  # fmt: skip
    out = [b.destination(item, "u32") for item in b.braced(d, counts[0])]
    by_rows = (b.words["alayout"] == "row", b.words["blayout"] == "row")
    what = b.instruction.opcode

    def step(warp: Warp) -> None:
        whole_warp(warp, what)
        held = [np.stack([warp.u32[row] for row in one]) for one in rows]
        results = np.zeros((counts[0], LANES), np.uint32)
        for quarter in range(4):
            a, lanes = quarter_fragment("a", quarter, by_rows=by_rows[0])
            right, _ = quarter_fragment("b", quarter, by_rows=by_rows[1])
            c, _ = quarter_fragment("c", quarter, by_rows=True, bits=16 if c_type == "f16" else 32)
            to, _ = quarter_fragment("c", quarter, by_rows=True, bits=16 if d_type == "f16" else 32)
            left, others = (
                to_float32(fragment.matrix(one[:, lanes]), "f16") for fragment, one in ((a, held[0]), (right, held[1]))
            )
            raw = summed(warp, left, others, c.matrix(held[2][:, lanes]), c_type, "f16", d_type=d_type)
            results[:, lanes] = to.packed(raw)
        for row, words in zip(out, results, strict=True):
            warp.u32[row][...] = words
        counters = warp.cta.machine.counters
        counters["mma_instructions"] += 1
        counters["mma_flops"] += 4 * 2 * 8 * 8 * 4

    return step


# wmma: matrices of a whole warp in opaque fragments.


_WMMA_BITS = {"f16": 16, "bf16": 16, "tf32": 32, "f32": 32, "s32": 32, "f64": 64, "u8": 8, "s8": 8}
_WMMA_SHAPES = "m16n16k16 m32n8k16 m8n32k16"
_LAYOUTS = "row col"
_SPACES = "global shared shared::cta"


def _held_by(which: str, shape: tuple[int, int, int], kind: str) -> WarpFragment:
    """The fragment of a wmma operand, with the register counts of PTX ISA 9.7.14.4.1."""
    m, n, k = shape
    size = {"a": (m, k), "b": (k, n)}.get(which, (m, n))
    bits = _WMMA_BITS[kind]
    if which in "ab" and kind == "f16":
        return wmma_fragment(size, 8, 16)
    return wmma_fragment(size, max(1, size[0] * size[1] * min(bits, 32) // (LANES * 32)), bits)


def _wmma_place(b: Binder, which: str, kind: str) -> tuple[WarpFragment, Callable[[Warp, int | None], Integers]]:
    """The fragment, and the byte offset of each of its elements in each lane."""
    fragment = _held_by(which, _shape(b), kind)
    size, by_rows = _WMMA_BITS[kind] // 8, b.words["layout"] == "row"
    least = fragment.shape[1] if by_rows else fragment.shape[0]

    def offsets(warp: Warp, row: int | None) -> Integers:
        stride = warp.u32[row].astype(np.int64)[None, :, None] if row is not None else np.int64(least)
        rows, columns = fragment.rows, fragment.columns
        return size * (rows * stride + columns if by_rows else columns * stride + rows)

    return fragment, offsets


@opcode("wmma.load.<which>.sync.aligned.<layout>.<shape>{.<space>}.<type>", section="9.7.14.4.3", counter="memory",
        which="a b", layout=_LAYOUTS, shape=_WMMA_SHAPES, space=_SPACES, type="f16 bf16 u8 s8")  # fmt: skip
@opcode("wmma.load.<which>.sync.aligned.<layout>.<shape>{.<space>}.<type>", section="9.7.14.4.3", counter="memory",
        which="a b", layout=_LAYOUTS, shape="m16n16k8", space=_SPACES, type="tf32")  # fmt: skip
@opcode("wmma.load.<which>.sync.aligned.<layout>.<shape>{.<space>}.<type>", section="9.7.14.4.3", counter="memory",
        which="a b c", layout=_LAYOUTS, shape="m8n8k4", space=_SPACES, type="f64")  # fmt: skip
@opcode("wmma.load.<which>.sync.aligned.<layout>.<shape>{.<space>}.<type>", section="9.7.14.4.3", counter="memory",
        which="c", layout=_LAYOUTS, shape=_WMMA_SHAPES, space=_SPACES, type="f16 f32 s32")  # fmt: skip
@opcode("wmma.load.<which>.sync.aligned.<layout>.<shape>{.<space>}.<type>", section="9.7.14.4.3", counter="memory",
        which="c", layout=_LAYOUTS, shape="m16n16k8", space=_SPACES, type="f32")  # fmt: skip
def wmma_load(b: Binder) -> Step:
    """Load a matrix from memory. `stride` is in elements, from one row or column to the next."""
    d, address, *rest = b.expect(2, 3)
    fragment, offsets = _wmma_place(b, b.words["which"], b.words["type"])
    out = HeldFragment(b, d, fragment, written=True)
    base, stride = b.address(address), b.source(rest[0], "u32") if rest else None
    space, what, size = b.words["space"], b.instruction.opcode, fragment.bits // 8

    def step(warp: Warp) -> None:
        whole_warp(warp, what)
        places = base(warp)[None, :, None] + offsets(warp, stride)
        registers = np.zeros(places.shape[:2], np.uint64 if fragment.bits == 64 else np.uint32)
        for register in range(places.shape[0]):
            for element in range(places.shape[2]):
                found = access.load(warp, space, places[register, :, element], size)
                words = found.view(f"u{size}")[:, 0].astype(registers.dtype)
                registers[register] |= words << registers.dtype.type(fragment.bits * element)
        out.put(warp, registers)

    return step


@opcode("wmma.store.<which>.sync.aligned.<layout>.<shape>{.<space>}.<type>", section="9.7.14.4.4", counter="memory",
        which="d", layout=_LAYOUTS, shape=_WMMA_SHAPES, space=_SPACES, type="f16 f32 s32")  # fmt: skip
@opcode("wmma.store.<which>.sync.aligned.<layout>.<shape>{.<space>}.<type>", section="9.7.14.4.4", counter="memory",
        which="d", layout=_LAYOUTS, shape="m16n16k8", space=_SPACES, type="f32")  # fmt: skip
@opcode("wmma.store.<which>.sync.aligned.<layout>.<shape>{.<space>}.<type>", section="9.7.14.4.4", counter="memory",
        which="d", layout=_LAYOUTS, shape="m8n8k4", space=_SPACES, type="f64")  # fmt: skip
def wmma_store(b: Binder) -> Step:
    """Store a matrix to memory."""
    address, source, *rest = b.expect(2, 3)
    fragment, offsets = _wmma_place(b, "d", b.words["type"])
    held = HeldFragment(b, source, fragment)
    base, stride = b.address(address), b.source(rest[0], "u32") if rest else None
    space, what, size, line = b.words["space"], b.instruction.opcode, fragment.bits // 8, b.instruction.line

    def step(warp: Warp) -> None:
        whole_warp(warp, what)
        places = base(warp)[None, :, None] + offsets(warp, stride)
        registers = held.registers(warp)
        for register in range(places.shape[0]):
            for element in range(places.shape[2]):
                words = registers[register] >> registers.dtype.type(fragment.bits * element)
                values = np.ascontiguousarray(words.astype(f"u{size}")[:, None]).view(np.uint8)
                access.store(warp, space, places[register, :, element], values, line)

    return step


@opcode("wmma.mma.sync.aligned.<alayout>.<blayout>.<shape>.<d>.<c>", section="9.7.14.4.5", counter="mma",
        alayout=_LAYOUTS, blayout=_LAYOUTS, shape=_WMMA_SHAPES, d="f16 f32", c="f16 f32")  # fmt: skip
def wmma_half(b: Binder) -> Step:
    """f16 inputs. C and D may differ in type."""
    return _wmma(b, "f16", b.words["c"], b.words["d"])


@opcode("wmma.mma.sync.aligned.<alayout>.<blayout>.<shape>.f32.<a>.<b>.f32", section="9.7.14.4.5", counter="mma",
        alayout=_LAYOUTS, blayout=_LAYOUTS, shape=_WMMA_SHAPES, a="bf16", b="bf16")  # fmt: skip
@opcode("wmma.mma.sync.aligned.<alayout>.<blayout>.<shape>.f32.<a>.<b>.f32", section="9.7.14.4.5", counter="mma",
        alayout=_LAYOUTS, blayout=_LAYOUTS, shape="m16n16k8", a="tf32", b="tf32")  # fmt: skip
def wmma_wide(b: Binder) -> Step:
    """bf16 or tf32 inputs."""
    return _wmma(b, b.words["a"], "f32", "f32")


def _wmma(b: Binder, a_type: str, c_type: str, d_type: str) -> Step:
    b.expect(4)
    shape = _shape(b)

    def product(warp: Warp, a: Raw, right: Raw, c: Raw) -> Raw:
        return summed(
            warp,
            to_float32(a, a_type),
            to_float32(right, a_type),
            c,
            c_type,
            a_type,
            d_type=d_type,
            most=4 if a_type == "tf32" else 16,
        )

    fragments = (_held_by("d", shape, d_type), _held_by("a", shape, a_type), _held_by("b", shape, a_type),
                 _held_by("c", shape, c_type))  # fmt: skip
    return _whole(b, fragments, product, 2 * shape[0] * shape[1] * shape[2])


@opcode("wmma.mma.sync.aligned.<alayout>.<blayout>.<shape>.s32.<a>.<b>.s32{.satfinite}", section="9.7.14.4.5",
        counter="mma", alayout=_LAYOUTS, blayout=_LAYOUTS, shape=_WMMA_SHAPES, a="u8 s8", b="u8 s8")  # fmt: skip
def wmma_integer(b: Binder) -> Step:
    """8-bit integers into s32."""
    b.expect(4)
    shape, a, right = _shape(b), b.words["a"], b.words["b"]
    if a != right:
        raise b.error(f"A is {a} and B {right}: wmma takes one type for both")
    product = integer_product(a, right, saturates=bool(b.words["satfinite"]))
    fragments = (_held_by("d", shape, "s32"), _held_by("a", shape, a), _held_by("b", shape, right),
                 _held_by("c", shape, "s32"))  # fmt: skip
    return _whole(b, fragments, product, 2 * shape[0] * shape[1] * shape[2])


@opcode("wmma.mma.sync.aligned.<alayout>.<blayout>.<shape>{.<rnd>}.f64.f64.f64.f64", section="9.7.14.4.5",
        counter="mma", alayout=_LAYOUTS, blayout=_LAYOUTS, shape="m8n8k4", rnd="rn rz rm rp")  # fmt: skip
def wmma_double(b: Binder) -> Step:
    """f64 inputs."""
    b.expect(4)
    shape = _shape(b)
    product = _double_product(cast(Rounding, b.words["rnd"] or "rn"))
    fragments = (_held_by("d", shape, "f64"), _held_by("a", shape, "f64"), _held_by("b", shape, "f64"),
                 _held_by("c", shape, "f64"))  # fmt: skip
    return _whole(b, fragments, product, 2 * shape[0] * shape[1] * shape[2])

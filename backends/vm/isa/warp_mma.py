"""mma.sync: D = A B + C by one warp, m16n8kK (PTX ISA 9.7.14.5.14)."""

from __future__ import annotations

from typing import cast

import numpy as np
import numpy.typing as npt

from backends.vm.bind.binder import Binder
from backends.vm.bind.forms import Step, opcode
from backends.vm.isa.matrix_fragments_ops import whole_warp
from backends.vm.machine.warp import Warp
from backends.vm.numerics import accumulate
from backends.vm.numerics.f32 import Float32
from backends.vm.numerics.formats import F16, FORMATS, decode, encode
from backends.vm.tensor.fragments import Fragment, Words, mma_fragment, to_matrix, to_registers

_ELEMENT_BITS = {"f16": 16, "bf16": 16, "tf32": 32, "e4m3": 8, "e5m2": 8, "u8": 8, "s8": 8}
_TF32_MASK = np.uint32(0xFFFF_E000)
_S32_MIN, _S32_MAX = -(2**31), 2**31 - 1


def _inputs(element: str, k: int) -> tuple[Fragment, Fragment]:
    """Fragments of A [16, k] and B [k, 8]: the first registers of the widest form of the same element width."""
    bits = _ELEMENT_BITS[element]
    return _narrow(mma_fragment("a", bits), 1, k), _narrow(mma_fragment("b", bits), 0, k)


def _narrow(full: Fragment, axis: int, k: int) -> Fragment:
    kept = full.registers * k // full.shape[axis]
    shape = (full.shape[0], k) if axis else (k, full.shape[1])
    return Fragment(shape, full.element_bits, full.rows[:kept], full.columns[:kept])


def _accumulator(element: str) -> Fragment:
    """C and D [16, 8]: 4 registers of 32 bits, or 2 of two f16 each, neighbouring columns together."""
    wide = mma_fragment("c", 32)
    if element != "f16":
        return wide
    rows = np.stack([wide.rows[0::2, :, 0], wide.rows[1::2, :, 0]], axis=-1)
    columns = np.stack([wide.columns[0::2, :, 0], wide.columns[1::2, :, 0]], axis=-1)
    return Fragment(wide.shape, 16, rows, columns)


def _values(codes: npt.NDArray[np.unsignedinteger], element: str) -> Float32:
    if element == "f32":
        return codes.view(np.float32)
    if element == "tf32":
        return (codes & _TF32_MASK).view(np.float32)
    return decode(codes, FORMATS[element]).astype(np.float32)


@opcode("mma.sync.aligned.<shape>.row.col.<d>.<a>.<b>.<c>", section="9.7.14.5.14", counter="mma",
        shape="m16n8k8 m16n8k16", d="f32 f16", a="f16", b="f16", c="f32 f16")  # fmt: skip
@opcode("mma.sync.aligned.<shape>.row.col.f32.<a>.<b>.f32", section="9.7.14.5.14", counter="mma",
        shape="m16n8k8 m16n8k16", a="bf16", b="bf16")  # fmt: skip
@opcode("mma.sync.aligned.<shape>.row.col.f32.<a>.<b>.f32", section="9.7.14.5.14", counter="mma",
        shape="m16n8k4 m16n8k8", a="tf32", b="tf32")  # fmt: skip
@opcode("mma.sync.aligned.<shape>.row.col.<d>.<a>.<b>.<c>", section="9.7.14.5.14", counter="mma",
        shape="m16n8k16 m16n8k32", d="f32 f16", a="e4m3 e5m2", b="e4m3 e5m2", c="f32 f16")  # fmt: skip
def mma(b: Binder) -> Step:
    """Floating-point inputs. The order of accumulation is undocumented: the machine's policy decides it, in f32."""
    a_type, b_type = b.words["a"], b.words["b"]
    c_type = b.words.get("c", "f32")
    if b.words.get("d", "f32") != c_type:
        raise b.error(f"D is {b.words['d']} and C {c_type}: they must be of one type")
    k = int(b.words["shape"].partition("k")[2])
    (a_fragment, b_fragment), c_fragment = _inputs(a_type, k), _accumulator(c_type)
    rows, (rows_a, rows_b, rows_c) = _operands(b, a_fragment, b_fragment, c_fragment)
    what = b.instruction.opcode

    def step(warp: Warp) -> None:
        whole_warp(warp, what)
        left = _values(to_matrix(_gather(warp, rows_a), a_fragment), a_type)
        right = _values(to_matrix(_gather(warp, rows_b), b_fragment), b_type)
        addend = _values(to_matrix(_gather(warp, rows_c), c_fragment), c_type)
        policy = cast(accumulate.Policy, warp.cta.machine.accumulate)
        total = accumulate.mma(left, right.T, addend, k_per_instruction=k, kind=a_type, policy=policy)
        codes = encode(total.astype(np.float64), F16).astype(np.uint16) if c_type == "f16" else total.view(np.uint32)
        _scatter(warp, rows, to_registers(codes, c_fragment))
        _count(warp, k)

    return step


@opcode("mma.sync.aligned.<shape>.row.col{.satfinite}.s32.<a>.<b>.s32", section="9.7.14.5.14", counter="mma",
        shape="m16n8k16 m16n8k32", a="u8 s8", b="u8 s8")  # fmt: skip
def mma_integer(b: Binder) -> Step:
    """8-bit integers into s32, exact; the result wraps, or is clamped with `.satfinite`."""
    dtype_a, dtype_b = (np.dtype(np.int8 if b.words[name] == "s8" else np.uint8) for name in ("a", "b"))
    k, clamp = int(b.words["shape"].partition("k")[2]), bool(b.words["satfinite"])
    (a_fragment, b_fragment), c_fragment = _inputs("s8", k), _accumulator("s32")
    rows, (rows_a, rows_b, rows_c) = _operands(b, a_fragment, b_fragment, c_fragment)
    what = b.instruction.opcode

    def step(warp: Warp) -> None:
        whole_warp(warp, what)
        left = to_matrix(_gather(warp, rows_a), a_fragment).view(dtype_a).astype(np.int64)
        right = to_matrix(_gather(warp, rows_b), b_fragment).view(dtype_b).astype(np.int64)
        total = left @ right + to_matrix(_gather(warp, rows_c), c_fragment).view(np.int32)
        if clamp:
            total = np.clip(total, _S32_MIN, _S32_MAX)
        _scatter(warp, rows, to_registers(total.astype(np.uint32), c_fragment))
        _count(warp, k)

    return step


def _operands(b: Binder, *fragments: Fragment) -> tuple[list[int], list[list[int]]]:
    """Rows of D and of A, B and C, whose vectors have as many registers as their fragments."""
    d, *sources = b.expect(4)
    rows = [
        [b.source(item, "u32") for item in b.vector(operand, fragment.registers)]
        for operand, fragment in zip(sources, fragments, strict=True)
    ]
    return [b.destination(item, "u32") for item in b.vector(d, fragments[-1].registers)], rows


def _gather(warp: Warp, rows: list[int]) -> Words:
    return np.stack([warp.u32[row] for row in rows])


def _scatter(warp: Warp, rows: list[int], registers: Words) -> None:
    for row, words in zip(rows, registers, strict=True):
        warp.u32[row][...] = words


def _count(warp: Warp, k: int) -> None:
    counters = warp.cta.machine.counters
    counters["mma_instructions"] += 1
    counters["mma_flops"] += 2 * 16 * 8 * k

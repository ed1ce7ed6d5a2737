"""Matrix products of one warp: mma.sync m16n8kK (PTX ISA 9.7.14.5.14), and loads and stores of its fragments."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache

import numpy as np
from numpy.typing import NDArray

from backends.vm.bind.binder import Binder
from backends.vm.bind.forms import Step, opcode
from backends.vm.faults import Fault
from backends.vm.machine import access
from backends.vm.machine.code import LANES, SCRATCH_ROWS, RowIndex, index_of
from backends.vm.machine.quick_access import QuickAccess
from backends.vm.machine.undefined import BecameUndefined, spread, undefined_words
from backends.vm.machine.warp import Warp
from backends.vm.memory.access_code import NO
from backends.vm.memory.compiled_access import UNDEFINED
from backends.vm.numerics import accumulate
from backends.vm.numerics.f32 import Float32
from backends.vm.numerics.formats import F16, encode
from backends.vm.numpy_calls import count_nonzero
from backends.vm.tensor.fragments import (
    MATRIX_ROW_BYTES,
    Fragment,
    Words,
    load_matrices,
    mma_fragment,
    store_matrices,
    to_matrix,
    to_registers,
    transposed_matrix,
)
from backends.vm.tensor.operand_types import to_float32
from backends.vm.tensor.warp_fragments import Raw

_ELEMENT_BITS = {"f16": 16, "bf16": 16, "tf32": 32, "e4m3": 8, "e5m2": 8, "u8": 8, "s8": 8}
_S32_MIN, _S32_MAX = -(2**31), 2**31 - 1


@cache
def _inputs(element: str, k: int) -> tuple[Fragment, Fragment]:
    """Fragments of A [16, k] and B [k, 8]: the first registers of the widest form of the same element width."""
    bits = _ELEMENT_BITS[element]
    return _narrow(mma_fragment("a", bits), 1, k), _narrow(mma_fragment("b", bits), 0, k)


def _narrow(full: Fragment, axis: int, k: int) -> Fragment:
    kept = full.registers * k // full.shape[axis]
    shape = (full.shape[0], k) if axis else (k, full.shape[1])
    return Fragment(shape, full.element_bits, full.rows[:kept], full.columns[:kept])


@cache
def _accumulator(element: str) -> Fragment:
    """C and D [16, 8]: 4 registers of 32 bits, or 2 registers with two f16 of neighbouring columns each."""
    wide = mma_fragment("c", 32)
    if element != "f16":
        return wide
    rows = np.stack([wide.rows[0::2, :, 0], wide.rows[1::2, :, 0]], axis=-1)
    columns = np.stack([wide.columns[0::2, :, 0], wide.columns[1::2, :, 0]], axis=-1)
    return Fragment(wide.shape, 16, rows, columns)


def summed(
    warp: Warp,
    left: Float32,
    right: Float32,
    c: Raw,
    c_type: str,
    kind: str,
    stored: accumulate.Mask | None = None,
    d_type: str = "",
    most: int = 1024,
) -> Raw:
    """Raw D from float32 A [m, k] and B [k, n] and raw C, in `d_type` or else `c_type`. `stored`: of a sparse A."""
    addend = to_float32(c, c_type)
    policy, half = warp.cta.machine.accumulate, (d_type or c_type) == "f16"
    found = accumulate.warp_product(left, right.T, addend, kind, policy, to_half=half, stored=stored, most=most)
    return encode(found.astype(np.float64), F16) if half else found.view(np.uint32)


@opcode("mma.sync.aligned.<shape>.row.col.<d>.<a>.<b>.<c>", section="9.7.14.5.14", counter="mma",
        shape="m16n8k8 m16n8k16", d="f32 f16", a="f16", b="f16", c="f32 f16")  # fmt: skip
@opcode("mma.sync.aligned.<shape>.row.col.f32.<a>.<b>.f32", section="9.7.14.5.14", counter="mma",
        shape="m16n8k8 m16n8k16", a="bf16", b="bf16")  # fmt: skip
@opcode("mma.sync.aligned.<shape>.row.col.f32.<a>.<b>.f32", section="9.7.14.5.14", counter="mma",
        shape="m16n8k4 m16n8k8", a="tf32", b="tf32")  # fmt: skip
@opcode("mma.sync.aligned.<shape>.row.col.<d>.<a>.<b>.<c>", section="9.7.14.5.14", counter="mma",
        shape="m16n8k16 m16n8k32", d="f32 f16", a="e4m3 e5m2", b="e4m3 e5m2", c="f32 f16")  # fmt: skip
def mma(b: Binder) -> Step:
    """Floating-point inputs. The accumulation order is undocumented; the machine's policy decides it, in f32."""
    a_type, b_type = b.words["a"], b.words["b"]
    c_type = b.words.get("c", "f32")
    if b.words.get("d", "f32") != c_type:
        raise b.error(f"D is {b.words['d']} and C {c_type}: they must be of one type")
    k = int(b.words["shape"].partition("k")[2])
    (a_fragment, b_fragment), c_fragment = _inputs(a_type, k), _accumulator(c_type)
    rows, operands = _operands(b, a_fragment, b_fragment, c_fragment)
    index_d, index_a, index_b, index_c = map(index_of, (rows, *operands))
    what = b.instruction.opcode

    def step(warp: Warp) -> None:
        whole_warp(warp, what)
        left = to_float32(to_matrix(_gather(warp, index_a), a_fragment), a_type)
        right = to_float32(to_matrix(_gather(warp, index_b), b_fragment), b_type)
        codes = summed(warp, left, right, to_matrix(_gather(warp, index_c), c_fragment), c_type, a_type)
        _scatter(warp, index_d, to_registers(codes.astype(f"u{c_fragment.element_bits // 8}"), c_fragment))
        _count(warp, k)

    _carry_products(b, rows, operands, (a_fragment, b_fragment, c_fragment))
    return step


@opcode("mma.sync.aligned.<shape>.row.col{.satfinite}.s32.<a>.<b>.s32", section="9.7.14.5.14", counter="mma",
        shape="m16n8k16 m16n8k32", a="u8 s8", b="u8 s8")  # fmt: skip
def mma_integer(b: Binder) -> Step:
    """8-bit integers into s32, exact. The result wraps, or is clamped with `.satfinite`."""
    dtype_a, dtype_b = (np.dtype(np.int8 if b.words[name] == "s8" else np.uint8) for name in ("a", "b"))
    k, clamp = int(b.words["shape"].partition("k")[2]), bool(b.words["satfinite"])
    (a_fragment, b_fragment), c_fragment = _inputs("s8", k), _accumulator("s32")
    rows, operands = _operands(b, a_fragment, b_fragment, c_fragment)
    index_d, index_a, index_b, index_c = map(index_of, (rows, *operands))
    what = b.instruction.opcode

    def step(warp: Warp) -> None:
        whole_warp(warp, what)
        left = to_matrix(_gather(warp, index_a), a_fragment).view(dtype_a).astype(np.int64)
        right = to_matrix(_gather(warp, index_b), b_fragment).view(dtype_b).astype(np.int64)
        total = left @ right + to_matrix(_gather(warp, index_c), c_fragment).view(np.int32)
        if clamp:
            total = np.clip(total, _S32_MIN, _S32_MAX)
        _scatter(warp, index_d, to_registers(total.astype(np.uint32), c_fragment))
        _count(warp, k)

    _carry_products(b, rows, operands, (a_fragment, b_fragment, c_fragment))
    return step


def _carry_products(
    b: Binder, rows: list[int], operands: Sequence[list[int]], fragments: tuple[Fragment, Fragment, Fragment]
) -> None:
    """Carries undefined bits: an element of D depends on a row of A, a column of B and one element of C."""
    line = b.instruction.line
    each = [tuple((32, row) for row in operand) for operand in operands]
    keys = [key for operand in each for key in operand]

    def carry(warp: Warp, run: Step) -> object:
        undefined = warp.undefined
        origin = undefined.origin(keys, line)
        hidden = [
            None if undefined.keys().isdisjoint(operand) else b"".join(undefined.bits(key).tobytes() for key in operand)
            for operand in each
        ]
        outcome = run(warp)
        undefined.put_rows(rows, _lost_products(*hidden, fragments), warp.mask, origin)
        return outcome

    b.carry(carry, *keys)


@lru_cache(maxsize=256)
def _lost_products(
    a: bytes | None, right: bytes | None, c: bytes | None, fragments: tuple[Fragment, Fragment, Fragment]
) -> tuple[Words, ...]:
    """The undefined bits of each register of D, from those of all registers of each operand (None if it has none).

    Cached, because loops multiply the same rows of padding again and again.
    """
    of_a, of_b, of_c = (
        None if bits is None
        else to_matrix(np.frombuffer(bits, np.uint32).reshape(fragment.registers, -1), fragment) != 0
        for bits, fragment in zip((a, right, c), fragments, strict=True)
    )  # fmt: skip
    lost = np.zeros(fragments[2].shape, np.bool_) if of_c is None else of_c
    if of_a is not None:
        lost |= of_a.any(axis=1)[:, None]
    if of_b is not None:
        lost |= of_b.any(axis=0)[None, :]
    words = to_registers(spread(lost, fragments[2].element_bits), fragments[2])
    words.setflags(write=False)
    return tuple(words)


def _operands(b: Binder, *fragments: Fragment) -> tuple[list[int], list[list[int]]]:
    """Register rows of D, and of A, B and C. Vectors must have as many registers as their fragments."""
    d, *sources = b.expect(4)
    rows = [
        [b.source(item, "u32") for item in b.braced(operand, fragment.registers)]
        for operand, fragment in zip(sources, fragments, strict=True)
    ]
    return [b.destination(item, "u32") for item in b.braced(d, fragments[-1].registers)], rows


def _gather(warp: Warp, rows: RowIndex) -> Words:
    return warp.registers.words[rows]


def _scatter(warp: Warp, rows: RowIndex, registers: Words) -> None:
    warp.registers.words[rows] = registers


def _count(warp: Warp, k: int) -> None:
    counters = warp.cta.machine.counters
    counters["mma_instructions"] += 1
    counters["mma_flops"] += 2 * 16 * 8 * k


# Matrices between shared memory and registers: ldmatrix, stmatrix, movmatrix (PTX ISA 9.7.14.5.15 to 17).


_COUNT = {"x1": 1, "x2": 2, "x4": 4}
_ROWS = 8


def whole_warp(warp: Warp, what: str) -> None:
    """Fault unless all 32 lanes execute `what` together. An exited lane is undefined behaviour too."""
    warp.converged(what)
    if count_nonzero(warp.mask) < 32:
        lane = int(np.flatnonzero(~warp.mask)[0])
        raise Fault("diverged", f"{what} needs all 32 lanes of the warp, and lane {lane} has exited or never was",
                    lane=lane)  # fmt: skip


def in_shared(space: str, addresses: access.Addresses, what: str) -> tuple[str, access.Addresses]:
    """The space and the addresses that `access.resolve` gives. Fault unless `what` gets shared memory."""
    space, addresses = access.resolve(space, addresses)
    if not space.startswith("shared"):
        raise Fault("wrong-space", f"{what} takes addresses in shared memory, these are {space} ones",
                    address=int(addresses[0]))  # fmt: skip
    return space, addresses


@opcode(
    "ldmatrix.sync.aligned.m8n8.<count>{.trans}{.<space>}.b16",
    section="9.7.14.5.15",
    counter="memory",
    count="x1 x2 x4",
    space="shared shared::cta",
)
def ldmatrix(b: Binder) -> Step:
    """Load 8x8 matrices of 16-bit elements. The lower lanes give the addresses of the rows."""
    d, address = b.expect(2)
    count, space, transposed = _COUNT[b.words["count"]], b.words["space"], bool(b.words["trans"])
    rows = [b.destination(item, "u32") for item in b.braced(d, count)]
    index_d = index_of(rows)
    addresses_of, _, _ = addressed = b.addressed(address)
    what, line, halves = b.instruction.opcode, b.instruction.line, _halves_in_scratch(count, transposed)
    quick = QuickAccess(space, addressed, 4, [(32, 0)] * SCRATCH_ROWS, line, stores=False, rows=_ROWS * count)

    def step(warp: Warp) -> None:
        whole_warp(warp, what)
        answer = quick.perform(warp)
        if answer == NO:
            where, addresses = in_shared(space, addresses_of(warp)[: _ROWS * count], what)
            values, missing = access.take(warp, where, addresses, MATRIX_ROW_BYTES)
            words = load_matrices(values, transposed=transposed)
        else:
            missing = quick.missing(warp, addresses_of(warp)[: _ROWS * count]) if answer & UNDEFINED else None
            words = warp.registers.scratch.view(np.uint16).take(halves).view(np.uint32)[..., 0]
        _scatter(warp, index_d, words)
        if missing is not None:
            hidden = undefined_words(missing.bytes_, np.dtype(np.uint8))
            words = load_matrices(hidden, transposed=transposed)
            warp.undefined.put_rows(rows, words, warp.mask, missing.origin.read_at(line))
            raise BecameUndefined

    return step


@cache
def _halves_in_scratch(count: int, transposed: bool) -> NDArray[np.int64]:
    """For each half of the registers, the index of its 16-bit half in the warp's scratch: [count, 32, 2].

    A matrix row is a column of four words in the scratch.
    """
    row, half = np.indices((_ROWS * count, MATRIX_ROW_BYTES // 2), dtype=np.uint16)
    where = (half // 2 * LANES + row) * 2 + half % 2
    found = load_matrices(where.view(np.uint8), transposed=transposed)
    return found.view(np.uint16).reshape(count, LANES, 2).astype(np.int64)


@opcode(
    "stmatrix.sync.aligned.m8n8.<count>{.trans}{.<space>}.b16",
    section="9.7.14.5.16",
    counter="memory",
    count="x1 x2 x4",
    space="shared shared::cta",
)
def stmatrix(b: Binder) -> Step:
    """Store 8x8 matrices of 16-bit elements. The lower lanes give the addresses of the rows."""
    address, source = b.expect(2)
    count, space, transposed = _COUNT[b.words["count"]], b.words["space"], bool(b.words["trans"])
    rows = [b.source(item, "u32") for item in b.braced(source, count)]
    addresses_of, what, line = b.address(address), b.instruction.opcode, b.instruction.line

    def step(warp: Warp) -> None:
        whole_warp(warp, what)
        where, addresses = in_shared(space, addresses_of(warp)[: _ROWS * count], what)
        access.store(warp, where, addresses, store_matrices(_gather(warp, index), transposed=transposed), line)

    keys, index = [(32, row) for row in rows], index_of(rows)

    def carry(warp: Warp, run: Step) -> object:
        hidden = store_matrices(np.stack([warp.undefined.bits(key) for key in keys]), transposed=transposed) != 0
        origin = warp.undefined.origin(keys, line)
        outcome = run(warp)
        if origin is not None:
            where, addresses = in_shared(space, addresses_of(warp)[: _ROWS * count], what)
            lanes = np.arange(len(addresses))
            access.undefine(warp, where, addresses, hidden, origin.stored_at(line, warp.name), lanes=lanes)
        return outcome

    b.carry(carry, *keys)
    return step


@opcode("movmatrix.sync.aligned.m8n8.trans.b16", section="9.7.14.5.17", counter="move")
def movmatrix(b: Binder) -> Step:
    """Transpose an 8x8 matrix of 16-bit elements across the warp."""
    d, a = b.expect(2)
    rd, ra, what = b.destination(d, "u32"), b.source(a, "u32"), b.instruction.opcode

    def step(warp: Warp) -> None:
        whole_warp(warp, what)
        warp.u32[rd][...] = transposed_matrix(warp.u32[ra])

    return step

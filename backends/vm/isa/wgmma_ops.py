"""wgmma: D [64, n] = A [64, k] B [n, k]^T (+ D) by a warpgroup, asynchronously (PTX ISA 9.7.15, facts.md 4).

Operands in shared memory are checked at issue, against what the issuing warp has seen: all of B, and the 16 rows of A
that the warp multiplies (FlashAttention-3 orders its P only among the lanes of one warp). Shared memory and registers
are read when the schedule lets the operation end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from backends.vm.bind.binder import Binder
from backends.vm.bind.forms import Step, opcode
from backends.vm.faults import Fault
from backends.vm.isa.bulk_copy import granules_of
from backends.vm.isa.ring_ops import check_multiplied
from backends.vm.isa.tensor_operands import hidden_units
from backends.vm.machine.access import uniform
from backends.vm.machine.code import Key, RowIndex, Wait, index_of
from backends.vm.machine.engine import submit
from backends.vm.machine.undefined import BecameUndefined, UndefinedRegisters, spread
from backends.vm.machine.warp import Warp
from backends.vm.machine.warpgroup import Multiplication, Part, part_of, warpgroup_of
from backends.vm.memory.clocks import stamp
from backends.vm.memory.definedness import Lost
from backends.vm.numerics import accumulate
from backends.vm.numpy_calls import count_nonzero
from backends.vm.ptx.ast import Operand, Vector
from backends.vm.tensor.fragments import (
    Elements,
    Fragment,
    Words,
    to_matrix,
    to_registers,
    wgmma_accumulator,
    wgmma_operand_a,
)
from backends.vm.tensor.matrix_descriptor import (
    Major,
    decode_matrix_descriptor,
    gather_units,
    operand_elements,
    unit_addresses,
)
from backends.vm.tensor.operand_types import to_float32
from backends.vm.tensor.sparsity import Granularity, codes_in_registers, dense, selectors, stored_places

Float32 = npt.NDArray[np.float32]
Fetch = Callable[[], Float32]
Places = npt.NDArray[np.int64]

ROWS = 16
_BITS = {"f16": 16, "bf16": 16, "tf32": 32, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8}
_EVERY_8 = range(8, 257, 8)
_INTEGER_N = (8, 16, 24, *range(32, 257, 16))


def _shapes(k: int, ns: range | tuple[int, ...] = _EVERY_8) -> str:
    return " ".join(f"m64n{n}k{k}" for n in ns)


@dataclass(frozen=True, slots=True)
class _Form:
    """The static form of an instruction. `k` covers 32 bytes of a row. For a sparse A it covers 64, of which half are
    stored, and `selector` chooses the lanes with the metadata. `d_type` is f32, f16 or s32."""

    n: int
    k: int
    bits: int
    d_type: str
    a_type: str
    b_type: str
    negate_a: bool
    negate_b: bool
    major_a: Major
    major_b: Major
    saturate: bool
    selector: int | None

    @property
    def stored_k(self) -> int:
        """Stored elements per row of A."""
        return self.k if self.selector is None else self.k // 2

    @property
    def accumulator(self) -> Fragment:
        """The 16 rows of the accumulator in one warp."""
        return _accumulator(self.n, 16 if self.d_type == "f16" else 32)

    @property
    def operand_a(self) -> Fragment:
        """A in registers: its 16 rows in one warp."""
        return _operand_a(self.bits, self.stored_k)


@lru_cache(maxsize=128)
def _accumulator(n: int, element_bits: int) -> Fragment:
    return _first_warp(wgmma_accumulator(n, element_bits), n)


@lru_cache(maxsize=8)
def _operand_a(element_bits: int, k: int) -> Fragment:
    return _first_warp(wgmma_operand_a(element_bits), k)


@dataclass(frozen=True, slots=True)
class _Operand:
    """`fetch` reads the elements when the operation ends. `lost`: rows in shared memory that are undefined at issue."""

    fetch: Fetch
    lost: Lost | None = None


def _first_warp(fragment: Fragment, columns: int) -> Fragment:
    return Fragment((ROWS, columns), fragment.element_bits, fragment.rows[:, :32], fragment.columns[:, :32])


@opcode("wgmma.mma_async.sync{.aligned}.<shape>.<d>.<a>.<b>", section="9.7.15.5.2", counter="mma", shape=_shapes(16),
        d="f32 f16", a="f16", b="f16")  # fmt: skip
@opcode("wgmma.mma_async.sync{.aligned}.<shape>.<d>.<a>.<b>", section="9.7.15.5.2", counter="mma", shape=_shapes(16),
        d="f32", a="bf16", b="bf16")  # fmt: skip
@opcode("wgmma.mma_async.sync{.aligned}.<shape>.<d>.<a>.<b>", section="9.7.15.5.2", counter="mma", shape=_shapes(8),
        d="f32", a="tf32", b="tf32")  # fmt: skip
@opcode("wgmma.mma_async.sync{.aligned}.<shape>.<d>.<a>.<b>", section="9.7.15.5.2", counter="mma", shape=_shapes(32),
        d="f32 f16", a="e4m3 e5m2", b="e4m3 e5m2")  # fmt: skip
@opcode("wgmma.mma_async.sync{.aligned}.<shape>{.satfinite}.<d>.<a>.<b>", section="9.7.15.5.2", counter="mma",
        shape=_shapes(32, _INTEGER_N), d="s32", a="s8 u8", b="s8 u8")  # fmt: skip
@opcode("wgmma.mma_async.sp.sync{.aligned}.<shape>.<d>.<a>.<b>", section="9.7.15.6.3", counter="mma", shape=_shapes(32),
        d="f32 f16", a="f16", b="f16")  # fmt: skip
@opcode("wgmma.mma_async.sp.sync{.aligned}.<shape>.<d>.<a>.<b>", section="9.7.15.6.3", counter="mma", shape=_shapes(32),
        d="f32", a="bf16", b="bf16")  # fmt: skip
@opcode("wgmma.mma_async.sp.sync{.aligned}.<shape>.<d>.<a>.<b>", section="9.7.15.6.3", counter="mma", shape=_shapes(16),
        d="f32", a="tf32", b="tf32")  # fmt: skip
@opcode("wgmma.mma_async.sp.sync{.aligned}.<shape>.<d>.<a>.<b>", section="9.7.15.6.3", counter="mma", shape=_shapes(64),
        d="f32 f16", a="e4m3 e5m2", b="e4m3 e5m2")  # fmt: skip
@opcode("wgmma.mma_async.sp.sync{.aligned}.<shape>{.satfinite}.<d>.<a>.<b>", section="9.7.15.6.3", counter="mma",
        shape=_shapes(64, _INTEGER_N), d="s32", a="s8 u8", b="s8 u8")  # fmt: skip
def mma_async(b: Binder) -> Step:
    """`d, a-desc | {a}, b-desc {, metadata, selector}, scale-d {, scale-a, scale-b {, trans-a, trans-b}}`."""
    sparse = "sp" in b.instruction.parts
    d, a, right, *rest = b.expect(*(count + 2 * sparse for count in (4, 5, 6, 7, 8)))
    metadata = b.source(rest.pop(0), "u32") if sparse else None
    selector = b.immediate(rest.pop(0)) if sparse else None
    scale_d, *immediates = rest
    form = _form(b, isinstance(a, Vector), immediates, selector)
    fragment = form.accumulator
    rows_d = [b.destination(item, "u32") for item in b.vector(d, fragment.registers)]
    added = [b.source(item, "u32") for item in b.vector(d, fragment.registers)]
    rows_a = [b.source(item, "u32") for item in b.vector(a, 4)] if isinstance(a, Vector) else []
    descriptor_a = None if rows_a else b.source(a, "u64")
    descriptor_b = b.source(right, "u64")
    predicate, negated = b.predicate(scale_d)
    accumulators: frozenset[Key] = frozenset((32, row) for row in rows_d)
    inputs: frozenset[Key] = frozenset((32, row) for row in rows_a)
    line, text = b.instruction.line, b.instruction.text
    shape, index_a, index_d = f"m64n{form.n} of {form.d_type}", index_of(rows_a), index_of(rows_d)

    def step(warp: Warp) -> None:
        warp.meet("wgmma.mma_async")
        raw_b = _descriptor(warp, descriptor_b, "B")
        raws = (raw_b,) if descriptor_a is None else (_descriptor(warp, descriptor_a, "A"), raw_b)
        group = warpgroup_of(warp)
        part, serial = group.issue(warp, line, raws)
        part.used |= touched
        part.check_overlap(accumulators, inputs, shape)
        reads = stamp(group.agent, serial)
        warp.agents.works[line] = "the tensor core"
        left = _registers_a(warp, index_a, form) if rows_a else _smem_a(warp, raws[0], form, reads)
        right = _smem(warp, raw_b, form.n, form.bits, form.k, form.major_b, form.b_type, reads, "B")
        enabled = bool(warp.pred[predicate][int(warp.mask.argmax())]) != negated
        _count(warp, form)
        fetch, stored = (left.fetch, None) if metadata is None else _sparse(left.fetch, warp.u32[metadata].copy(), form)
        perform = _performer(
            warp, part, index_d, fragment, form, fetch, right.fetch, accumulate_d=enabled, stored=stored
        )
        operation = submit(warp, "a wgmma", line, text, perform, queue=part, signals=(group,))
        part.open.append(Multiplication(accumulators, inputs, shape, line, part.issued - 1, serial, operation))
        if left.lost or right.lost or not warp.undefined.keys().isdisjoint(touched):
            leave_undefined(warp, left.lost, right.lost, enabled=enabled)

    def leave_undefined(warp: Warp, left: Lost | None, right: Lost | None, *, enabled: bool) -> None:
        undefined, lost = warp.undefined, np.zeros(fragment.shape, np.bool_)
        origin = undefined.origin(read if enabled else read[: len(rows_a)], line)
        if origin is None and left is None and right is None:
            for key in accumulators:
                undefined.clear_lanes(key, warp.mask)
            return
        sums = read[len(rows_a) :]
        if enabled and left is None and undefined.keys().isdisjoint(inputs) and _lost(undefined, sums, right, form):
            raise BecameUndefined
        if enabled:
            lost |= to_matrix(np.array([undefined.bits((32, row)) for row in added]), fragment) != 0
        if rows_a:
            words = np.array([undefined.bits((32, row)) for row in rows_a])
            lost |= (to_matrix(words, form.operand_a) != 0).any(axis=1)[:, None]
        for one, rows in ((left, (slice(None), None)), (right, (None, slice(None)))):
            if one is not None:
                lost |= one.rows[rows]
                origin = origin or one.origin.read_at(line)
        for row, bits in zip(rows_d, _in_registers(lost.tobytes(), fragment), strict=True):
            own = undefined.origin(((32, row),), line) if enabled else None
            undefined.put((32, row), bits, warp.mask, own or origin)
        raise BecameUndefined

    touched = accumulators | inputs
    read: list[Key] = [(32, row) for row in (*rows_a, *added)]
    b.carry(lambda warp, run: run(warp), *read)
    return step


def _lost(undefined: UndefinedRegisters, accumulators: Sequence[Key], right: Lost | None, form: _Form) -> bool:
    """Whether `accumulators` are undefined in exactly the columns that B's undefined rows make undefined.

    A loop along K gets there after its first round, and then the bits are the same array objects.
    """
    if right is None:
        return False
    for key, bits in zip(accumulators, _lost_columns(right.rows.tobytes(), form), strict=True):
        found = undefined.get(key)
        if found is None:
            if count_nonzero(bits):
                return False
        elif not found.origin.read or (found.bits is not bits and count_nonzero(found.bits != bits)):
            return False
    return True


@lru_cache(maxsize=256)
def _lost_columns(rows: bytes, form: _Form) -> tuple[Words, ...]:
    """The undefined bits of each accumulator register where `rows` of B, bool [n], are undefined."""
    fragment = form.accumulator
    return _in_registers(np.broadcast_to(np.frombuffer(rows, np.bool_), fragment.shape).tobytes(), fragment)


@lru_cache(maxsize=256)
def _in_registers(lost: bytes, fragment: Fragment) -> tuple[Words, ...]:
    """The undefined bits of each register of a matrix whose elements are undefined where `lost`, bool [m, n]."""
    elements = np.frombuffer(lost, np.bool_).reshape(fragment.shape)
    words = to_registers(spread(elements, fragment.element_bits), fragment)
    words.setflags(write=False)
    return tuple(words)


def _descriptor(warp: Warp, row: int, which: str) -> int:
    found = warp.u64[row]
    return uniform(found if warp.where is True else found[warp.mask], f"the descriptor of {which}")


def _sparse(stored: Fetch, metadata: Words, form: _Form) -> tuple[Fetch, accumulate.Mask]:
    """A [16, k] of a warp, expanded from its stored elements and a metadata register read at issue, and the mask of
    stored elements."""
    assert form.selector is not None
    codes, granularity = codes_in_registers(metadata, form.k, form.bits, form.selector), Granularity.of(form.bits)
    places = stored_places(codes, granularity, ordered=False)
    return lambda: dense(stored(), codes, granularity, ordered=False), places


def _form(b: Binder, from_registers: bool, immediates: list[Operand], selector: int | None) -> _Form:
    n, _, k = b.words["shape"].removeprefix("m64n").partition("k")
    a_type, b_type, d_type = b.words["a"], b.words["b"], b.words["d"]
    values = [b.immediate(item) for item in immediates]
    wide = _BITS[a_type] == 16
    wanted = 0 if d_type == "s32" else 2 + (0 if not wide else 1 if from_registers else 2)
    if len(values) != wanted:
        raise b.error(f"{len(values)} immediates after scale-d where this form takes {wanted}")
    scales, transposes = values[:2], values[2:]
    if any(value not in (1, -1) for value in scales) or any(value not in (0, 1) for value in transposes):
        raise b.error(f"the immediates are {values}: imm-scale is 1 or -1, imm-trans 0 or 1")
    if from_registers:
        transposes = [0, *transposes]
    if selector is not None and not 0 <= selector < selectors(int(k), _BITS[a_type]):
        raise b.error(f"the sparsity selector is {selector}; it must be below {selectors(int(k), _BITS[a_type])} here")
    majors: list[Major] = ["mn" if value else "k" for value in transposes] or ["k", "k"]
    majors = majors if len(majors) == 2 else ["k", "k"]
    return _Form(int(n), int(k), _BITS[a_type], d_type, a_type, b_type, -1 in scales[:1], -1 in scales[1:], majors[0],
                 majors[1], bool(b.words.get("satfinite")), selector)  # fmt: skip


def _smem(
    warp: Warp, raw: int, rows: int, bits: int, k: int, major: Major, type_name: str, reads: int, which: str,
    part: slice | None = None,
) -> _Operand:  # fmt: skip
    """Check an operand in shared memory now. Its elements are float32 [rows, k], or only the rows of `part`."""
    units, granules = _places(raw, rows, bits, k, major, which, None if part is None else (part.start, part.stop))
    rows = rows if part is None else part.stop - part.start
    smem = warp.cta.smem
    whole = smem.async_read(granules, warp.clock, reads, f"operand {which} of wgmma")

    def fetch() -> Float32:
        return to_float32(operand_elements(gather_units(smem.data, units), rows, bits, major), type_name)

    if whole:
        return _Operand(fetch)
    hidden = operand_elements(hidden_units(smem, units), rows, bits, major)
    return _Operand(fetch, Lost(np.logical_or.reduce(hidden, axis=1), smem.first_origin(granules, 0)))


@lru_cache(maxsize=256)
def _places(
    raw: int, rows: int, bits: int, k: int, major: Major, which: str, part: tuple[int, int] | None
) -> tuple[Places, Places]:
    """The addresses of the units of an operand, and their granules. Cached, because loops reuse few descriptors."""
    descriptor = decode_matrix_descriptor(raw, "sm_90a")
    if major == "k" and 0 < descriptor.swizzle.span < k * bits // 8:
        raise Fault("matrix-descriptor", f"operand {which} has rows of {k * bits // 8} bytes, more than its swizzle "
                    f"{descriptor.swizzle.value} spans (PTX ISA 9.7.15.5.1)")  # fmt: skip
    units = unit_addresses(descriptor, rows, k, bits, major, "sm_90a")
    if part is not None:
        units = units[slice(*part)] if major == "k" else units[:, part[0] * bits // 128 : part[1] * bits // 128]
    granules = granules_of(units.ravel(), 16)
    units.setflags(write=False)
    granules.setflags(write=False)
    return units, granules


def _smem_a(warp: Warp, raw: int, form: _Form, reads: int) -> _Operand:
    first = ROWS * (warp.index % 4)
    part = slice(first, first + ROWS)
    return _smem(warp, raw, 64, form.bits, form.stored_k, form.major_a, form.a_type, reads, "A", part)


def _registers_a(warp: Warp, rows: RowIndex, form: _Form) -> _Operand:
    return _Operand(lambda: to_float32(to_matrix(warp.registers.words[rows], form.operand_a), form.a_type))


def _performer(
    warp: Warp,
    part: Part,
    rows: RowIndex,
    fragment: Fragment,
    form: _Form,
    a: Fetch,
    b: Fetch,
    *,
    accumulate_d: bool,
    stored: accumulate.Mask | None,
) -> Callable[[], None]:
    policy = warp.cta.machine.accumulate
    check_multiplied(policy, form.a_type, plain=not (form.negate_a or form.negate_b))

    def perform() -> None:
        left, right = (-a() if form.negate_a else a()), (-b() if form.negate_b else b())
        old = to_matrix(warp.registers.words[rows], fragment) if accumulate_d else None
        warp.registers.words[rows] = to_registers(_multiplied(left, right, old, form, policy, stored), fragment)
        part.ended += 1

    return perform


def _multiplied(
    a: Float32, b: Float32, old: Elements | None, form: _Form, policy: accumulate.Policy, stored: accumulate.Mask | None
) -> Elements:
    """Raw accumulators [16, n] from the operands and the previous raw accumulators. `stored`: of a sparse A."""
    if form.d_type == "s32":
        return accumulate.integer_mma(a, b, None if old is None else old.view(np.int32), saturate=form.saturate)
    half = form.d_type == "f16"
    c = None if old is None else old.view(np.float16).astype(np.float32) if half else old.view(np.float32)
    result = accumulate.mma(
        a,
        b,
        c,
        k_per_instruction=form.k,
        kind=form.a_type,
        b_kind=form.b_type,
        policy=policy,
        to_half=half,
        stored=stored,
    )
    if not half:
        return result.view(np.uint32)
    codes = result.astype(np.float16).view(np.uint16)
    return np.where(np.isnan(result), np.uint16(0x7FFF), codes)


def _count(warp: Warp, form: _Form) -> None:
    counters = warp.cta.machine.counters
    counters["mma_instructions"] += warp.index % 4 == 0
    counters["mma_flops"] += 2 * ROWS * form.n * form.k


@opcode("wgmma.fence.sync{.aligned}", section="9.7.15.7.1", counter="mma")
def fence(b: Binder) -> Step:
    """Allow wgmma to use registers that were used before."""
    b.expect(0)

    def step(warp: Warp) -> None:
        warp.meet("wgmma.fence")
        part_of(warp).fence()

    return step


@opcode("wgmma.commit_group.sync{.aligned}", section="9.7.15.7.2", counter="mma")
def commit_group(b: Binder) -> Step:
    """Close the warp's open group, even an empty one."""
    b.expect(0)

    def step(warp: Warp) -> None:
        warp.meet("wgmma.commit_group")
        part = part_of(warp)
        part.committed.append(part.open)
        part.open = []

    return step


@opcode("wgmma.wait_group.sync{.aligned}", section="9.7.15.7.3", kind="tail", counter="mma")
def wait_group(b: Binder) -> Step:
    """Wait until at most N of the warp's latest groups are pending. Ended groups free their registers and operands."""
    allowed = b.immediate(b.expect(1)[0])
    if not 0 <= allowed <= 7:
        raise b.error(f"the number of groups is {allowed}; it must be 0..7")

    def step(warp: Warp) -> object:
        warp.meet("wgmma.wait_group")
        group = warpgroup_of(warp)
        part = group.parts[warp.index % 4]
        last = max((item.number for item in part.covered(allowed)), default=-1)

        def reason() -> str:
            if late := group.behind(last):
                return f"warps {late} of its warpgroup to issue wgmma number {last}"
            return f"all but {allowed} of its wgmma groups"

        def finish() -> None:
            warp.clock.seen[group.agent] = max(int(warp.clock.seen[group.agent]), part.retire(allowed))

        return Wait(
            ready=lambda: group.ended(last),
            reason=reason,
            finish=finish,
            target=group,
        )

    return step

"""Loads, stores, atomics and reductions (PTX ISA 9.7.9.8 ff., 9.7.13.5, 9.7.13.6)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NoReturn

import numpy as np
import numpy.typing as npt

from backends.vm.bind.binder import Binder
from backends.vm.bind.forms import Step, opcode
from backends.vm.faults import Fault, counted
from backends.vm.machine import access
from backends.vm.machine.code import LANES, WIDTH_OF_VIEW, Key, place_of
from backends.vm.machine.quick_access import SPACES, QuickAccess
from backends.vm.machine.run_access import RunAccess, of_parameters
from backends.vm.machine.undefined import BecameUndefined, undefined_words
from backends.vm.machine.warp import Warp
from backends.vm.memory.access_code import NO
from backends.vm.memory.compiled_access import UNDEFINED
from backends.vm.memory.definedness import Missing, Origin
from backends.vm.memory.global_memory import check_alignment
from backends.vm.memory.strong_writes import STRONG, Strong
from backends.vm.numerics import f32, half
from backends.vm.numpy_calls import count_nonzero
from backends.vm.ptx.ast import Address, Operand, Sink, Symbol

_TYPES = "b8 u8 s8 b16 u16 s16 b32 u32 s32 f32 b64 u64 s64 f64 b128"
_SPACES = "global shared shared::cta shared::cluster local param const param::entry param::func"
_CACHE = "ca cg cs lu cv wb wt"
_EVICT = ("L1::evict_normal L1::evict_unchanged L1::evict_first L1::evict_last L1::no_allocate "
          "L2::evict_normal L2::evict_first L2::evict_last")  # fmt: skip
_HINTS = {
    "sem": "weak relaxed acquire release volatile",
    "scope": "cta cluster gpu sys",
    "space": _SPACES,
    "nc": "nc",
    "cache": _CACHE,
    "evict": _EVICT,
    "evict2": _EVICT,
    "hint": "L2::cache_hint",
    "prefetch": "L2::64B L2::128B L2::256B",
    "vec": "v2 v4 v8",
    "type": _TYPES,
}
_FORM = "{.mmio}{.<sem>}{.<scope>}{.<space>}{.<nc>}{.<cache>}{.<evict>}{.<evict2>}{.<hint>}{.<prefetch>}{.<vec>}.<type>"


def _element(type_name: str) -> np.dtype[np.generic]:
    bits = int(type_name[1:])
    if bits == 128:
        return np.dtype("u8")
    return np.dtype(f"{'i' if type_name[0] == 's' else 'u'}{bits // 8}")


def _space(b: Binder) -> str:
    return b.words["space"].replace("param::entry", "param").replace("param::func", "param")


def _items(b: Binder, operand: Operand) -> tuple[Operand, ...]:
    """The registers of a load or store: one, or as many as in `.v2`, `.v4` or `.v8`."""
    count = int(b.words["vec"][1:]) if b.words["vec"] else 1
    if count > 1 and b.words["type"] == "b128":
        raise b.error("a vector of .b128 has more bytes than an access may have")
    return b.vector(operand, count)


def _strong(b: Binder, kind: Literal["load", "store"]) -> Strong | None:
    return Strong(b.words.get("scope", ""), kind) if b.words.get("sem") in STRONG else None


def _view_for(b: Binder, operand: Operand, type_name: str) -> str:
    """The view of a register for an element of `type_name`: the register's own width, signed for signed types."""
    bits = max(int(type_name[1:]), b.width(operand) or 0, 16)
    if bits == 128 and type_name != "b128":
        raise b.error(f"a register of 128 bits where an element of .{type_name} goes")
    return {True: "s", False: "u"}[type_name[0] == "s"] + str(bits) if bits < 128 else "u64x2"


@opcode("ld" + _FORM, section="9.7.9.8", counter="memory", vocabulary=_HINTS)
@opcode("ldu{.<space>}{.<vec>}.<type>", section="9.7.9.10", counter="memory", space="global", vec="v2 v4", type=_TYPES)
def ld(b: Binder) -> Step:
    """Load one element or a vector. A register wider than the element is zero- or sign-extended."""
    d, a = b.hinted(2)
    space, kind = _space(b), b.words["type"]
    if space == "const":
        space = "global"
    items = _items(b, d)
    dtype = _element(kind)
    words = 2 if kind == "b128" else 1
    size = len(items) * dtype.itemsize * words
    views = [(column, _view_for(b, item, kind)) for column, item in enumerate(items) if not isinstance(item, Sink)]
    targets = [(column, view, b.destination(items[column], view, wider=True)) for column, view in views]
    address, base, _ = addressed = b.addressed(a)
    sem, scope = b.words.get("sem", ""), b.words.get("scope", "")
    strong = _strong(b, "load")
    used, line = b.rows.used, b.instruction.line
    rows_of = {column: (WIDTH_OF_VIEW[view], row) for column, view, row in targets}
    quick, constant = None, bool(b.words.get("nc"))
    # Undefined bytes need the addresses again after the load, so the load must not overwrite its base register.
    if space in SPACES and not strong and base not in rows_of.values():
        quick = QuickAccess(space, addressed, dtype.itemsize * words, [rows_of.get(i) for i in range(len(items))],
                            line, stores=False, signed=kind[0] == "s", constant=constant)  # fmt: skip

    def leave_undefined(warp: Warp, missing: Missing) -> NoReturn:
        """Mark registers undefined, but not those that nothing reads: compilers load whole vectors."""
        parts, origin = undefined_words(missing.bytes_, dtype), missing.origin.read_at(line)
        for column, view, row in targets:
            if (WIDTH_OF_VIEW[view], row) in used:
                warp.undefined.fill(view, row, parts if words == 2 else parts[:, column], warp.mask, origin)
        raise BecameUndefined

    def look_at(warp: Warp, answer: int) -> None:
        """After the access: mark registers undefined if `answer` says that it met undefined bytes."""
        if quick is not None and answer & UNDEFINED:
            addresses = address(warp)
            missing = quick.missing(warp, addresses if warp.where is True else addresses[warp.mask])
            assert missing is not None, "the machine code has seen undefined bytes"
            leave_undefined(warp, missing)

    def step(warp: Warp) -> None:
        answer = NO if quick is None else quick.perform(warp)
        if answer != NO:
            look_at(warp, answer)
            return
        addresses = address(warp)
        whole = warp.where is True
        if not whole:
            addresses = addresses[warp.mask]
        if strong:
            access.synchronise(warp, space, addresses, sem, scope, acquire=True)
        loaded, missing = access.take(warp, space, addresses, size, strong=strong, constant=constant)
        values = loaded.view(dtype)
        for column, view, row in targets:
            register = getattr(warp, view)[row]
            part = values if words == 2 else values[:, column]
            if whole:
                register[...] = part
            else:
                register[warp.mask] = part
        if missing is not None:
            leave_undefined(warp, missing)

    read: npt.NDArray[np.uint8] | None = None
    held: list[tuple[str, int, np.generic]] = []

    def parameter(warp: Warp) -> None:
        """Load a parameter once per launch: all lanes and all warps read the same bytes."""
        nonlocal read, held
        params = warp.cta.machine.params
        if read is not params:
            values = access.load_parameter(warp, address(warp)[:1], size).view(dtype)[0]
            held = [(view, row, values[column].astype(getattr(warp, view)[row].dtype)) for column, view, row in targets]
            read = params
        for view, row, value in held:
            if warp.where is True:
                getattr(warp, view)[row].fill(value)
            else:
                np.copyto(getattr(warp, view)[row], value, where=warp.where)

    if quick is not None:
        b.in_run = quick.in_run(look_at)
    if space != "param" or words == 2 or not (isinstance(a, Address) and isinstance(a.base, Symbol)):
        return step
    b.in_run = _of_parameter(base, dtype.itemsize, size, rows_of)
    return parameter


def _of_parameter(base: Key, element: int, size: int, registers: Mapping[int, Key]) -> RunAccess | None:
    """The compiled form of a load of `size` bytes from the parameter whose address is in `base`. `element` is in bytes;
    `registers` maps element numbers to registers of the same size. None if an element must be extended."""
    if element not in (4, 8) or not registers or any(width != 8 * element for width, _ in registers.values()):
        return None
    places = [word for column, key in registers.items() for word in (*place_of(key), column)]
    return RunAccess(of_parameters(element, len(registers)), lambda: (*place_of(base), size, *places), _nothing_left)


def _nothing_left(warp: Warp, answer: int) -> None:
    """Do nothing: a parameter load needs no further check."""


@opcode("st" + _FORM, section="9.7.9.11", counter="memory", vocabulary=_HINTS)
def st(b: Binder) -> Step:
    """Store one element or a vector. A wider register stores its low part."""
    a, source = b.hinted(2)
    space, kind = _space(b), b.words["type"]
    items = _items(b, source)
    dtype = _element(kind)
    rows = [(view := _view_for(b, item, kind), b.source(item, view, wider=True)) for item in items]
    address, *_ = addressed = b.addressed(a)
    line = b.instruction.line
    strong, sem, scope = _strong(b, "store"), b.words["sem"], b.words["scope"]
    keys = tuple((WIDTH_OF_VIEW[view], row) for view, row in rows)
    quick = None
    if space in SPACES and not strong:
        quick = QuickAccess(space, addressed, dtype.itemsize * (2 if kind == "b128" else 1), keys, line, stores=True)

    def step(warp: Warp) -> None:
        if quick is not None and quick.perform(warp) != NO:
            return
        values = np.empty((LANES, len(rows) * (2 if kind == "b128" else 1)), dtype)
        for column, (view, row) in enumerate(rows):
            register = getattr(warp, view)[row]
            if kind == "b128":
                values[:] = register
            else:
                values[:, column] = register
        addresses = address(warp)
        if warp.where is not True:
            addresses, values = addresses[warp.mask], values[warp.mask]
        access.store(warp, space, addresses, values.view(np.uint8), line, strong=strong)
        if strong:
            access.synchronise(warp, space, addresses, sem, scope, release=True, overwrites=True)

    def carry(warp: Warp, run: Step) -> object:
        hidden = np.zeros((LANES, len(rows) * (2 if kind == "b128" else 1)), dtype)
        for column, (view, row) in enumerate(rows):
            if kind == "b128":
                hidden[:] = warp.undefined.shown(view, row)
            else:
                hidden[:, column] = warp.undefined.shown(view, row)
        missing = hidden[warp.mask].view(np.uint8) != 0
        origin = warp.undefined.origin(keys, line)
        outcome = run(warp)
        if origin is not None and count_nonzero(missing):
            access.undefine(warp, space, address(warp)[warp.mask], missing, origin.stored_at(line, warp.name))
        return outcome

    b.carry(carry, *keys)
    if quick is not None:
        b.in_run = quick.in_run()
    return step


MAX_BULK_STORE = 16_777_216


@opcode("st.bulk{.weak}{.<space>}", section="9.7.9.13", counter="memory", space="shared::cta")
def st_bulk(b: Binder) -> Step:
    """Store zeros to `size` bytes of shared memory, a multiple of 8."""
    a, size, value = b.expect(3)
    if b.immediate(value) != 0:
        raise b.error(f"the initial value is {b.immediate(value)}; it must be 0")
    view = "u32" if b.width(size) == 32 else "u64"
    address, row, space, line = b.address(a), b.source(size, view), b.words["space"], b.instruction.line

    def step(warp: Warp) -> None:
        for lane in access.active(warp).tolist():
            count = int(getattr(warp, view)[row][lane])
            if count % 8 or count > MAX_BULK_STORE:
                raise Fault("bulk-store", f"{counted(count, 'byte')} where st.bulk takes a multiple of 8 up to "
                            f"{MAX_BULK_STORE}", lane=lane)  # fmt: skip
            places = int(address(warp)[lane]) + np.arange(0, count, 8, dtype=np.int64)
            if places.size:
                where, places = access.resolve(space, places)
                if not where.startswith("shared"):
                    raise Fault(
                        "wrong-space", f"st.bulk takes addresses in shared memory, this is a {where} one", lane=lane
                    )
                owners = np.full(places.size, lane, np.int64)
                access.store(warp, where, places, np.zeros((places.size, 8), np.uint8), line, lanes=owners)

    return step


def _wrap_inc(old: int, limit: int) -> int:
    return 0 if old >= limit else old + 1


def _wrap_dec(old: int, limit: int) -> int:
    return limit if old == 0 or old > limit else old - 1


_UPDATES: dict[str, Callable[..., int | float]] = {
    "add": lambda old, x, _: old + x,
    "min": lambda old, x, _: min(old, x),
    "max": lambda old, x, _: max(old, x),
    "and": lambda old, x, _: old & x,
    "or": lambda old, x, _: old | x,
    "xor": lambda old, x, _: old ^ x,
    "exch": lambda old, x, _: x,
    "cas": lambda old, x, y: y if old == x else old,
    "inc": lambda old, x, _: _wrap_inc(old, x),
    "dec": lambda old, x, _: _wrap_dec(old, x),
}
_ATOMIC_FORM = "{.<sem>}{.<scope>}{.<space>}.<op>{.noftz}{.<hint>}.<type>"
_ATOMIC = {
    "sem": "relaxed acquire release acq_rel",
    "scope": "cta cluster gpu sys",
    "space": "global shared shared::cta shared::cluster",
    "op": " ".join(_UPDATES),
    "hint": "L2::cache_hint",
    "type": "b32 u32 s32 f32 b64 u64 s64 f64",
}


def _numpy_type(kind: str) -> np.dtype[np.generic]:
    return np.dtype({"b": "u", "u": "u", "s": "i", "f": "f"}[kind[0]] + str(int(kind[1:]) // 8))


def _half_update(kind: str, op: str) -> Callable[..., int]:
    """Combine one or two halves held in an integer. Rounds to nearest even and keeps subnormals (`.noftz`)."""
    fmt, bits = half.FORMATS[kind.removesuffix("x2")], 32 if kind.endswith("x2") else 16
    combine = half.REDUCTIONS[op]

    def update(old: int, x: int, _: object) -> int:
        raw = np.array([old, x], f"<u{bits // 8}").view("<u2").reshape(2, -1)
        return int.from_bytes(combine(raw[0], raw[1], fmt).tobytes(), "little")

    return update


def _single_sum(*, flush: bool) -> Callable[..., int]:
    """Add f32 bits held in integers, because Python floats lose signalling NaNs. A NaN sum is canonical.
    Global memory flushes subnormal operands and results, shared memory does not (9.7.13.5)."""

    def update(old: int, x: int, _: object) -> int:
        a, b = np.array([[old], [x]], np.uint32).view(np.float32)
        return int(f32.add(a, b, ftz=flush).view(np.uint32)[0])

    return update


@dataclass(frozen=True, slots=True)
class _Element:
    """Converts elements of memory to Python numbers and back. An element of 128 bits is one integer."""

    kind: str
    dtype: np.dtype[np.generic]

    @classmethod
    def of(cls, kind: str) -> _Element:
        return cls(kind, np.dtype("u8") if kind == "b128" else _numpy_type(kind))

    @property
    def size(self) -> int:
        return 16 if self.kind == "b128" else self.dtype.itemsize

    @property
    def view(self) -> str:
        return "u64x2" if self.kind == "b128" else "u" + self.kind[1:] if self.kind[0] == "b" else self.kind

    def numbers(self, words: npt.NDArray[np.generic]) -> list[int | float]:
        """Python numbers from [n] elements, or from [n, 2] words of 64 bits."""
        if self.kind != "b128":
            return words.tolist()
        return [low | high << 64 for low, high in words.tolist()]

    def words(self, numbers: Sequence[int | float]) -> npt.NDArray[np.generic]:
        """The inverse of `numbers`."""
        if self.kind != "b128":
            return np.array(numbers, self.dtype)
        return np.array([[int(one) & (2**64 - 1), int(one) >> 64] for one in numbers], np.uint64).reshape(-1, 2)

    def wrapped(self, value: int | float) -> int | float:
        """`value` wrapped or rounded to the element."""
        return int(value) & (2**128 - 1) if self.kind == "b128" else _wrapped(value, self.dtype)


def _atomic(b: Binder, d: Operand | None, a: Operand, sources: tuple[Operand, ...], offset: int = 0) -> Step:
    parts = b.instruction.parts
    kind, space = parts[-1], b.words["space"]
    if kind.removesuffix("x2") in half.FORMATS:
        update: Callable[..., int | float] = _half_update(kind, b.words.get("op") or "add")
        kind = "b32" if kind.endswith("x2") else "b16"
    else:
        update = _UPDATES[next(part for part in parts if part in _UPDATES)]
    sem, scope = b.words["sem"], b.words["scope"]
    compares, reach, failed = "cas" in parts, Strong(scope, "atomic"), Strong(scope, "comparison")
    single = kind == "f32" and "add" in parts
    kind = "b32" if single else kind
    element = _Element.of(kind)
    view = element.view
    target = None if d is None or isinstance(d, Sink) else b.destination(d, view)
    rows = [b.source(item, view) for item in sources]
    address, line = b.address(a), b.instruction.line
    # An exchange does not depend on what it overwrites, so undefined memory only makes its result undefined.
    read = access.take if "exch" in parts else _defined

    def step(warp: Warp) -> None:
        lanes = access.active(warp)
        places, first, which = _distinct(address(warp)[lanes] + offset)
        change = _single_sum(flush=access.resolve(space, places)[0] == "global") if single else update
        meetings = warp.meetings
        if d is not None:
            # A red acquires nothing, even before a fence (PTX ISA 8.11.1).
            access.synchronise(warp, space, places, sem, scope, acquire=True)
        loaded, missing = read(warp, space, places, element.size, strong=reach, lanes=lanes[first])
        found = loaded.view(element.dtype)
        held = element.numbers(found if element.kind == "b128" else found[:, 0])
        returned: list[int | float] = []
        written = np.full(len(held), not compares)
        by = lanes[first].copy()
        values = [element.numbers(getattr(warp, view)[row][lanes]) for row in rows]
        for position, place in enumerate(which):
            operands = [column[position] for column in values]
            returned.append(held[place])
            if compares and not written[place] and held[place] == operands[0]:
                written[place], by[place] = True, lanes[position]
            new: int | float = change(held[place], *operands, *[None] * (2 - len(operands)))
            held[place] = element.wrapped(new)
        stored = np.ascontiguousarray(element.words(held).reshape(len(held), -1)).view(np.uint8)
        if count_nonzero(written) < written.size:
            access.compare(warp, space, places[~written], element.size, failed, by[~written])
            places, stored, by = places[written], stored[written], by[written]
        if places.size:
            access.store(warp, space, places, stored, line, strong=reach, lanes=by)
            access.synchronise(warp, space, places, sem, scope, release=True, meetings=meetings)
        if target is not None:
            getattr(warp, view)[target][lanes] = element.words(returned)
            if missing is not None:
                hidden = np.zeros((lanes.size, element.size), np.bool_)
                hidden[first] = missing.bytes_
                bits = undefined_words(hidden, element.dtype)
                bits = bits if element.kind == "b128" else bits[:, 0]
                warp.undefined.fill(view, target, bits, warp.mask, missing.origin.read_at(line))
                raise BecameUndefined

    return step


def _distinct(
    addresses: npt.NDArray[np.int64],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.intp] | slice, Sequence[int]]:
    """The distinct addresses in order, for each the first lane that has it, and for each lane the number of its
    address."""
    if addresses.size == 1:
        return addresses, slice(None), (0,)
    if addresses.size and not count_nonzero(addresses != addresses[0]):
        return addresses[:1], np.zeros(1, np.intp), (0,) * addresses.size
    places, first, which = np.unique(addresses, return_index=True, return_inverse=True)
    return places, first, which.tolist()


def _defined(
    warp: Warp, space: str, addresses: npt.NDArray[np.int64], size: int, *, strong: Strong, lanes: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.uint8], None]:
    """As access.take, for memory where every byte matters: undefined bytes are reported."""
    return access.load(warp, space, addresses, size, strong=strong, lanes=lanes), None


def _wrapped(value: int | float, dtype: np.dtype[np.generic]) -> int | float:
    if dtype.kind == "f":
        return float(dtype.type(value))
    bits = 8 * dtype.itemsize
    whole = int(value) & ((1 << bits) - 1)
    return whole - (1 << bits) if dtype.kind == "i" and whole >> (bits - 1) else whole


@opcode("atom{.<sem>}{.<scope>}{.<space>}.<op>{.<hint>}.b128", section="9.7.13.5", counter="memory",
        vocabulary={**_ATOMIC, "op": "exch cas"})  # fmt: skip
@opcode("atom{.<sem>}{.<scope>}{.<space>}.cas.b16", section="9.7.13.5", counter="memory", vocabulary=_ATOMIC)
@opcode("atom" + _ATOMIC_FORM, section="9.7.13.5", counter="memory", vocabulary=_ATOMIC)
def atom(b: Binder) -> Step:
    """Read, modify and write one element per lane, in ascending lane order. Returns the old value."""
    operands = b.hinted(4 if "cas" in b.instruction.parts else 3)
    return _atomic(b, operands[0], operands[1], operands[2:])


_HALF_FORM = "{.<sem>}{.<scope>}{.<space>}.add.noftz{.<hint>}.<type>"
_HALF = {**_ATOMIC, "type": "f16 f16x2 bf16 bf16x2"}


@opcode("atom" + _HALF_FORM, section="9.7.13.5", counter="memory", vocabulary=_HALF)
def atom_half(b: Binder) -> Step:
    """Add one or two halves per lane, in ascending lane order. Returns the old ones."""
    d, a, source = b.hinted(3)
    return _atomic(b, d, a, (source,))


@opcode("red" + _HALF_FORM, section="9.7.13.6", counter="memory", vocabulary=_HALF)
def red_half(b: Binder) -> Step:
    """Like atom, with no result."""
    a, source = b.hinted(2)
    return _atomic(b, None, a, (source,))


@opcode("red" + _ATOMIC_FORM, section="9.7.13.6", counter="memory", vocabulary=_ATOMIC)
def red(b: Binder) -> Step:
    """Like atom, with no result."""
    a, source = b.hinted(2)
    return _atomic(b, None, a, (source,))


def atomic(b: Binder, d: Operand | None, a: Operand, source: Operand) -> Step:
    """A read-modify-write of one element or a vector.

    Elements of a vector are combined one by one: in the ISA each of them is atomic, not the whole vector.
    """
    if not b.words.get("vec"):
        return _atomic(b, d, a, (source,))
    count = int(b.words["vec"][1:])
    sources = b.vector(source, count)
    targets = [None] * count if d is None or isinstance(d, Sink) else b.vector(d, count)
    each = 2 if b.words["type"] in half.FORMATS else 4
    address, size = b.address(a), each * count
    steps = [_atomic(b, targets[i], a, (sources[i],), each * i) for i in range(count)]

    def step(warp: Warp) -> None:
        check_alignment(address(warp)[warp.mask], size, "vector atomic", warp.cta.machine.memory)
        for one in steps:
            one(warp)

    return step


_VECTOR_FORM = "{.<sem>}{.<scope>}{.<space>}.<op>{.<hint>}.<vec>.<type>"
_VECTOR = {**_ATOMIC, "space": "global", "op": "add", "vec": "v2 v4", "type": "f32"}


_HALF_VECTOR_FORM = "{.<sem>}{.<scope>}{.<space>}.<op>.noftz{.<hint>}.<vec>.<type>"
_HALF_VECTOR = {**_VECTOR, "op": "add min max", "vec": "v2 v4 v8", "type": "f16 f16x2 bf16 bf16x2"}


@opcode("atom" + _HALF_VECTOR_FORM, section="9.7.13.5", counter="memory", vocabulary=_HALF_VECTOR)
@opcode("atom" + _VECTOR_FORM, section="9.7.13.5", counter="memory", vocabulary=_VECTOR)
def atom_vector(b: Binder) -> Step:
    """Add each element of a vector to memory. Returns the old elements."""
    d, a, source = b.hinted(3)
    return atomic(b, d, a, source)


@opcode("red" + _HALF_VECTOR_FORM, section="9.7.13.6", counter="memory", vocabulary=_HALF_VECTOR)
@opcode("red" + _VECTOR_FORM, section="9.7.13.6", counter="memory", vocabulary=_VECTOR)
def red_vector(b: Binder) -> Step:
    """Like a vector atom, with no result."""
    a, source = b.hinted(2)
    return atomic(b, None, a, source)


DISCARDED = 128
"""Size and alignment of a discard in bytes (PTX ISA 9.7.9.17)."""


@opcode("discard{.global}.L2", section="9.7.9.17", counter="memory")
def discard(b: Binder) -> Step:
    """A weak write of undefined values."""
    a, size = b.expect(2)
    if b.immediate(size) != DISCARDED:
        raise b.error(f"a discard takes {DISCARDED} bytes")
    address, line = b.address(a), b.instruction.line
    origin = Origin("uninitialised-global", f"memory that the discard of PTX line {line} emptied")
    missing = np.ones((1, DISCARDED), np.bool_)

    def step(warp: Warp) -> None:
        for lane in access.active(warp):
            at, lanes = address(warp)[lane : lane + 1], np.array([lane])
            check_alignment(at, DISCARDED, "discard", warp.cta.machine.memory)
            buffer = warp.cta.machine.memory.find(int(at[0]), DISCARDED, "discard")
            held = buffer.data[int(at[0]) - buffer.base :][:DISCARDED].reshape(1, -1).copy()
            access.store(warp, "global", at, held, line, lanes=lanes)
            access.undefine(warp, "global", at, missing, origin.stored_at(line, warp.name), lanes=lanes)

    return step


_PRIMARY = "L2::evict_last L2::evict_normal L2::evict_first L2::evict_unchanged"
_SECOND = "L2::evict_first L2::evict_unchanged"


@opcode(
    "prefetch{.<space>}.<level>",
    section="9.7.9.15",
    counter="memory",
    space="global local",
    level="L1 L2 L2::evict_last L2::evict_normal",
)
@opcode("prefetchu.L1", section="9.7.9.15", counter="memory")
@opcode("applypriority{.global}.L2::evict_normal", section="9.7.9.16", counter="memory")
@opcode("createpolicy.fractional.<primary>{.<second>}{.b64}.b64", section="9.7.9.18", counter="memory",
        primary=_PRIMARY, second=_SECOND)  # fmt: skip
@opcode("createpolicy.range{.global}.<primary>{.<second>}.b64", section="9.7.9.18", counter="memory",
        primary=_PRIMARY, second=_SECOND)  # fmt: skip
@opcode("createpolicy.cvt.L2.b64", section="9.7.9.18", counter="memory")
def cache_hint(b: Binder) -> Step:
    """Do nothing: caches do not change results here. A created policy is an opaque word, 0."""
    if b.instruction.parts[0] == "createpolicy":
        row = b.destination(b.expect(1, 2, 4)[0], "u64")
        return lambda warp: np.copyto(warp.u64[row], np.uint64(0), where=warp.where)
    return lambda warp: None

"""Variables and parameters: sizes, alignments and initialiser bytes (PTX ISA 5.4)."""

from __future__ import annotations

import struct

import numpy as np

from backends.vm.faults import counted
from backends.vm.ptx.ast import Immediate, InitialAddress, Variable
from backends.vm.ptx.tree import MisreadError, RawDeclarator, RawInitial, RawInitialAddress, RawInitialList, RawVariable

_LARGEST = 1 << 40
_LARGEST_INITIALISED = 1 << 26


def element_bytes(type_: str) -> int:
    """Bytes of a scalar type: 4 for "f32", "f16x2"; 16 for "b128"."""
    digits = type_.lstrip("bfsu").removesuffix("x2")
    return int(digits) // 8 * (2 if type_.endswith("x2") else 1)


def declare(raw: RawVariable, declarator: RawDeclarator, unique_name: str) -> Variable:
    """The Variable of one declarator; MisreadError for an impossible size, alignment or initialiser."""
    name = declarator.name
    if raw.type == "pred":
        raise MisreadError(f"{name} has type .pred; only a register can be a predicate", name)
    scalar = element_bytes(raw.type)
    shape, initial, addresses = list[int](), None, list[InitialAddress]()
    for extent in declarator.dimensions:
        if isinstance(extent, Immediate) or (extent is not None and not 0 <= extent <= _LARGEST):
            raise MisreadError(f"{name} has an array size that is not an integer from 0 to 2**40", name)
        shape.append(-1 if extent is None else extent)
    if -1 in shape[1:]:
        raise MisreadError(f"{name} leaves out an array size; only the first may be empty", name)
    extern = "extern" in raw.linkage
    if shape and shape[0] == -1:
        shape[0] = _first_extent(raw, declarator, extern)
    size = scalar * raw.vector
    for extent in shape:
        size *= extent
    if size == 0 and raw.space != "param" and not extern:
        raise MisreadError(f"{name} has no bytes; only an .extern array may leave its size open", name)
    if size > _LARGEST:
        raise MisreadError(f"{name} has {size} bytes; at most 2**40 can be addressed here", name)
    if declarator.initial is not None:
        initial, addresses = _Initialiser(raw, declarator, [*shape, *([raw.vector] if raw.vector > 1 else [])]).encode()
    type_ = raw.type if raw.vector == 1 else f"v{raw.vector}.{raw.type}"
    align, line = _alignment(raw, declarator), name.line or 0
    return Variable(unique_name, raw.space, type_, align, size, initial, extern, line, tuple(addresses), raw.pointer)


def _alignment(raw: RawVariable, declarator: RawDeclarator) -> int:
    if raw.align is None:
        return element_bytes(raw.type) * raw.vector
    if isinstance(raw.align, Immediate) or raw.align < 1 or raw.align & (raw.align - 1) or raw.align > 1 << 20:
        raise MisreadError(f"{declarator.name} has an .align that is not a power of two up to 2**20", declarator.name)
    return int(raw.align)


def _first_extent(raw: RawVariable, declarator: RawDeclarator, extern: bool) -> int:
    if isinstance(declarator.initial, RawInitialList):
        return len(declarator.initial.items)
    if not extern and raw.space != "param":
        raise MisreadError(
            f"{declarator.name}[] has no size; give one, initialise it, or declare it .extern", declarator.name
        )
    return 0


class _Initialiser:
    """Lays the items of an initialiser over an array, row by row. Omitted elements are zero."""

    def __init__(self, raw: RawVariable, declarator: RawDeclarator, shape: list[int]) -> None:
        self._raw, self._declarator, self._shape = raw, declarator, shape
        self._scalar = element_bytes(raw.type)
        if raw.space not in ("global", "const"):
            raise self._problem(f"a .{raw.space} variable cannot be initialised; only .global and .const can")
        total = self._scalar
        for extent in shape:
            total *= extent
        if total > _LARGEST_INITIALISED:
            raise self._problem(f"an initialised variable of {total} bytes is too large; the limit is 64 MiB")
        self._bytes = bytearray(total)
        self._addresses: list[InitialAddress] = []

    def encode(self) -> tuple[bytes, list[InitialAddress]]:
        assert self._declarator.initial is not None
        self._fill(self._declarator.initial, 0, self._shape)
        return bytes(self._bytes), self._addresses

    def _problem(self, problem: str) -> MisreadError:
        return MisreadError(f"{self._declarator.name}: {problem}", self._declarator.name)

    def _fill(self, item: RawInitial, at: int, shape: list[int]) -> None:
        if not isinstance(item, RawInitialList):
            if shape:
                raise self._problem("an array is initialised by a list in { }")
            self._put(item, at)
            return
        if not shape:
            raise self._problem("a list in { } initialises something that is not an array")
        stride = self._scalar
        for extent in shape[1:]:
            stride *= extent
        if len(item.items) > shape[0]:
            raise self._problem(f"{counted(len(item.items), 'item')} for an array of {shape[0]}")
        for index, each in enumerate(item.items):
            self._fill(each, at + index * stride, shape[1:])

    def _put(self, item: RawInitial, at: int) -> None:
        if isinstance(item, RawInitialAddress):
            if self._scalar != 8:
                raise self._problem(f"an address needs 64 bits; the type is .{self._raw.type}")
            if isinstance(item.offset, Immediate):
                raise self._problem("an address takes an integer offset")
            self._addresses.append(InitialAddress(at, str(item.name), int(item.offset), item.generic))
            return
        assert not isinstance(item, RawInitialList)
        self._bytes[at : at + self._scalar] = self._encode(item)

    def _encode(self, value: int | Immediate) -> bytes:
        width = self._scalar
        if self._raw.type in ("f32", "f64"):
            if isinstance(value, int):
                raise self._problem(f"the integer {value} initialises a float; write {value}.0")
            real = _real(value)
            if self._raw.type == "f64":
                return struct.pack("<d", real)
            if value.kind == "f32":
                return struct.pack("<I", value.value)
            with np.errstate(over="ignore"):
                return np.float32(real).tobytes()
        if isinstance(value, Immediate):
            raise self._problem(f"a floating-point value initialises type .{self._raw.type}")
        return (value & ((1 << 8 * width) - 1)).to_bytes(width, "little")


def _real(value: Immediate) -> np.float64:
    if value.kind == "f32":
        return np.float64(np.uint32(value.value).view(np.float32))
    return np.uint64(value.value).view(np.float64)

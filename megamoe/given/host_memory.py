"""The memory of this process that a launch may access: torch tensors on the CPU, NumPy arrays, what they point at."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from megamoe.contract.machine import KernelMachine, LaunchRefusedError, Stretch
from megamoe.given.unwritten import is_unwritten

SMALLEST_ADDRESS = 1 << 22
"""No allocation lies below this, where programs like Debian's Python begin, so tensors of small counts and indices are
not searched."""


@dataclass(frozen=True, slots=True)
class View:
    """An array of `bytes` bytes at address `first`, in an allocation of `size` bytes. Addresses are this process's."""

    first: int
    bytes: int
    allocation: int
    size: int
    writable: bool


def view_of(array: Any) -> View | None:
    """The memory of a torch tensor or NumPy array; None for anything else.

    LaunchRefusedError for a tensor on a device, for one whose elements do not lie in one allocation, and for elements
    that are not what the bytes in memory say: Python objects, numbers in the other byte order, conjugates to be taken.
    """
    if isinstance(array, np.ndarray):
        _check_elements(array)
    elif _is_tensor(array):
        _check_tensor(array)
    return _span_of(array)


def _is_tensor(array: Any) -> bool:
    return hasattr(array, "untyped_storage") and hasattr(array, "data_ptr")


def _span_of(array: Any) -> View | None:
    if isinstance(array, np.ndarray):
        root = array
        while isinstance(root.base, np.ndarray):
            root = root.base
        start, end = np.lib.array_utils.byte_bounds(root)
        return View(array.ctypes.data, array.nbytes, start, end - start, array.flags.writeable)
    if _is_tensor(array):
        storage = array.untyped_storage()
        own = array.numel() * array.element_size()
        return View(array.data_ptr(), own, storage.data_ptr(), storage.nbytes(), True)
    return None


def _check_elements(array: npt.NDArray[Any]) -> None:
    dtype = array.dtype
    if isinstance(array, np.ma.MaskedArray):
        raise LaunchRefusedError("an array is masked, and a kernel sees no mask: give its .data, or .filled(VALUE)")
    if dtype.hasobject:
        raise LaunchRefusedError(
            f"an array has the dtype {dtype}, whose elements are references to Python objects; a kernel needs the "
            "numbers themselves: .astype(np.float32)"
        )
    if not dtype.isnative:
        raise LaunchRefusedError(
            f"an array has the dtype {dtype.str if dtype.names is None else dtype}, in the byte order of another "
            "machine; a GPU is little-endian: a.astype(a.dtype.newbyteorder('='))"
        )
    for one in _plain_dtypes(dtype):
        if one.kind == "U":
            raise LaunchRefusedError(
                f"an array has the dtype {one}, text of 4 bytes a character; for a `char *` give bytes: "
                "np.array(..., 'S')"
            )
        if one.kind in "fc" and one.itemsize > _LARGEST_NUMBER[one.kind]:
            raise LaunchRefusedError(
                f"an array has the dtype {one}, which no GPU has; use float64: .astype(np.float64)"
            )


_LARGEST_NUMBER = {"f": 8, "c": 16}
"""Bytes of the largest float and complex number that a GPU has."""


def _plain_dtypes(dtype: np.dtype[Any]) -> Iterator[np.dtype[Any]]:
    """The dtypes of the numbers in an element, which may be a struct of structs and of arrays."""
    if dtype.subdtype is not None:
        yield from _plain_dtypes(dtype.subdtype[0])
    elif dtype.fields is not None:
        for inner, *_ in dtype.fields.values():
            yield from _plain_dtypes(inner)
    else:
        yield dtype


def _check_tensor(tensor: Any) -> None:
    if tensor.device.type != "cpu":
        raise LaunchRefusedError(f"a tensor is on {tensor.device}; the machine works on tensors of the CPU: t.cpu()")
    if str(tensor.layout) != "torch.strided":
        raise LaunchRefusedError(
            f"a tensor has the layout {tensor.layout}; the machine works on torch.strided ones: t.to_dense()"
        )
    for asked, lazily, resolve in (("is_conj", "conjugate", "resolve_conj"), ("is_neg", "negative", "resolve_neg")):
        if hasattr(tensor, asked) and getattr(tensor, asked)():
            raise LaunchRefusedError(
                f"a tensor is a view that stands for the {lazily} of what its memory holds, which a kernel would "
                f"read as it is: t.{resolve}()"
            )
    if tensor.numel() and not tensor.data_ptr():
        raise LaunchRefusedError(
            f"a tensor ({type(tensor).__name__} of {tensor.numel()} elements) has no memory of its own: it is a fake "
            "one or wraps others, or its storage was given back; give the tensor that has the elements"
        )


def array_of(option: str, array: object) -> View:
    if (view := view_of(array)) is None:
        raise LaunchRefusedError(f"{option} is given {type(array).__name__}; it takes tensors and NumPy arrays")
    return view


def several(option: str, given: object) -> tuple[Any, ...]:
    if not isinstance(given, Iterable):
        raise LaunchRefusedError(f"{option} is {given!r}; it takes a list of tensors and NumPy arrays")
    return tuple(given)


class Reached:
    """The memory that a launch may access: its arguments, and the live tensors (`live`) whose addresses they hold."""

    def __init__(
        self, machine: KernelMachine, arrays: Sequence[object], *, addresses: Sequence[int] = (),
        in_place: bool = False, scratch: Sequence[object] = (),
    ) -> None:  # fmt: skip
        """`addresses`: pointers into further live tensors. `in_place`: kernels get the process's own addresses,
        whatever their alignment. `scratch`: the arrays that are workspaces, whether or not they are in `arrays`.

        LaunchRefusedError for a workspace that is not an array or shares its allocation with another array.
        """
        self.machine, self._in_place = machine, in_place
        self.live = list[Any]()
        self._kept = list(arrays)
        named = [(f"argument {index}", view) for index, one in enumerate(self._kept) if (view := view_of(one))]
        self._given = list(named)
        pointers = {f"argument {index}": found for index, one in enumerate(self._kept)
                    if (found := _addresses_in(one)) is not None}  # fmt: skip
        if addresses:
            pointers["the arguments"] = np.array(addresses, np.int64)
        if pointers:
            self.live += _pointed_at(np.unique(np.concatenate([*pointers.values()])))
            named += [(_name_of(view, pointers), view) for one in self.live if (view := _span_of(one))]
        self._spaces = [array_of("scratch", one) for one in scratch]
        self.stretches = list(map(self._judged, _united([*named, *(("scratch", view) for view in self._spaces)])))

    def _judged(self, stretch: Stretch) -> Stretch:
        """Marks `stretch` as a workspace if scratch lies in it. LaunchRefusedError if another argument does, too."""
        spaces = {(one.first, one.bytes) for one in self._spaces if stretch.has(one.first)}
        if not spaces:
            return stretch
        for name, one in self._given:
            if one.bytes and stretch.has(one.first) and (one.first, one.bytes) not in spaces:
                raise LaunchRefusedError(
                    f"a scratch array shares its allocation with {name}, of which the results count; "
                    "give it an allocation of its own"
                )
        return replace(stretch, scratch=True)

    def address(self, array: object) -> int | None:
        """The address at which kernels see the first byte of `array`; None if it is not an array."""
        view = view_of(array)
        if view is None or not view.size:
            return None if view is None else 0
        if self._in_place:
            return view.first
        home = next(one for one in self.stretches if one.address <= view.first <= one.address + one.size)
        return self.machine.address_of(view.first, home.address)

    def memory(self) -> list[Stretch]:
        """The stretches as they are now, right before a launch: those that nobody has written yet are marked."""
        return [replace(one, unwritten=is_unwritten(one.address, one.size)) for one in self.stretches]

    def knows(self, address: int) -> bool:
        """Whether `address` lies in this memory, or right behind a stretch of it, or in memory of the machine."""
        starts = ((start, one.size) for one in self.stretches
                  for start in (one.address, self.machine.address_of(one.address, one.address)))  # fmt: skip
        return any(start <= address <= start + size for start, size in starts) or self.machine.holds(address)


def _united(named: Iterable[tuple[str, View]]) -> Iterator[Stretch]:
    """Disjoint stretches. Overlapping ones are merged, since a NumPy array and a tensor made of it may both be
    passed."""
    spans = list[tuple[str, int, int, bool]]()
    for name, one in sorted(named, key=lambda pair: (pair[1].allocation, -pair[1].size)):
        start, end = one.allocation, one.allocation + one.size
        if spans and start < spans[-1][2]:
            first, begin, last, writable = spans[-1]
            spans[-1] = (first, begin, max(last, end), writable or one.writable)
        elif one.size:
            spans.append((name, start, end, one.writable))
    for name, start, end, writable in spans:
        yield Stretch(name, start, end - start, writable)


def _addresses_in(array: Any) -> npt.NDArray[np.int64] | None:
    """The values of an array of 64-bit integers if any of them may be an address, else None."""
    if view_of(array) is None or "int64" not in str(array.dtype):
        return None
    values = np.asarray(array).astype(np.int64, copy=False).reshape(-1)
    return values if values.size and values.max() >= SMALLEST_ADDRESS else None


def _name_of(view: View, pointers: Mapping[str, npt.NDArray[np.int64]]) -> str:
    """Names memory by the first pointer into it, because its address differs from run to run."""
    return next(
        f"memory of pointer {inside[0]} in {holder}"
        for holder, values in pointers.items()
        if (inside := np.flatnonzero((values >= view.allocation) & (values < view.allocation + view.size))).size
    )


def _pointed_at(values: npt.NDArray[np.int64]) -> Iterator[Any]:
    """The live tensors into which `values`, sorted, point."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    # isinstance would ask proxies for their class, and some proxies then import the object they stand for.
    for one in [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]:
        if one.layout is not torch.strided or one.device.type != "cpu" or type(one).__name__ == "FakeTensor":
            continue
        # One without memory has the address 0, and its storage cannot be asked.
        view = _span_of(one) if one.data_ptr() else None
        if view and view.size:
            at = int(np.searchsorted(values, view.allocation))
            if at < values.size and values[at] < view.allocation + view.size:
                yield one

"""Shared memory, tensor memory and mbarriers that tell a recorder of every access, and otherwise do the same.

They replace the plain objects of a CTA before its first step: a run without a recorder pays nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Literal

import numpy as np

from backends.vm.memory.clocks import Clock
from backends.vm.memory.mbarrier import MBarrier
from backends.vm.memory.shared import Addresses, Bytes, Granules, SharedMemory
from backends.vm.memory.tmem import Index, Part, TensorMemory, Words

Verb = Literal["write", "read"]
Bounds = tuple[int, int]
TouchTmem = Callable[[Verb, Bounds, Bounds, str], None]
"""(verb, lanes, columns, action): bounds are inclusive."""
TouchSmem = Callable[[Verb, str, Granules], None]
"""(verb, "generic", "copy" or "tensor core", granules of 4 bytes)."""


def _bounds(part: Part) -> Bounds:
    return (part.start, part.stop - 1) if isinstance(part, slice) else (int(part.min()), int(part.max()))


class RecordedTensorMemory(TensorMemory):
    """Reports reads and writes."""

    __slots__ = ("_touch",)

    def __init__(self, plain: TensorMemory, touch: TouchTmem) -> None:
        for field in fields(plain):
            setattr(self, field.name, getattr(plain, field.name))
        self._touch = touch

    def read(self, index: Index, clock: Clock, stamp: int, action: str) -> Words:
        """As TensorMemory.read."""
        self._touch("read", _bounds(index[0]), _bounds(index[1]), action)
        return super().read(index, clock, stamp, action)

    def begin_write(
        self, index: Index, clock: Clock, stamp: int, line: int, action: str, own: int | None = None
    ) -> None:
        """As TensorMemory.begin_write."""
        self._touch("write", _bounds(index[0]), _bounds(index[1]), action)
        super().begin_write(index, clock, stamp, line, action, own)


class RecordedSharedMemory(SharedMemory):
    """Reports the granules written and read, and by which proxy."""

    def __init__(self, plain: SharedMemory, touch: TouchSmem) -> None:
        self.__dict__.update(plain.__dict__)
        self._touch = touch

    def load(self, offsets: Addresses, size: int, clock: Clock, stamp: int, *, strong: bool = False) -> Bytes:
        """As SharedMemory.load."""
        self._touch("read", "generic", _covered(offsets, size))
        return super().load(offsets, size, clock, stamp, strong=strong)

    def store(
        self, offsets: Addresses, values: Bytes, clock: Clock, stamp: int, line: int, *, strong: bool = False
    ) -> None:
        """As SharedMemory.store."""
        self._touch("write", "generic", _covered(offsets, values.shape[1]))
        super().store(offsets, values, clock, stamp, line, strong=strong)

    def async_read(self, granules: Granules, clock: Clock, stamp: int, what: str) -> None:
        """As SharedMemory.async_read."""
        self._touch("read", "tensor core" if "mma" in what or "tcgen05" in what else "copy", granules)
        super().async_read(granules, clock, stamp, what)

    def async_write_begins(
        self, granules: Granules, clock: Clock, line: int, what: str, *, generic: bool = False
    ) -> None:
        """As SharedMemory.async_write_begins."""
        self._touch("write", "copy", granules)
        super().async_write_begins(granules, clock, line, what, generic=generic)


def _covered(offsets: Addresses, size: int) -> Granules:
    return ((offsets[:, None] >> 2) + np.arange(max(size // 4, 1))).ravel()


class RecordedMBarrier(MBarrier):
    """Reports who asks whether a phase is over."""

    __slots__ = ("_asked",)

    def __init__(self, plain: MBarrier, asked: Callable[[MBarrier], None]) -> None:
        for field in fields(plain):
            setattr(self, field.name, getattr(plain, field.name))
        self._asked = asked

    def passed(self, parity: int) -> bool:
        """As MBarrier.passed."""
        self._asked(self)
        return super().passed(parity)

"""A map of the dynamic shared memory of one kernel, made place by place."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """Named places in dynamic shared memory; offsets in bytes from its start."""

    places: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    size: int = 0

    def with_place(self, name: str, size: int, align: int) -> SharedMemory:
        """This map with one more place behind the last."""
        offset = -(-self.size // align) * align
        return SharedMemory({**self.places, name: (offset, size)}, offset + size)

    def __getitem__(self, name: str) -> int:
        """The offset of a place."""
        return self.places[name][0]

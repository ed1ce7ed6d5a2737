"""The dynamic shared memory of one kernel: a layout built entry by entry, and addresses in it while PTX is written."""

from __future__ import annotations

from dataclasses import dataclass, field

from backends.ptx.builder import MBARRIER_BYTES, Builder
from backends.ptx.operands import Address, Register, at

MAX_SMEM = 232448
"""Dynamic shared memory in bytes that one CTA may request on sm_90 and sm_100 (facts.md 0.1)."""
BASE_ALIGN = 1024
"""Alignment that the 128-byte swizzle requires of operand addresses."""


@dataclass(frozen=True, slots=True)
class SmemLayout:
    """Named places with offsets and sizes in bytes. `arrivals`: for each row of mbarriers, the arrivals per phase."""

    places: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    arrivals: dict[str, int] = field(default_factory=dict[str, int])
    size: int = 0

    def with_place(self, name: str, size: int, align: int) -> SmemLayout:
        """This layout with one more place after the last."""
        offset = -(-self.size // align) * align
        return SmemLayout({**self.places, name: (offset, size)}, self.arrivals, offset + size)

    def with_mbarriers(self, name: str, count: int = 1, arrivals: int = 1) -> SmemLayout:
        """This layout with a row of `count` mbarriers after the last place."""
        layout = self.with_place(name, MBARRIER_BYTES * count, MBARRIER_BYTES)
        return SmemLayout(layout.places, {**self.arrivals, name: arrivals}, layout.size)

    def __getitem__(self, name: str) -> int:
        """The offset of a place."""
        return self.places[name][0]

    def described(self) -> list[str]:
        """One line per place, for the header comment of a kernel."""
        return [f"  {offset:6d} +{size:<6d} {name}" for name, (offset, size) in self.places.items()]


@dataclass(frozen=True, slots=True)
class Smem:
    """A layout at the address `base`."""

    x: Builder
    base: Register
    layout: SmemLayout

    @classmethod
    def declare(cls, x: Builder, name: str, layout: SmemLayout) -> Smem:
        """Declares the entry's dynamic shared memory. From here on, instructions that address a place get its name as a
        comment."""
        base = x.dynamic_smem(name, BASE_ALIGN)
        for place, (offset, _) in layout.places.items():
            x.name_place(at(base, offset), place)
        return cls(x, base, layout)

    def __getitem__(self, name: str) -> Address:
        """The address of a place."""
        return at(self.base, self.layout[name])

    def mbarrier(self, name: str, index: Register, label: str = "") -> Address:
        """The address of mbarrier `index` of a row. `label` names its register."""
        return at(self.x.indexed(label or f"{name}_at", self.base, index, MBARRIER_BYTES), self.layout[name])

    def init_mbarriers(self) -> None:
        """Initialises every mbarrier. Call it in one thread, with a CTA barrier afterwards."""
        for name, arrivals in self.layout.arrivals.items():
            _, size = self.layout.places[name]
            for index in range(size // MBARRIER_BYTES):
                place = self[name].plus(MBARRIER_BYTES * index)
                self.x.init_mbarrier(place, arrivals, note=f"{name} {index}")
        self.x.comment("The tensor copies' completions come through the async proxy.")
        self.x.fence_mbarrier_init()

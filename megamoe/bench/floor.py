"""The floor of a case: its bytes and FLOPs at the rates that a copy and a matrix product attain on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from megamoe.ops import reference

if TYPE_CHECKING:
    from megamoe.contract import Case, DeviceFacts, Target, Temperature

# The ceilings are what a copy and a matrix product attained. A kernel that only reads, or a smaller product that draws
# less power, may be a little faster than these, but not by a tenth.
SLACK: Final = 0.9


@dataclass(frozen=True, slots=True)
class Floor:
    """Microseconds of a kernel at the ceilings, and which of the two binds."""

    us: float
    by: Literal["bytes", "flops"]

    @property
    def limit_us(self) -> float:
        """Times below this are not believed."""
        return self.us * SLACK


def floor_of(case: Case, target: Target, device: DeviceFacts, temperature: Temperature) -> Floor | None:
    """The floor of `case` on `device`. None if neither ceiling was measured.

    "cold": every needed byte (`Reference.minimum_bytes`) comes from device memory. "hot": the L2 may hold its size of
    them from the launch before, so only the bytes beyond that size do. FLOPs (`Reference.useful_flops`) count at the
    measured bf16 rate, times the target's factor for narrower operands (`Reference.MATRIX_RATES`).
    """
    room = reference(case.op)
    floors: list[Floor] = []
    if device.copy_bytes_per_s:
        kept = device.l2_bytes if temperature == "hot" else 0
        moved = max(0, room.minimum_bytes(case) - kept)
        floors.append(Floor(1e6 * moved / device.copy_bytes_per_s, "bytes"))
    if device.bf16_flops_per_s:
        rate = device.bf16_flops_per_s * room.MATRIX_RATES.get(target, 1.0)
        floors.append(Floor(1e6 * room.useful_flops(case) / rate, "flops"))
    return max(floors, key=lambda floor: floor.us, default=None)

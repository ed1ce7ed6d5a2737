"""The floor of a case: its bytes and its FLOPs at the rates that a copy and a matrix product attain on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from megamoe.ops import reference

if TYPE_CHECKING:
    from megamoe.contract import Case, DeviceFacts, Target, Temperature

# The ceilings are what a copy and a matrix product attained. A kernel that only reads, or a smaller product that draws
# less power, may be somewhat faster than either; nothing is by a tenth.
SLACK: Final = 0.9


@dataclass(frozen=True, slots=True)
class Floor:
    """Microseconds that a kernel takes at the ceilings, and which of the two says so."""

    us: float
    by: Literal["bytes", "flops"]

    @property
    def limit_us(self) -> float:
        """Where a time is no longer believed: SLACK below the floor."""
        return self.us * SLACK


def floor_of(case: Case, target: Target, device: DeviceFacts, temperature: Temperature) -> Floor | None:
    """The floor of `case` on `device`, None where neither ceiling was measured.

    "cold": every byte that is needed crosses the memory's interface (`Reference.minimum_bytes`). "hot": what fits in
    the L2 may be there from the launch before, so that only the bytes beyond its size must. FLOPs
    (`Reference.useful_flops`) count at the measured bf16 rate, times what the target's matrix unit has on narrower
    operands (`Reference.MATRIX_RATES`).
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

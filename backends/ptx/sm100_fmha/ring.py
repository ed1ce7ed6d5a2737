"""The ring of shared memory stages that K and V pass through, seen from either end."""

from __future__ import annotations

from dataclasses import dataclass

from backends.ptx.operands import Address, Register
from backends.ptx.sm100_fmha.frame import Frame


@dataclass(frozen=True, slots=True)
class RingPosition:
    """A stage and the parity of the current lap; producer and consumer each keep their own."""

    frame: Frame
    stage: Register
    parity: Register
    wrapped: Register

    @classmethod
    def start(cls, frame: Frame, role: str, parity: int) -> RingPosition:
        """Stage 0. `parity` 1 for the producer, who finds every stage of the first lap empty; 0 for the consumer."""
        x = frame.x
        stage = x.let(f"{role}_stage", "mov.b32", 0)
        return cls(frame, stage, x.let(f"{role}_parity", "mov.b32", parity), x.reg(f"{role}_wrapped", "pred"))

    def barrier(self, name: str) -> Address:
        """The barrier of this stage in a row of mbarriers."""
        return self.frame.buffered(name, self.stage, f"{name}_at")

    def data(self) -> Register:
        """The shared memory address of this stage's data."""
        geometry = self.frame.geometry
        offset = self.frame.x.indexed("stage_data", self.frame.smem, self.stage, geometry.stage_bytes)
        self.frame.x.emit("add.u32", offset, offset, geometry.smem["ring"])
        return offset

    def advance(self) -> None:
        """On to the next stage; the parity flips at the end of a lap."""
        x = self.frame.x
        x.emit("add.u32", self.stage, self.stage, 1)
        x.emit("setp.eq.u32", self.wrapped, self.stage, self.frame.geometry.ring_stages)
        x.emit("selp.b32", self.stage, 0, self.stage, self.wrapped)
        x.emit("xor.b32", self.parity, self.parity, 1, guard=self.wrapped)

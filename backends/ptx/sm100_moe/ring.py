"""The ring of shared memory stages that operands and scale factors pass through, seen from either end."""

from __future__ import annotations

from dataclasses import dataclass

from backends.ptx.operands import Address, Register, at
from backends.ptx.sm100_moe.frame import Frame
from backends.ptx.sm100_moe.geometry import STAGES


@dataclass(frozen=True, slots=True)
class RingPosition:
    """A stage and the parity of the current lap; each role keeps its own."""

    frame: Frame
    stage: Register
    parity: Register
    wrapped: Register

    @classmethod
    def start(cls, frame: Frame, role: str, *, stage: int = 0, parity: int) -> RingPosition:
        """`parity` 1 for who finds every stage of the first lap empty; 0 for who waits until it is full."""
        x = frame.x
        at_stage = x.let(f"{role}_stage", "mov.b32", stage)
        return cls(frame, at_stage, x.let(f"{role}_parity", "mov.b32", parity), x.reg(f"{role}_wrapped", "pred"))

    def barrier(self, name: str) -> Address:
        """The barrier of this stage in a row of mbarriers."""
        return at(self.frame.x.indexed(f"{name}_at", self.frame.smem, self.stage, 8), self.frame.places[name])

    def data(self, name: str, stage_bytes: int) -> Register:
        """The shared memory address of this stage of the ring `name`."""
        x = self.frame.x
        address = x.indexed(f"{name}_data", self.frame.smem, self.stage, stage_bytes)
        x.emit("add.u32", address, address, self.frame.places[name])
        return address

    def advance(self) -> None:
        """On to the next stage; the parity flips at the end of a lap."""
        x = self.frame.x
        x.emit("add.u32", self.stage, self.stage, 1)
        x.emit("setp.eq.u32", self.wrapped, self.stage, STAGES)
        x.emit("selp.b32", self.stage, 0, self.stage, self.wrapped)
        x.emit("xor.b32", self.parity, self.parity, 1, guard=self.wrapped)

"""Shared by the tcgen05 kernels: allocating and freeing tensor memory, its addresses, and the ring of stages.

All use `cta_group::1`, allocate all of tensor memory, and have one warp that issues MMAs and one that loads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from backends.ptx.builder import Builder
from backends.ptx.operands import Address, Register
from backends.ptx.shared_memory import Smem, SmemLayout

TMEM_COLUMNS = 512
LANE_QUARTER_SHIFT = 21
"""Warp w of a warpgroup can access lanes 32 w to 32 w + 31; bits 31..16 of an address hold the lane (facts.md 1)."""
TMEM_BASE = "tmem_base"


def with_tmem_base(layout: SmemLayout) -> SmemLayout:
    """`layout` plus the word that tcgen05.alloc writes."""
    return layout.with_place(TMEM_BASE, 4, 4)


@dataclass(frozen=True, slots=True)
class WarpRoles:
    """Warp indices: `mma` issues MMAs and owns tensor memory, `producer` loads."""

    mma: int
    producer: int


@dataclass(frozen=True, slots=True)
class Threads:
    """The thread's index in the CTA, and its warp's."""

    thread: Register
    warp: Register


def set_up(smem: Smem, threads: Threads, roles: WarpRoles, maps: Sequence[Register]) -> None:
    """Thread 0 initialises the mbarriers, the MMA warp allocates tensor memory, the producer prefetches `maps`."""
    x = smem.x
    is_initialiser = x.let("is_initialiser", "setp.eq.u32", threads.thread, 0)
    with x.when(is_initialiser, "init_barriers"):
        smem.init_mbarriers()
    is_tmem_owner = x.let("is_tmem_owner", "setp.eq.u32", threads.warp, roles.mma)
    with x.when(is_tmem_owner, "alloc"):
        x.tmem_alloc(smem[TMEM_BASE], TMEM_COLUMNS)
    is_producer = x.let("is_producer", "setp.eq.u32", threads.thread, roles.producer * 32)
    x.prefetch_maps(maps, guard=is_producer)


def meet(smem: Smem) -> Register:
    """CTA barrier after `set_up`; returns the address of tensor memory."""
    x = smem.x
    x.before_thread_sync()
    x.sync_cta()
    x.after_thread_sync()
    return x.let("tmem", "ld.shared.b32", smem[TMEM_BASE])


def tear_down(x: Builder, threads: Threads, roles: WarpRoles, tmem: Register, note: str = "") -> None:
    """All threads meet, the MMA warp frees tensor memory, and the kernel returns. `note` annotates the barrier."""
    x.section("the end")
    x.before_thread_sync()
    x.sync_cta(note)
    is_tmem_owner = x.let("is_tmem_owner", "setp.eq.u32", threads.warp, roles.mma)
    with x.when(is_tmem_owner, "dealloc"):
        x.after_thread_sync()
        x.tmem_dealloc(tmem, TMEM_COLUMNS)
    x.emit("ret")


def tmem_address(x: Builder, name: str, base: Register, index: Register | int, stride: int) -> Register:
    """The tensor memory address `base + index * stride`, in the .b32 register that tcgen05.mma requires."""
    address = x.reg(name, "b32")
    x.emit("mad.lo.u32", address, index, stride, base)
    return address


def lanes_of_warp(x: Builder, name: str, tmem: Register, warp: Register, quarter: str) -> Register:
    """The tensor memory address of the lanes that `warp` of a warpgroup can access; `quarter` names its lane field."""
    return x.let(name, "add.u32", tmem, x.let(quarter, "shl.b32", warp, LANE_QUARTER_SHIFT))


def smem_descriptor(*, stride_bytes: int, leading_bytes: int = 0, swizzle_128b: bool = True) -> int:
    """The matrix descriptor of an operand in shared memory, without its start address (facts.md 3).

    `stride_bytes` is the distance between groups of eight rows. `leading_bytes` is the distance between panels of an
    MN-major operand, or between 16-byte columns without a swizzle.
    """
    version = 1
    return leading_bytes // 16 << 16 | stride_bytes // 16 << 32 | version << 46 | 2 * swizzle_128b << 61


@dataclass(frozen=True, slots=True)
class RingCursor:
    """One role's position in a ring of shared memory stages: the stage, and the parity of the current lap."""

    smem: Smem
    stages: int
    stage: Register
    parity: Register
    wrapped: Register

    @classmethod
    def start(cls, smem: Smem, stages: int, role: str, *, parity: int, stage: int = 0) -> RingCursor:
        """A cursor at `stage`. `parity` is 1 for a role that finds every stage of the first lap empty, 0 for one that
        waits until a stage is full."""
        x = smem.x
        at_stage = x.let(f"{role}_stage", "mov.b32", stage)
        lap = x.let(f"{role}_parity", "mov.b32", parity)
        return cls(smem, stages, at_stage, lap, x.reg(f"{role}_wrapped", "pred"))

    def barrier(self, name: str) -> Address:
        """This stage's mbarrier in the row `name`."""
        return self.smem.mbarrier(name, self.stage)

    def wait(self, name: str, label: str = "") -> None:
        """Blocks on this stage's mbarrier in the row `name`."""
        self.smem.x.wait(self.barrier(name), self.parity, label or name)

    def data(self, place: str, stage_bytes: int, label: str = "") -> Register:
        """The address of this stage of the ring at `place`. `label` names its register."""
        x = self.smem.x
        address = x.indexed(label or f"{place}_data", self.smem.base, self.stage, stage_bytes)
        x.emit("add.u32", address, address, self.smem.layout[place])
        return address

    def advance(self) -> None:
        """Moves to the next stage; the parity flips at the end of a lap."""
        x = self.smem.x
        x.emit("add.u32", self.stage, self.stage, 1)
        x.emit("setp.eq.u32", self.wrapped, self.stage, self.stages)
        x.emit("selp.b32", self.stage, 0, self.stage, self.wrapped)
        x.emit("xor.b32", self.parity, self.parity, 1, guard=self.wrapped)

    def drain(self) -> None:
        """Makes the producer wait until every stage is empty."""
        x = self.smem.x
        x.comment("The last arrivals on ring_empty must not find the CTA gone.")
        drained, all_drained = x.let("drained", "mov.b32", 0), x.reg("all_drained", "pred")
        with x.loop("drain") as loop:
            self.wait("ring_empty", "ring_drained")
            self.advance()
            x.emit("add.u32", drained, drained, 1)
            x.emit("setp.eq.u32", all_drained, drained, self.stages)
            x.emit("bra", loop.done, guard=all_drained)

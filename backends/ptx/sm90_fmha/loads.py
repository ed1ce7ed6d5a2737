"""Thread 0 loads Q once and K and V tile by tile, each into its stage of the ring as soon as the stage is free."""

from __future__ import annotations

from dataclasses import dataclass

from backends.ptx.attention import PANEL_COLUMNS
from backends.ptx.builder import MBARRIER_BYTES
from backends.ptx.operands import Address, Register, at
from backends.ptx.sm90_fmha.frame import Sm90FmhaFrame
from backends.ptx.sm90_fmha.geometry import ROW_BYTES, TILE_M


@dataclass(frozen=True, slots=True)
class KvStage:
    """The location of a ring stage: the address of its K (V follows it) and of its two mbarriers."""

    data: Register
    k_full: Address
    v_full: Address


@dataclass(frozen=True, slots=True)
class KvCursor:
    """A position in the ring: addresses of the stage, the parity of the current lap, the stage's index."""

    data: Register
    k_full: Register
    v_full: Register
    parity: Register
    index: Register

    @classmethod
    def first(cls, frame: Sm90FmhaFrame) -> KvCursor:
        """Stage 0 in its first lap."""
        x, base, layout = frame.x, frame.smem.base, frame.smem.layout
        return cls(
            data=x.let("stage_data", "add.u32", base, layout["ring"]),
            k_full=x.let("stage_k_full", "add.u32", base, layout["k_full"]),
            v_full=x.let("stage_v_full", "add.u32", base, layout["v_full"]),
            parity=x.let("stage_parity", "mov.b32", 0),
            index=x.let("stage_index", "mov.b32", 0),
        )

    @property
    def stage(self) -> KvStage:
        """The stage itself."""
        return KvStage(self.data, at(self.k_full), at(self.v_full))

    def advance(self, frame: Sm90FmhaFrame) -> None:
        """Moves to the next stage; after the last one, to the first in the next lap."""
        x, tiling = frame.x, frame.tiling
        steps = (
            (self.index, 1),
            (self.data, tiling.stage_bytes),
            (self.k_full, MBARRIER_BYTES),
            (self.v_full, MBARRIER_BYTES),
        )
        for register, step in steps:
            x.emit("add.u32", register, register, step)
        wraps = x.let("wraps", "setp.eq.u32", self.index, tiling.stages)
        for register, step in steps:
            x.emit("sub.u32", register, register, step * tiling.stages, guard=wraps)
        x.emit("xor.b32", self.parity, self.parity, 1, guard=wraps)


def load_first(frame: Sm90FmhaFrame) -> None:
    """Loads Q and as many tiles as there are stages. Nothing is loaded if no row sees a key."""
    x, tiling, params, smem = frame.x, frame.tiling, frame.params, frame.smem
    x.section("thread 0: the first loads")
    with x.when(frame.is_leader, "first_loads"):
        no_tiles = x.let("no_tiles", "setp.eq.u32", frame.keys.count, 0)
        with x.unless(no_tiles, "q_load"):
            x.prefetch_maps((params.q, params.k, params.v))
            x.expect_tx(smem["q_full"], tiling.q_bytes, note="rows beyond the last come as zeros")
            for panel in range(tiling.hd // PANEL_COLUMNS):
                source = Address(params.q, 0, (panel * PANEL_COLUMNS, frame.row_origin, frame.batch_head))
                x.tma_load(smem["q"].plus(panel * TILE_M * ROW_BYTES), source, smem["q_full"])
        data = x.let("first_data", "add.u32", smem.base, smem.layout["ring"])
        key = x.let("first_load_key", "mov.b32", frame.keys.first_key)
        for index in range(tiling.stages):
            k_full, v_full = (smem[name].plus(MBARRIER_BYTES * index) for name in ("k_full", "v_full"))
            beyond = x.let("beyond", "setp.le.u32", frame.keys.count, index)
            with x.unless(beyond, "first_tile"):
                _load_tile(frame, KvStage(data, k_full, v_full), key)
            x.emit("add.u32", data, data, tiling.stage_bytes)
            x.emit("add.u32", key, key, tiling.tile_n)


def load_next(frame: Sm90FmhaFrame, cursor: KvCursor, tile: Register, key: Register) -> None:
    """Refills the stage that all threads have just read with the tile one lap later, if there is one."""
    x, tiling = frame.x, frame.tiling
    x.comment("Every warp has waited for its wgmma: the stage may be overwritten.")
    x.sync_cta()
    later = x.let("later", "add.u32", tile, tiling.stages)
    loads = x.let("loads", "setp.lt.and.u32", later, frame.keys.count, frame.is_leader)
    with x.when(loads, "refill"):
        later_key = x.let("later_key", "add.u32", key, tiling.stages * tiling.tile_n)
        _load_tile(frame, cursor.stage, later_key)


def _load_tile(frame: Sm90FmhaFrame, stage: KvStage, key: Register) -> None:
    """Loads K and V of the tile that begins at `key` into `stage`."""
    x, tiling, params = frame.x, frame.tiling, frame.params
    x.expect_tx(stage.k_full, tiling.k_bytes)
    for panel in range(tiling.hd // PANEL_COLUMNS):
        source = Address(params.k, 0, (panel * PANEL_COLUMNS, key, frame.batch_head))
        x.tma_load(at(stage.data, panel * tiling.panel_bytes), source, stage.k_full)
    x.expect_tx(stage.v_full, tiling.v_bytes)
    for panel in range(tiling.o_columns // PANEL_COLUMNS):
        column = x.let("v_column", "add.u32", frame.o_origin, panel * PANEL_COLUMNS)
        source = Address(params.v, 0, (column, key, frame.batch_head))
        x.tma_load(at(stage.data, tiling.k_bytes + panel * tiling.panel_bytes), source, stage.v_full)

"""Thread 0 brings Q once and K and V tile by tile, each into its stage of the ring, as soon as the stage is free."""

from __future__ import annotations

from dataclasses import dataclass

from backends.ptx.attention import PANEL_COLUMNS
from backends.ptx.operands import SINK, Address, Register, at
from backends.ptx.sm90_fmha.frame import Frame
from backends.ptx.sm90_fmha.geometry import ROW_BYTES, TILE_M

TMA_LOAD = "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
EXPECT = "mbarrier.arrive.expect_tx.shared::cta.b64"


@dataclass(frozen=True, slots=True)
class Stage:
    """Where the ring stands: the address of the stage's K (V lies behind it) and of its two barriers; their parity."""

    data: Register
    k_full: Register
    v_full: Register
    parity: Register
    index: Register

    @classmethod
    def first(cls, frame: Frame) -> Stage:
        """Stage 0 in its first round."""
        x, smem = frame.x, frame.geometry.smem
        return cls(
            data=x.let("stage_data", "add.u32", frame.smem, smem["ring"]),
            k_full=x.let("stage_k_full", "add.u32", frame.smem, smem["k_full"]),
            v_full=x.let("stage_v_full", "add.u32", frame.smem, smem["v_full"]),
            parity=x.let("stage_parity", "mov.b32", 0),
            index=x.let("stage_index", "mov.b32", 0),
        )

    def advance(self, frame: Frame) -> None:
        """The next stage; after the last one the first again, in the next round."""
        x, geometry = frame.x, frame.geometry
        size = geometry.k_bytes + geometry.v_bytes
        for register, step in ((self.index, 1), (self.data, size), (self.k_full, 8), (self.v_full, 8)):
            x.emit("add.u32", register, register, step)
        wraps = x.let("wraps", "setp.eq.u32", self.index, geometry.stages)
        for register, step in ((self.index, 1), (self.data, size), (self.k_full, 8), (self.v_full, 8)):
            x.emit("sub.u32", register, register, step * geometry.stages, guard=wraps)
        x.emit("xor.b32", self.parity, self.parity, 1, guard=wraps)


def load_first(frame: Frame) -> None:
    """Q, and as many tiles as there are stages. Nothing is loaded where no row sees a key."""
    x, geometry = frame.x, frame.geometry
    x.section("thread 0: the first loads")
    with x.when(frame.is_leader, "first_loads"):
        no_tiles = x.let("no_tiles", "setp.eq.u32", frame.tiles, 0)
        with x.unless(no_tiles, "q_load"):
            for tensor_map in (frame.params.q, frame.params.k, frame.params.v):
                x.emit("prefetch.tensormap", at(tensor_map))
            x.emit(EXPECT, SINK, frame.place("q_full"), geometry.q_bytes, note="rows beyond the last come as zeros")
            for panel in range(geometry.hd // PANEL_COLUMNS):
                source = Address(frame.params.q, 0, (panel * PANEL_COLUMNS, frame.row_origin, frame.batch_head))
                x.emit(TMA_LOAD, frame.place("q", panel * TILE_M * ROW_BYTES), source, frame.place("q_full"))
        data = x.let("first_data", "add.u32", frame.smem, geometry.smem["ring"])
        key = x.let("first_load_key", "mov.b32", frame.first_key)
        for stage in range(geometry.stages):
            beyond = x.let("beyond", "setp.le.u32", frame.tiles, stage)
            with x.unless(beyond, "first_tile"):
                load_tile(frame, data, frame.place("k_full", 8 * stage), frame.place("v_full", 8 * stage), key)
            x.emit("add.u32", data, data, geometry.k_bytes + geometry.v_bytes)
            x.emit("add.u32", key, key, geometry.tile_n)


def load_tile(frame: Frame, data: Register, k_full: Address, v_full: Address, key: Register) -> None:
    """K and V of the tile that begins at `key` into the stage at `data`."""
    x, geometry, params = frame.x, frame.geometry, frame.params
    x.emit(EXPECT, SINK, k_full, geometry.k_bytes)
    for panel in range(geometry.hd // PANEL_COLUMNS):
        source = Address(params.k, 0, (panel * PANEL_COLUMNS, key, frame.batch_head))
        x.emit(TMA_LOAD, at(data, panel * geometry.panel_bytes), source, k_full)
    x.emit(EXPECT, SINK, v_full, geometry.v_bytes)
    for panel in range(geometry.o_columns // PANEL_COLUMNS):
        column = x.let("v_column", "add.u32", frame.o_origin, panel * PANEL_COLUMNS)
        source = Address(params.v, 0, (column, key, frame.batch_head))
        x.emit(TMA_LOAD, at(data, geometry.k_bytes + panel * geometry.panel_bytes), source, v_full)


def load_next(frame: Frame, stage: Stage, tile: Register, key: Register) -> None:
    """Refills the stage that everybody has just read with the tile that comes a round later, if there is one."""
    x, geometry = frame.x, frame.geometry
    x.comment("Every warp has waited for its wgmma: the stage may be overwritten.")
    x.emit("bar.sync", 0)
    later = x.let("later", "add.u32", tile, geometry.stages)
    loads = x.let("loads", "setp.lt.and.u32", later, frame.tiles, frame.is_leader)
    with x.when(loads, "refill"):
        later_key = x.let("later_key", "add.u32", key, geometry.stages * geometry.tile_n)
        load_tile(frame, stage.data, at(stage.k_full), at(stage.v_full), later_key)

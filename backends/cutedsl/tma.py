# ruff: noqa: N815
# pyright: reportMissingImports=false
"""Operands for TMA: an atom with its coordinates, and the views that successive copies walk along."""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync


class TmaTensor(NamedTuple):
    """A TMA atom and the coordinates of the tensor that it copies."""

    atom: cute.CopyAtom
    coordinates: cute.Tensor


class TmaViews(NamedTuple):
    """One operand for its TMA copies: gX (copy, tile of each mode) in global memory, sX (copy, stage) in shared."""

    atom: cute.CopyAtom
    gX: cute.Tensor
    sX: cute.Tensor

    def load(self, coordinate: tuple, slot, stage: Int32 | None = None) -> None:
        """Queue the load of a tile into `stage` (None: the stage of `slot`). It arrives at the barrier of `slot`."""
        gX, sX = self.gX[None, *coordinate], self.sX[None, slot.index if stage is None else stage]
        cute.copy(self.atom, gX, sX, tma_bar_ptr=slot.barrier)


def tma_views(atom: cute.CopyAtom, gX: cute.Tensor, sX: cute.Tensor, modes: int) -> TmaViews:
    """The views of an operand whose tile is the first `modes` modes of gX and sX; the stage is the last of sX."""
    shared, coordinates = cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(sX, 0, modes), cute.group_modes(gX, 0, modes)
    )
    return TmaViews(atom, coordinates, shared)

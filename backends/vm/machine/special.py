"""Special registers such as `%tid.x` and `%cluster_ctarank`: their values when a warp starts, and launch sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from backends.vm.machine.code import LANES
from backends.vm.memory.shared import RESERVED, RESERVED_USED, SM_SHARED

if TYPE_CHECKING:
    from backends.vm.machine.warp import Warp

Dim3 = tuple[int, int, int]
SM_THREADS = 2048
SM_CTAS = 32
"""Threads and CTAs that an SM holds at once (CUDA programming guide, compute capabilities 9.0 and 10.0)."""


def ctas_of_sm(threads: int, smem: int) -> int:
    """How many CTAs an SM holds at once, each of `threads` threads and of `smem` bytes of shared memory, without the
    reserved ones. Registers are not counted."""
    return min(SM_CTAS, SM_THREADS // (-(-max(threads, 1) // LANES) * LANES), SM_SHARED // (smem + RESERVED))


@dataclass(frozen=True, slots=True)
class Place:
    """The position of a CTA: sizes and coordinates of grid, cluster and block (PTX ISA 10)."""

    grid: Dim3
    cluster: Dim3
    block: Dim3
    ctaid: Dim3
    cta_rank: int
    explicit_cluster: bool = False

    @property
    def clusterid(self) -> Dim3:
        """Coordinates of the cluster in the grid of clusters."""
        return _divide(self.ctaid, self.cluster)

    @property
    def cluster_ctaid(self) -> Dim3:
        """Coordinates of the CTA in its cluster."""
        x, y, z = (position % size for position, size in zip(self.ctaid, self.cluster, strict=True))
        return x, y, z


@dataclass(frozen=True, slots=True)
class LaunchShape:
    """The size of a launch: CTAs of the grid and of a cluster, threads of a CTA, bytes of dynamic shared memory.

    `explicit_cluster`: the launch gives the size of its clusters, or the kernel declares it. Clusters of one CTA differ
    in this from none: only in clusters an H200 has st.async and red.async (facts.md 0.1).
    """

    grid: Dim3
    block: Dim3
    cluster: Dim3
    dynamic_smem: int
    explicit_cluster: bool

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return self.block[0] * self.block[1] * self.block[2]

    @property
    def cluster_ctas(self) -> int:
        """CTAs of a cluster."""
        return self.cluster[0] * self.cluster[1] * self.cluster[2]


def _divide(a: Dim3, b: Dim3) -> Dim3:
    return a[0] // b[0], a[1] // b[1], a[2] // b[2]


RESERVED_OFFSETS = {
    "reserved_smem_offset_begin": 0, "reserved_smem_offset_end": RESERVED_USED, "reserved_smem_offset_cap": RESERVED,
    "reserved_smem_offset_0": 0, "reserved_smem_offset_1": 0,
}  # fmt: skip
"""Where the reserved shared memory lies: the values of an H200 (facts.md 0.1)."""
_AXES = ("x", "y", "z")
_UNUSED = "w"
"""The fourth component of a vector, which is always zero (PTX ISA 10.1)."""
_TRIPLES = ("tid", "ntid", "ctaid", "nctaid", "clusterid", "nclusterid", "cluster_ctaid", "cluster_nctaid")
_SINGLES = (
    "laneid", "warpid", "nwarpid", "smid", "nsmid", "gridid", "cluster_ctarank", "cluster_nctarank",
    "is_explicit_cluster", "lanemask_eq", "lanemask_le", "lanemask_lt", "lanemask_ge", "lanemask_gt",
    "dynamic_smem_size", "total_smem_size", "aggr_smem_size", *RESERVED_OFFSETS,
)  # fmt: skip
_ENVIRONMENT = tuple(f"envreg{number}" for number in range(32))
SPECIAL_REGISTERS = frozenset(
    [f"%{name}.{axis}" for name in _TRIPLES for axis in (*_AXES, _UNUSED)]
    + [f"%{name}" for name in (*_SINGLES, *_ENVIRONMENT)]
)
"""Special registers that keep one value for the whole life of a warp. Clocks are left to `mov`, which alone reads
them."""
_READ_IN_PART = {
    **{f"%{name}.{axis}": (16,) for name in _TRIPLES[:4] for axis in (*_AXES, _UNUSED)},
    "%gridid": (16, 32),
}


def reads_in_part(name: str, width: int) -> bool:
    """Whether `mov` may read the low `width` bits of a special register alone: those that were narrower once (PTX ISA
    10.1, 10.2, 10.6, 10.7, 10.10)."""
    return width in _READ_IN_PART.get(name, ())


def components(name: str) -> tuple[str, ...]:
    """The four components of a special register that is a vector, as %tid. Empty for any other."""
    return tuple(f"{name}.{axis}" for axis in (*_AXES, _UNUSED)) if name[1:] in _TRIPLES else ()


def differs(name: str) -> bool:
    """Whether special register `name` differs between the warps of a CTA."""
    return name.startswith("%tid.") or name == "%warpid"


def value(name: str, warp: Warp) -> npt.NDArray[np.uint32] | int:
    """Special register `name`: uint32 [32], or one value for all lanes."""
    base, _, axis = name[1:].partition(".")
    place = warp.cta.place
    if axis == _UNUSED:
        return 0
    if base == "tid":
        return _thread(warp.index, place.block)[_AXES.index(axis)]
    if axis:
        return _SIZES_AND_PLACES[base](place)[_AXES.index(axis)]
    if base in _OF_LANES:
        return _OF_LANES[base]
    return _single(base, warp, place)


@lru_cache(maxsize=256)
def _thread(warp: int, block: Dim3) -> tuple[npt.NDArray[np.uint32], ...]:
    linear = warp * LANES + np.arange(LANES, dtype=np.uint32)
    x, y, _ = block
    return linear % x, linear // x % y, linear // (x * y)


_SIZES_AND_PLACES: dict[str, Callable[[Place], Dim3]] = {
    "ntid": lambda place: place.block,
    "ctaid": lambda place: place.ctaid,
    "nctaid": lambda place: place.grid,
    "clusterid": lambda place: place.clusterid,
    "nclusterid": lambda place: _divide(place.grid, place.cluster),
    "cluster_ctaid": lambda place: place.cluster_ctaid,
    "cluster_nctaid": lambda place: place.cluster,
}


def _of_lanes() -> dict[str, npt.NDArray[np.uint32]]:
    lane = np.arange(LANES, dtype=np.uint64)
    here = np.uint64(1) << lane
    below, full = here - np.uint64(1), np.uint64(2**32 - 1)
    found = {
        "laneid": lane, "lanemask_eq": here, "lanemask_lt": below, "lanemask_le": below | here,
        "lanemask_gt": full & ~(below | here), "lanemask_ge": full & ~below,
    }  # fmt: skip
    made = {name: values.astype(np.uint32) for name, values in found.items()}
    for values in made.values():
        values.setflags(write=False)
    return made


_OF_LANES = _of_lanes()


def _single(base: str, warp: Warp, place: Place) -> int:
    if base in _ENVIRONMENT:
        # The ISA leaves them to the driver (10.27). cooperative_groups reads the address of the grid's barrier there.
        workspace = warp.cta.machine.grid_workspace
        return {"envreg1": workspace >> 32, "envreg2": workspace & 0xFFFF_FFFF}.get(base, 0)
    smem = warp.cta.smem
    return {
        **RESERVED_OFFSETS,
        "warpid": warp.index,
        "nwarpid": len(warp.cta.warps),
        "smid": 0,
        "nsmid": 1,
        "gridid": 0,
        "cluster_ctarank": place.cta_rank,
        "cluster_nctarank": place.cluster[0] * place.cluster[1] * place.cluster[2],
        "is_explicit_cluster": place.explicit_cluster,
        "dynamic_smem_size": smem.dynamic_size,
        "total_smem_size": smem.size,
        "aggr_smem_size": smem.size,
    }[base]

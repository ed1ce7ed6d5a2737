"""What a warp knows of the warps of other clusters: the part of a clock that only global memory can carry.

Clusters order each other through flags in global memory (PTX ISA 8.9: release and acquire patterns). A release there
carries all that its warp has seen, a relaxed access only what a fence of gpu scope has covered; what an acquire finds
is known at once, what a relaxed access finds only after such a fence. Barriers carry all three parts along.

The asynchronous proxy sees of generic writes only what a proxy fence has covered; that part of what is known of cluster
n stands under -n, the own cluster included, and travels the same ways.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Epochs = npt.NDArray[np.int64]
Snapshot = dict[int, Epochs]
"""By serial number of a cluster, what is ordered before of each of its agents; by the negative number, what of that is
visible to the asynchronous proxy. The arrays are never changed."""


def merge(into: Snapshot, other: Snapshot) -> None:
    """`into` sees everything that `other` has seen."""
    for cluster, epochs in other.items():
        mine = into.get(cluster)
        if mine is not epochs:
            into[cluster] = epochs if mine is None else np.maximum(mine, epochs)


@dataclass(slots=True)
class GridClock:
    """`known`: ordered before, of the own cluster only what the asynchronous proxy sees. `published`: what fences have
    covered, the own cluster included. `noticed`: found by relaxed accesses, and known after the next fence."""

    known: Snapshot = field(default_factory=dict[int, Epochs])
    published: Snapshot = field(default_factory=dict[int, Epochs])
    noticed: Snapshot = field(default_factory=dict[int, Epochs])

    def join(self, other: GridClock) -> None:
        """Know, have published and have noticed everything that `other` has."""
        merge(self.known, other.known)
        merge(self.published, other.published)
        merge(self.noticed, other.noticed)

    def learn(self, cluster: int, seen: Epochs, found: Snapshot) -> None:
        """Know what is in `found`; what it holds of the own `cluster` goes to `seen`."""
        merge(self.known, {number: epochs for number, epochs in found.items() if number != cluster})
        if cluster in found:
            np.maximum(seen, found[cluster], out=seen)

    def fence_proxy(self, cluster: int, seen: Epochs) -> None:
        """`fence.proxy.async` of global memory by a warp of `cluster` whose own cluster's clock is `seen`."""
        visible = {-number: epochs for number, epochs in self.known.items() if number > 0}
        self.known.update(visible)
        self.known[-cluster] = seen.copy()

    def fence(self, cluster: int, seen: Epochs) -> None:
        """A fence of gpu scope by a warp of `cluster` whose own cluster's clock is `seen`."""
        self.learn(cluster, seen, self.noticed)
        self.noticed = {}
        self.published = {**self.known, cluster: seen.copy()}

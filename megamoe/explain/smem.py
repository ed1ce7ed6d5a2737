"""Regions of shared memory: ranges of bytes that have the same writers and readers throughout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from megamoe.contract.trace import CtaTrace, SmemUse
from megamoe.explain.roles import ranges

MBARRIER_BYTES = 8
_BY = {"generic": "", "copy": "TMA, issued by ", "tensor core": "tensor core, issued by "}


@dataclass(frozen=True, slots=True)
class Region:
    """Bytes [`first`, `behind`) of the CTA's shared window, with their writers and readers in words."""

    first: int
    behind: int
    writers: tuple[str, ...]
    readers: tuple[str, ...]


def regions(cta: CtaTrace) -> list[Region]:
    """The regions that were touched, in ascending order. mbarriers are regions of their own."""
    edges = {edge for use in cta.smem for one in use.ranges for edge in one}
    for barrier in cta.mbarriers:
        edges |= {barrier.offset, barrier.offset + MBARRIER_BYTES}
    ordered = sorted(edges)
    barriers = {barrier.offset for barrier in cta.mbarriers}
    found: list[Region] = []
    for first, behind in pairwise(ordered):
        if first in barriers:
            _add(found, Region(first, behind, ("mbarriers",), ()))
            continue
        covering = [use for use in cta.smem if any(low <= first and behind <= high for low, high in use.ranges)]
        if covering:
            _add(found, Region(first, behind, _who(covering, "write"), _who(covering, "read")))
    return found


def _add(found: list[Region], region: Region) -> None:
    last = found[-1] if found else None
    if last and last.behind == region.first and (last.writers, last.readers) == (region.writers, region.readers):
        found[-1] = Region(last.first, region.behind, region.writers, region.readers)
    else:
        found.append(region)


def _who(uses: Sequence[SmemUse], verb: str) -> tuple[str, ...]:
    groups: dict[str, set[int]] = {}
    for use in uses:
        if use.verb == verb:
            groups.setdefault(use.by, set()).update(use.warps)
    return tuple(
        f"{_BY.get(by, by)}warp{'s' * (len(warps) > 1)} {ranges(sorted(warps))}" for by, warps in groups.items()
    )

"""The agents of a cluster: everything that acts on memory, numbered by its index in the cluster's vector clocks."""

from __future__ import annotations

from dataclasses import dataclass

ACCUMULATORS = 8
"""Accumulators of a CTA whose chains of MMAs are told apart; 512 columns hold four of 128."""
COPY_AGENTS = 48
CLUSTER_SHIFT = 32


@dataclass(slots=True, eq=False)
class Agents:
    """The agents of cluster number `serial` (from 1) of a launch, of `size` CTAs.

    All warps come first, by CTA rank, then the tensor cores, then copies, and last clocks.WAITED. The tensor core of a
    CTA is several agents: one for tcgen05.cp, which every later mma follows in order, then one for each accumulator.
    Copies that are waited for together, at one mbarrier or in one thread's groups, are one agent. Beyond COPY_AGENTS
    such places, agents are shared, and a missing wait can hide behind another place's wait.
    """

    serial: int
    size: int
    warps_per_cta: int
    copy_places: int = 0

    @property
    def first_engine(self) -> int:
        """The first index of a tensor core; warps come before."""
        return self.size * self.warps_per_cta

    @property
    def first_copy(self) -> int:
        """The first index of a copy; warps and tensor cores come before."""
        return self.size * (self.warps_per_cta + 1 + ACCUMULATORS)

    @property
    def count(self) -> int:
        """The length of a clock."""
        return self.first_copy + COPY_AGENTS + 1

    @property
    def mark(self) -> int:
        """`serial` where marks of global memory hold it."""
        return self.serial << CLUSTER_SHIFT

    def warp(self, rank: int, warp: int) -> int:
        """The index of warp number `warp` of the CTA of `rank`."""
        return rank * self.warps_per_cta + warp

    def tensor_core(self, rank: int) -> int:
        """The first index of a CTA's tensor core."""
        return self.first_engine + rank * (1 + ACCUMULATORS)

    def new_copy(self) -> int:
        """The index for one more place (an mbarrier, a thread) at which copies are waited for."""
        self.copy_places += 1
        return self.first_copy + (self.copy_places - 1) % COPY_AGENTS

    def name(self, agent: int) -> str:
        """How reports call an agent."""
        if agent >= self.first_copy:
            return "a copy"
        rank, index = divmod(agent, self.warps_per_cta)
        if agent >= self.first_engine:
            rank, index = (agent - self.first_engine) // (1 + ACCUMULATORS), -1
        of = f" of CTA rank {rank}" if self.size > 1 else ""
        return f"the tensor core{of}" if index < 0 else f"warp {index}{of}"

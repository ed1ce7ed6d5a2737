"""An executor whose outputs are ready before it runs, so that the time of a row is the harness's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from megamoe.contract import AnyProgram, Execution, RunOptions, Target
from megamoe.ops import reference
from megamoe.spec.load import load_specs


@dataclass(frozen=True)
class Instant:
    """Copies the simulated reference into the outputs. Computes it once a case."""

    name: str = "instant"
    device: str = "cpu"
    known: ClassVar[dict[str, Mapping[str, torch.Tensor]]] = {}
    counters: Mapping[str, int] = field(default_factory=lambda: {"instructions": 7})

    def unavailable(self, target: Target) -> str | None:
        """Always available."""
        return None

    def run(self, program: AnyProgram, tensors: Mapping[str, torch.Tensor], options: RunOptions) -> Execution:
        """Copies each output."""
        case_id = str(program.ptx)
        if case_id not in self.known:
            case = load_specs()[case_id.partition(":")[0]].parse_case(case_id)
            room = reference(case.op)
            self.known[case_id] = room.simulated(case, room.make_inputs(case))
        for name, value in self.known[case_id].items():
            tensors[name].copy_(value)
        return Execution(self.counters)


INSTANT = Instant()

"""An executor whose outputs are there before it is asked: what is left of a row's time is the harness's."""

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
    """Copies the simulated reference, which it computes once a case, into the outputs."""

    name: str = "instant"
    device: str = "cpu"
    known: ClassVar[dict[str, Mapping[str, torch.Tensor]]] = {}
    counters: Mapping[str, int] = field(default_factory=lambda: {"instructions": 7})

    def unavailable(self, target: Target) -> str | None:
        """It runs everywhere."""
        return None

    def run(self, program: AnyProgram, tensors: Mapping[str, torch.Tensor], options: RunOptions) -> Execution:
        """A copy of each output."""
        case_id = str(program.ptx)
        if case_id not in self.known:
            case = load_specs()[case_id.partition(":")[0]].parse_case(case_id)
            room = reference(case.op)
            self.known[case_id] = room.simulated(case, room.make_inputs(case))
        for name, value in self.known[case_id].items():
            tensors[name].copy_(value)
        return Execution(self.counters)


INSTANT = Instant()

"""Cases, a backend and an executor that cost nothing: ten thousand cases with instant outputs time the harness itself.

Nothing here imports torch before a row runs: collecting rows does not need it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from conformance.fakes.backends import specs
from megamoe.contract import AnyProgram, Case, Execution, Program, RunOptions, Target

if TYPE_CHECKING:
    import torch

SPEC = """\
op: many
doc: Ten thousand cases.
axes:
  n: {{type: int, min: 1, max: 1000, doc: elements}}
  m: {{type: int, min: 1, max: 1000, doc: more of them}}
tensors:
  x: {{shape: [n, m], dtype: f32}}
  y: {{shape: [n, m], dtype: f32, role: output}}
matrices:
  all: {{n: {sizes}, m: {sizes}}}
inputs: [normal]
laws: [matches_reference]
tolerance:
  cosine: {{value: 0.99, reason: none is published}}
  noise_ratio: {{value: 2.0, reason: twice the noise}}
profiles:
  smoke: {{doc: All of it., schedules: [eager], matrices: [all]}}
"""


def write_spec(folder: Path, side: int = 100) -> Path:
    """Writes a folder with one spec of side * side cases."""
    (folder / "many.yaml").write_text(SPEC.format(sizes=list(range(1, side + 1))))
    return folder


class Ready:
    """Offers every op; its programs hold only the case's id."""

    name = "ready"

    def targets(self, op: str) -> tuple[Target, ...]:
        return ("sm_100a",)

    def build(self, case: Case, target: Target) -> Program:
        return Program(target, case.id, ())


READY = Ready()


@dataclass(frozen=True)
class Instant:
    """Copies the simulated reference into the outputs, so that a row's time is the harness's own.

    It computes the reference once a case.
    """

    name: str = "instant"
    device: str = "cpu"
    known: ClassVar[dict[str, Mapping[str, torch.Tensor]]] = {}
    counters: Mapping[str, int] = field(default_factory=lambda: {"instructions": 7})

    def unavailable(self, target: Target) -> str | None:
        return None

    def run(self, program: AnyProgram, tensors: Mapping[str, torch.Tensor], options: RunOptions) -> Execution:
        from megamoe.ops import reference

        case_id = str(program.ptx)
        if case_id not in self.known:
            case = specs()[case_id.partition(":")[0]].parse_case(case_id)
            room = reference(case.op)
            self.known[case_id] = room.simulated(case, room.make_inputs(case))
        for name, value in self.known[case_id].items():
            tensors[name].copy_(value)
        return Execution(self.counters)


INSTANT = Instant()

"""Ten thousand cases, and a backend that offers every op and builds nothing, to time the collection of rows.

Nothing here imports torch: a collection does not need it.
"""

from __future__ import annotations

from pathlib import Path

from megamoe.contract import Case, Program, Target

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
    """Offers every op; its programs name the case alone."""

    name = "ready"

    def targets(self, op: str) -> tuple[Target, ...]:
        """One target for any op."""
        return ("sm_100a",)

    def build(self, case: Case, target: Target) -> Program:
        """A program that names its case."""
        return Program(target, case.id, ())


READY = Ready()

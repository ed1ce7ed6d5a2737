"""The raw-PTX backend without its first tcgen05.wait::st, in a module like a user's own."""

from __future__ import annotations

from dataclasses import replace

from backends.ptx import BACKEND as WHOLE
from megamoe.contract import Case, Program, Target

WAIT = "tcgen05.wait::st.sync.aligned;"


class BrokenPtx:
    """Builds what the ptx backend builds, with one wait left out."""

    name = "broken"

    def targets(self, op: str) -> tuple[Target, ...]:
        """Those of the ptx backend."""
        return WHOLE.targets(op)

    def build(self, case: Case, target: Target) -> Program:
        """The program of the ptx backend without the wait."""
        program = WHOLE.build(case, target)
        assert WAIT in program.ptx, "there is no wait to leave out"
        return replace(program, ptx=program.ptx.replace(WAIT, "", 1))


BACKEND = BrokenPtx()

"""After a compilation, no cache of CuTeDSL keeps its MLIR context."""

from __future__ import annotations

from typing import Any

import pytest

from backends.cutedsl.compile.compile import compiler_version
from backends.cutedsl.compile.forgotten import contexts_forgotten
from conformance.kernels.cutedsl.execution import made


def mlir() -> Any:
    """CuTeDSL's bindings of MLIR, which have no types."""
    from cutlass._mlir import ir

    return ir


def contexts() -> int:
    """How many MLIR contexts there are."""
    return mlir().Context._get_live_count()


def trace_a_little() -> None:
    """Fills caches of a function and of a property, as the tracing of a kernel does."""
    import cutlass.cute as cute
    from cutlass import Int32

    ir = mlir()
    with ir.Context(), ir.Location.unknown():
        module = ir.Module.create()
        with ir.InsertionPoint(module.body):
            layout = cute.make_layout((4, Int32(8)))
            assert cute.rank(layout.shape) == 2, "the shape has another rank"


@pytest.mark.filterwarnings("ignore")  # CuTeDSL and its imports emit warnings.
def test_a_context_ends_with_its_compilation() -> None:
    made(compiler_version)
    before = contexts()
    trace_a_little()
    assert contexts() > before, "CuTeDSL keeps no context: nothing is left to forget"
    with contexts_forgotten():
        trace_a_little()
    assert contexts() <= before, f"{contexts()} contexts after a compilation, {before} before it"

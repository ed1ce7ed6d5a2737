"""While it compiles a function, CuTeDSL does not print the module that it traces."""

from __future__ import annotations

import pytest

from backends.cutedsl.compile.compile import compiler_version
from backends.cutedsl.compile.unprinted import ENTER, modules_unprinted
from conformance.kernels.cutedsl.execution import made


class TracedModule:
    def __init__(self) -> None:
        self.body = ["a kernel"]
        self.texts = 0

    def __str__(self) -> str:
        self.texts += 1
        return "module { ... }"


class Tracer:
    """Begins a kernel like CuTeDSL."""

    def __init__(self) -> None:
        self.gpu_module = TracedModule()

    def _enter_gpu_module(self) -> object:
        if not f"GPU module: {self.gpu_module}".startswith("GPU module: "):
            raise ValueError("the log has another text")
        return self.gpu_module.body

    def begin_kernel(self) -> object:
        """Returns the result of the patched method."""
        return self._enter_gpu_module()


def test_a_kernel_begins_as_before_and_nothing_is_printed() -> None:
    tracer = Tracer()
    module, before = tracer.gpu_module, tracer.begin_kernel()
    assert module.texts == 1, "the stand-in prints nothing to begin with"
    with modules_unprinted(Tracer):
        assert tracer.begin_kernel() is before, "a kernel begins elsewhere"
        assert module.texts == 1, "the module was printed where a kernel begins"
        assert tracer.gpu_module is module, "the module is another one after a kernel has begun"
    tracer.begin_kernel()
    assert module.texts == 2, "the method is another one after the compilation"


def test_an_error_leaves_everything_as_it_was() -> None:
    tracer = Tracer()
    module, body = tracer.gpu_module, tracer.gpu_module.body
    del module.body
    with pytest.raises(AttributeError, match="body"), modules_unprinted(Tracer):
        tracer.begin_kernel()
    assert tracer.gpu_module is module, "the module is another one after an error"
    module.body = body
    tracer.begin_kernel()
    assert module.texts == 1, "the method is another one after an error"


def test_a_class_without_the_method_is_left_alone() -> None:
    before = dict(vars(TracedModule))
    with modules_unprinted(TracedModule):
        assert dict(vars(TracedModule)) == before, f"{ENTER} was added to a class that has none"


def test_cutedsl_has_the_method() -> None:
    """Without it, compilation takes longer and no other test would notice."""
    made(compiler_version)
    from cutlass.cutlass_dsl.cutlass import CutlassBaseDSL

    assert ENTER in vars(CutlassBaseDSL), f"CuTeDSL begins a kernel in another method than {ENTER}"

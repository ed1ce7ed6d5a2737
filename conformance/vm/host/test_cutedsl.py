"""Small CuTeDSL functions compiled for fake tensors and run on the VM, under both calling conventions."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Literal

import pytest
import torch

from backends.cutedsl.compile.artifact import Artifact
from backends.vm.executor import EXECUTOR
from backends.vm.host.abi import HostError
from backends.vm.host.launch_calls import COOPERATIVE
from backends.vm.host.program import map_in_place, run_host_program
from backends.vm.host.runtime import LaunchRecord
from backends.vm.machine.machine import Machine
from megamoe.contract import (
    HostArg,
    PackedFields,
    RunOptions,
    ScalarArg,
    StreamArg,
    TensorArg,
    UnsupportedError,
)

Convention = Literal["tvm_ffi", "packed"]
CONVENTIONS: tuple[Convention, ...] = ("tvm_ffi", "packed")
FIRST_DIM = PackedFields(dims=(0,))
N = 300
PDL = 6  # cudaLaunchAttributeProgrammaticStreamSerialization

pytestmark = [
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("cutlass", "tvm_ffi")),
        reason="compiling needs nvidia-cutlass-dsl and apache-tvm-ffi (the extra `cutedsl`)",
    ),
    # CuTeDSL and its imports emit warnings.
    pytest.mark.filterwarnings("ignore"),
]


@cache
def compiled(name: str) -> Artifact:
    """The artifact of host function `name` of cutedsl_kernels.py."""
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

    from backends.cutedsl.compile.compile import compile_host_function
    from conformance.vm.host import cutedsl_kernels

    n, k = cute.sym_int32(), cute.sym_int32(divisibility=64)

    def fake(dtype: type[cutlass.Numeric], *shape: int | cute.SymInt) -> object:
        order = tuple(reversed(range(len(shape))))
        return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=16)

    f32, bf16 = cutlass.Float32, cutlass.BFloat16
    arguments: dict[str, Callable[[], tuple[object, ...]]] = {
        "scale_add": lambda: (fake(f32, n), fake(f32, n), f32(1)),
        "scale_add_twice": lambda: (fake(f32, n), fake(f32, n), fake(f32, n), cutlass.Int32(1)),
        "launches_nothing": lambda: (fake(f32, n),),
        "cluster_ranks": lambda: (fake(cutlass.Int32, n),),
        "gemm": lambda: (fake(bf16, 128, k), fake(bf16, 64, k), fake(f32, 128, 64)),
    }
    function = getattr(cutedsl_kernels, name)
    return compile_host_function(function, *arguments[name](), make_fake_stream(), target="sm_100a")


def run(
    name: str, arguments: dict[str, HostArg], tensors: dict[str, torch.Tensor], convention: Convention = "tvm_ffi"
) -> dict[str, int]:
    """Calls a compiled function on tensors and returns the counters. A broken rule fails the test."""
    program = compiled(name).program({**arguments, "stream": StreamArg()}, convention=convention)
    execution = EXECUTOR.run(program, tensors, RunOptions())
    assert execution.violation is None, execution.violation
    return dict(execution.counters)


def vector(name: str, dtype: str = "f32", n: int = N) -> TensorArg:
    """A one-dimensional tensor argument with a dynamic size."""
    return TensorArg(name, dtype, (n,), packed=FIRST_DIM)


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_one_launch(convention: Convention) -> None:
    x, y = torch.linspace(-3, 3, N), torch.ones(N)
    alpha = ScalarArg("f32", 2.5)
    run("scale_add", {"x": vector("x"), "y": vector("y"), "alpha": alpha}, {"x": x, "y": y}, convention)
    torch.testing.assert_close(y, 2.5 * torch.linspace(-3, 3, N) + 1)


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_two_launches_of_one_call(convention: Convention) -> None:
    x, y, z = torch.linspace(-3, 3, N), torch.ones(N), torch.zeros(N)
    arguments: dict[str, HostArg] = {
        "x": vector("x"), "y": vector("y"), "z": vector("z"), "count": ScalarArg("s32", 3)
    }  # fmt: skip
    run("scale_add_twice", arguments, {"x": x, "y": y, "z": z}, convention)
    torch.testing.assert_close(z, 3 * (1 + 2 * x), msg="the second kernel must see the first one's writes")


def test_a_launch_that_may_begin_early_must_wait() -> None:
    artifact = compiled("scale_add_twice")
    arguments: dict[str, HostArg] = {
        "x": vector("x"), "y": vector("y"), "z": vector("z"), "count": ScalarArg("s32", 3)
    }  # fmt: skip
    program = artifact.program({**arguments, "stream": StreamArg()})
    assert program.ptx.count("griddepcontrol.wait;") == 2, "each of the two kernels waits"
    hasty = replace(program, ptx=program.ptx.replace("griddepcontrol.wait;", ""))
    violation = EXECUTOR.run(hasty, {name: torch.zeros(N) for name in "xyz"}, RunOptions()).violation
    assert violation is not None, "the second launch reads what the first writes, and nothing makes it wait"
    assert "[dependent-launch-not-awaited]" in violation, violation
    assert "of `y` is read" in violation, violation


def test_the_cluster_of_the_launch_attribute_is_used() -> None:
    ranks = torch.full((6,), -1, dtype=torch.int32)
    run("cluster_ranks", {"ranks": vector("ranks", "s32", 6)}, {"ranks": ranks})
    assert ranks.tolist() == [0, 1, 0, 1, 0, 1], "clusters of two CTAs are asked for by a launch attribute only"


@pytest.mark.parametrize("k", [64, 192])
@pytest.mark.parametrize("convention", CONVENTIONS)
def test_a_gemm_by_tma_and_tcgen05(k: int, convention: Convention) -> None:
    generator = torch.Generator().manual_seed(k)
    a = torch.randn(128, k, generator=generator).bfloat16()
    b = torch.randn(64, k, generator=generator).bfloat16()
    c = torch.full((128, 64), torch.nan)
    k_major = PackedFields(dims=(1,), strides=(0,))
    arguments: dict[str, HostArg] = {
        "a": TensorArg("a", "bf16", (128, k), packed=k_major),
        "b": TensorArg("b", "bf16", (64, k), packed=k_major),
        "c": TensorArg("c", "f32", (128, 64)),
    }
    counters = run("gemm", arguments, {"a": a, "b": b, "c": c}, convention)
    torch.testing.assert_close(c, a.float() @ b.float().T, rtol=1e-5, atol=1e-4)
    assert counters["mma_flops"] == 2 * 128 * 64 * k, "one tile of M 128, N 64 over all of K"


@pytest.mark.parametrize(
    ("y", "words"),
    [(vector("y", n=N - 4), r"y\.shape\[0\]"), (vector("y", dtype="s32"), "dtype=float32"), (None, "Tensor")],
)
def test_the_function_itself_refuses_wrong_tensors(y: HostArg, words: str) -> None:
    arguments: dict[str, HostArg] = {"x": vector("x"), "y": y, "alpha": ScalarArg("f32", 1.0)}
    with pytest.raises(HostError, match=rf"refuses its arguments: \w+: .*{words}"):
        run("scale_add", arguments, {"x": torch.zeros(N), "y": torch.zeros(N)})


def test_an_access_past_a_tensor_inside_its_memory_is_a_fault() -> None:
    held = torch.zeros(N + 64)
    arguments: dict[str, HostArg] = {"x": vector("x"), "y": vector("y", n=N - 4), "alpha": ScalarArg("f32", 1.0)}
    program = compiled("scale_add").program({**arguments, "stream": StreamArg()}, convention="packed")
    violation = EXECUTOR.run(program, {"x": torch.zeros(N), "y": held[: N - 4]}, RunOptions()).violation
    assert violation is not None, "element N - 4 of y lies outside of y"
    assert "the nearest is `y`" in violation, violation
    assert not held.any(), "nothing behind y may be written"


def test_launch_attributes_arrive() -> None:
    f32, s32 = torch.zeros(N), torch.zeros(6, dtype=torch.int32)
    tensors = {"x": f32, "y": f32.clone(), "z": f32.clone(), "ranks": s32}
    count: dict[str, HostArg] = {"x": vector("x"), "y": vector("y"), "z": vector("z"), "count": ScalarArg("s32", 1)}
    first, second = launches("scale_add_twice", count, tensors)
    (ranks,) = launches("cluster_ranks", {"ranks": vector("ranks", "s32", 6)}, tensors)
    assert (first.attributes[PDL][0], second.attributes[PDL][0]) == (0, 1), "only the second launch may start early"
    assert ranks.attributes[COOPERATIVE][0] == 1, "the launch asks to be cooperative"
    assert ranks.cluster == (2, 1, 1)


def launches(name: str, arguments: dict[str, HostArg], tensors: dict[str, torch.Tensor]) -> tuple[LaunchRecord, ...]:
    """The launches that a compiled function requests from the runtime."""
    machine = Machine()
    memory = {key: tensor.view(torch.uint8).numpy() for key, tensor in tensors.items()}
    program = compiled(name).program({**arguments, "stream": StreamArg()})
    return run_host_program(program, machine, map_in_place(machine, memory, {}))


def test_arguments_are_named_by_the_function() -> None:
    with pytest.raises(ValueError, match=r"takes \(x, y, alpha, stream\); arguments were given for \(x\)"):
        compiled("scale_add").program({"x": vector("x")})


def test_a_function_without_a_kernel_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"launches_nothing\S* launches no kernel"):
        compiled("launches_nothing")


def test_a_cubin_tells_registers_and_stack() -> None:
    resources = compiled("gemm").resources
    assert len(resources) == 1, "one kernel"
    (gemm,) = resources.values()
    assert 16 < gemm.registers <= 255, "registers a thread"
    assert gemm.stack == 0, "a kernel of this size has no reason to spill"

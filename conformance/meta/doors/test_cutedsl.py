"""megamoe.cutedsl: CuTeDSL's own marshalling on CPU tensors, host code that runs here, findings in its kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import cuda.bindings.driver as cuda
import cuda.bindings.runtime as runtime
import cutlass
import numpy as np
import pytest
import torch
from cutlass import cute
from cutlass.base_dsl.common import DSLCudaRuntimeError
from cutlass.cute.runtime import from_dlpack, make_fake_compact_tensor, make_fake_stream, make_ptr

import megamoe.cutedsl
from conformance.fakes.low_memory import low_memory
from megamoe import torch_cuda
from megamoe.vm import KernelFault, LaunchRefusedError, UnsupportedError


@cute.kernel
def axpy_kernel(x: cute.Tensor, y: cute.Tensor, a: cutlass.Float32, n: cutlass.Int32):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    i = block * 128 + thread
    if i < n:
        y[i] = a * x[i] + y[i]


@cute.jit
def axpy(x: cute.Tensor, y: cute.Tensor, a: cutlass.Float32, stream: cuda.CUstream = cuda.CUstream(0)):  # noqa: B008
    n = cute.size(x)
    axpy_kernel(x, y, a, n).launch(grid=[cute.ceil_div(n, 128), 1, 1], block=[128, 1, 1], stream=stream)


@cute.jit
def axpy_early(x: cute.Tensor, y: cute.Tensor, a: cutlass.Float32, stream: cuda.CUstream):
    n = cute.size(x)
    grid = [cute.ceil_div(n, 128), 1, 1]
    axpy_kernel(x, y, a, n).launch(grid=grid, block=[128, 1, 1], stream=stream, use_pdl=True)


@cute.jit
def beyond(x: cute.Tensor, y: cute.Tensor):
    axpy_kernel(x, y, cutlass.Float32(1), cute.size(x) + 1).launch(grid=[9, 1, 1], block=[128, 1, 1])


@cute.jit
def large_block(x: cute.Tensor):
    axpy_kernel(x, x, cutlass.Float32(1), 1).launch(grid=[1, 1, 1], block=[2048, 1, 1])


@cute.jit
def by_pointers(ptrs: tuple[cute.Pointer, cute.Pointer], n: cutlass.Int32):
    x, y = (cute.make_tensor(ptr, cute.make_layout(n)) for ptr in ptrs)
    cute.printf("by pointers, %d", n)
    axpy_kernel(x, y, cutlass.Float32(2), n).launch(grid=[cute.ceil_div(n, 128), 1, 1], block=[128, 1, 1])


class Scaled:
    """A function object, as in CUTLASS's examples."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, stream: cuda.CUstream):
        n = cute.size(x)
        axpy_kernel(x, y, cutlass.Float32(self.factor), n).launch(
            grid=[cute.ceil_div(n, 128), 1, 1], block=[128, 1, 1], stream=stream
        )


@pytest.fixture
def installed() -> Iterator[None]:
    megamoe.cutedsl.install("sm_100a")
    yield
    megamoe.cutedsl.uninstall()


def _operands(n: int = 1000) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(float(n)), torch.ones(n)


@pytest.mark.parametrize("waits", [False, True])
def test_a_launch_may_begin_before_that_of_the_call_before_has_ended(waits: bool) -> None:
    device = megamoe.cutedsl.install("sm_100a", profile="lenient")
    try:
        x, y, z = (torch.ones(256) for _ in range(3))
        axpy(*map(from_dlpack, (x, y)), 2.0)
        if waits:
            runtime.cudaDeviceSynchronize()
        axpy_early(*map(from_dlpack, (y, z)), 1.0, cuda.CUstream(0))
    finally:
        megamoe.cutedsl.uninstall()
    found = [one.rule for one in device.findings]
    assert set(found) == set(() if waits else ("dependent-launch-not-awaited",)), f"the host waits: {waits}; {found}"


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
def test_a_function_runs_on_cpu_tensors(target: str) -> None:
    x, y = _operands()
    megamoe.cutedsl.run(axpy, x, y, 3.0, target=target)
    assert torch.equal(y, 3 * x + 1)


def test_arrays_of_numpy_are_taken_and_views_too() -> None:
    x, y = np.arange(64, dtype=np.float32), np.ones(96, np.float32)
    megamoe.cutedsl.run(axpy, x, y[16:80], 3.0)
    assert y.tolist() == [1.0] * 16 + [3.0 * i + 1 for i in range(64)] + [1.0] * 16


def test_a_function_object_is_called() -> None:
    x, y = _operands(200)
    megamoe.cutedsl.run(Scaled(5), x, y, cuda.CUstream(0))
    assert torch.equal(y, 5 * x + 1)


def test_raw_pointers_in_tuples_and_printf_of_the_host(capfd: pytest.CaptureFixture[str]) -> None:
    x, y = _operands(500)
    ptrs = tuple(make_ptr(cutlass.Float32, t.data_ptr(), cute.AddressSpace.gmem, assumed_align=16) for t in (x, y))
    megamoe.cutedsl.run(by_pointers, ptrs, 300)
    assert torch.equal(y, torch.where(torch.arange(500) < 300, 2 * x + 1, 1.0))
    assert "by pointers, 300" in capfd.readouterr().out


def test_tensors_may_lie_low() -> None:
    x, y = (torch.from_numpy(low_memory(64)) for _ in range(2))
    x += 3
    megamoe.cutedsl.run(axpy, x, y, 2.0)
    assert torch.equal(y, 2 * x)


@pytest.mark.usefixtures("installed")
def test_a_compiled_function_is_called_as_on_a_device() -> None:
    x, y = _operands()
    compiled = cute.compile(axpy, *(from_dlpack(t, assumed_align=16).mark_layout_dynamic() for t in (x, y)), 1.0)
    for n in (1000, 300):
        z = torch.ones(n)
        compiled(*(from_dlpack(t, assumed_align=16).mark_layout_dynamic() for t in (x[:n], z)), 2.0)
        assert torch.equal(z, 2 * x[:n] + 1)


@pytest.mark.usefixtures("installed")
def test_a_function_of_tvm_ffi_takes_tensors_and_its_stream_from_the_environment() -> None:
    n = cute.sym_int32(divisibility=4)
    fakes = [make_fake_compact_tensor(cutlass.Float32, (n,), assumed_align=16) for _ in range(2)]
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    compiled = cute.compile(Scaled(4), *fakes, stream, options="--enable-tvm-ffi")
    x, y = _operands()
    compiled(x, y)
    assert torch.equal(y, 4 * x + 1)


@pytest.mark.usefixtures("installed")
def test_sizes_are_packed_as_wide_as_the_function_reads_them() -> None:
    for width in (cute.sym_int32, cute.sym_int64):
        fakes = [make_fake_compact_tensor(cutlass.Float32, (width(), width()), stride_order=(1, 0)) for _ in range(2)]
        compiled = cute.compile(axpy, *fakes, cutlass.Float32(1), options="--enable-tvm-ffi")
        x, y = (one.reshape(4, 250) for one in _operands())
        expected = 3 * x + y
        compiled(x, y, 3.0)
        assert torch.equal(y, expected), f"{width.__name__}: the function read another layout"


@pytest.mark.usefixtures("installed")
def test_what_is_timed_runs_once_and_takes_no_time() -> None:
    x, y = _operands()
    expected = 2 * x + y
    arguments = cutlass.testing.JitArguments(from_dlpack(x), from_dlpack(y), cutlass.Float32(2))
    compiled = cute.compile(axpy, *arguments.args)
    took = cutlass.testing.benchmark(compiled, kernel_arguments=arguments, warmup_iterations=9, iterations=9)
    assert (took, torch.equal(y, expected)) == (1.0, True), "a timed function runs once, and there is no clock"


@pytest.mark.usefixtures("installed")
def test_programs_find_a_driver() -> None:
    assert cuda.cuInit(0) == (cuda.CUresult.CUDA_SUCCESS,)
    assert cuda.cuDeviceGetCount() == (cuda.CUresult.CUDA_SUCCESS, 1)


def test_persistent_kernels_are_told_how_many_sms_there_are() -> None:
    class Info:
        def __call__(self) -> tuple[int, int]:
            info = cutlass.utils.HardwareInfo()
            return info.get_device_multiprocessor_count(), info.get_max_active_clusters(2)

    assert megamoe.cutedsl.run(Info(), sm_count=6) == (6, 3)


def test_a_broken_rule_is_a_fault() -> None:
    x, y = _operands(64)
    with pytest.raises(KernelFault, match="outside of every buffer") as caught:
        megamoe.cutedsl.run(beyond, x.clone(), y.clone())
    assert caught.value.rule == "out-of-bounds"


def test_a_launch_that_no_gpu_takes_is_refused() -> None:
    with pytest.raises(LaunchRefusedError, match="2048"):
        megamoe.cutedsl.run(large_block, torch.ones(4))
    with pytest.raises(UnsupportedError, match="sm_80"):
        megamoe.cutedsl.run(axpy, *_operands(), 1.0, target="sm_80")


def test_what_was_there_comes_back() -> None:
    from cutlass.base_dsl.jit_executor import JitCompiledFunction

    before = JitCompiledFunction.run_compiled_program
    for _ in range(2):
        megamoe.cutedsl.install("sm_90a")
    megamoe.cutedsl.uninstall()
    megamoe.cutedsl.uninstall()
    assert JitCompiledFunction.run_compiled_program is before


@pytest.mark.usefixtures("installed")
def test_a_graph_launches_at_each_replay() -> None:
    """Includes the call that compiles, with arguments that nothing else keeps alive."""
    x, y = torch.ones(300), torch.zeros(300)
    with torch_cuda.on_host("sm_90a"):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            axpy(from_dlpack(x), from_dlpack(y), cutlass.Float32(2))
            axpy(from_dlpack(x), from_dlpack(y), cutlass.Float32(3))
        assert not y.any(), "a capture launches nothing"
        graph.replay()
        graph.replay()
    assert y.tolist() == [10.0] * 300


@cute.jit
def everywhere(x: cute.Pointer, blocks: cutlass.Int32):
    tensor = cute.make_tensor(x, cute.make_layout(1))
    axpy_kernel(tensor, tensor, cutlass.Float32(1), 1).launch(grid=[blocks, 1, 1], block=[1024, 1, 1], cooperative=True)


@pytest.mark.usefixtures("installed")
def test_memory_of_the_runtime_and_its_errors() -> None:
    """cudaMalloc gives memory that kernels can reach. A cooperative launch that is too large fails as on a device."""
    _, address = runtime.cudaMalloc(4)
    runtime.cudaMemset(address, 0, 4)
    pointer = make_ptr(cutlass.Float32, address, cute.AddressSpace.gmem)
    ctypes.c_float.from_address(address).value = 1.5
    everywhere(pointer, 1)
    assert ctypes.c_float.from_address(address).value == 3, "x becomes x + x"
    with pytest.raises(DSLCudaRuntimeError) as refused:
        everywhere(pointer, 500)
    assert refused.value.error_code == runtime.cudaError_t.cudaErrorCooperativeLaunchTooLarge
    assert isinstance(refused.value, LaunchRefusedError)
    assert runtime.cudaFree(address) == (runtime.cudaError_t.cudaSuccess,)

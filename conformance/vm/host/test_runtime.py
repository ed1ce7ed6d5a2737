"""CUDA runtime behaviour for host programs: memory, streams, launches, and the message of each refusal."""

from __future__ import annotations

import struct
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.vm.executor import EXECUTOR
from backends.vm.faults import Fault, LaunchError
from backends.vm.host.abi import HostError
from backends.vm.host.object_file import ObjectFile
from backends.vm.tensor.tensor_map import decode_tensor_map
from conformance.vm.host.host_object import call, host_object, host_program
from megamoe.contract import (
    BufferArg,
    HostArg,
    Launch,
    PackedFields,
    Program,
    RunOptions,
    ScalarArg,
    StreamArg,
    TensorArg,
)

COUNT = 40
RETURN = "  ret i32 0"
LAUNCH = "call i32 @launch(ptr {data}, i32 40, i32 2, ptr {stream}, ptr null, i32 0)"
LAUNCH_ON_BUFFER = LAUNCH.format(data="%buffer", stream="%stream")


def memory() -> dict[str, npt.NDArray[np.uint32]]:
    """`data` holds 0, 1, 2, ...; `out` has the same number of bytes, all 0xFF."""
    return {"data": np.arange(COUNT, dtype=np.uint32), "out": np.full(COUNT, 0xFFFFFFFF, np.uint32)}


def ir(*lines: str) -> str:
    """A function body of these lines that returns success."""
    return "\n".join([*(f"  {line}" for line in lines), RETURN])


def test_launches_run_in_order_on_the_callers_memory() -> None:
    held = memory()
    launches = call(host_program(ir(f"%a = {LAUNCH_ON_BUFFER}", f"%b = {LAUNCH_ON_BUFFER}")), held)
    assert (held["data"] == np.arange(COUNT) + 2).all(), "each of the two launches adds one to every element"
    assert [(one.entry, one.grid, one.block, one.cluster) for one in launches] == [
        ("add_one", (2, 1, 1), (32, 1, 1), (1, 1, 1))
    ] * 2, "a launch must arrive with the sizes that the host function passed"


@pytest.mark.parametrize(
    "write", [LAUNCH_ON_BUFFER, "call i32 @_cudaMemsetAsync(ptr %buffer, i32 0, i64 4, ptr %stream)"]
)
def test_an_input_is_not_written(write: str) -> None:
    held = memory()
    with pytest.raises(Fault, match=r"\[read-only\].*`data`, which is an input"):
        call(host_program(ir(f"%a = {write}")), held, outputs=("out",))
    assert (held["data"] == np.arange(COUNT)).all(), "an input must keep its values"


WORKSPACE = (
    "%slot = alloca ptr",
    "%m = call i32 @_cudaMallocAsync(ptr %slot, i64 160, ptr %stream)",
    "%work = load ptr, ptr %slot",
    "%s = call i32 @_cudaMemsetAsync(ptr %work, i32 0, i64 160, ptr %stream)",
    "%l = " + LAUNCH.format(data="%work", stream="%stream"),
    "%c = call i32 @_cudaMemcpyAsync(ptr %out, ptr %work, i64 160, i32 3, ptr %stream)",
)
FREE = "%f = call i32 @_cudaFreeAsync(ptr %work, ptr %stream)"


def test_a_workspace_of_the_host_function_serves_a_kernel() -> None:
    held = memory()
    call(host_program(ir(*WORKSPACE, FREE)), held)
    assert (held["out"] == 1).all(), "zeroed, incremented by the kernel, and copied out"


REFUSALS = {
    "leak": (WORKSPACE, HostError, "returned without freeing 160 bytes"),
    "double free": ((*WORKSPACE, FREE, FREE.replace("%f", "%g")), HostError, "has not allocated or has freed before"),
    "use after free": (
        (*WORKSPACE, FREE, "%u = " + LAUNCH.format(data="%work", stream="%stream")),
        Fault,
        "outside of every buffer",
    ),
    "overrun": (
        ("%l = call i32 @launch(ptr %buffer, i32 41, i32 2, ptr %stream, ptr null, i32 0)",),
        Fault,
        r"outside of every buffer; the nearest is `data` \(160 bytes\)",
    ),
    "copy overrun": (
        ("%c = call i32 @_cudaMemcpyAsync(ptr %out, ptr %buffer, i64 164, i32 3, ptr %stream)",),
        Fault,
        "the source of cudaMemcpy of 164 bytes is outside",
    ),
    "unknown stream": (
        ("%l = " + LAUNCH.format(data="%buffer", stream="inttoptr (i64 4660 to ptr)"),),
        HostError,
        "the launch of add_one names the stream 0x1234",
    ),
    "stream after its end": (
        (
            "%slot = alloca ptr",
            "%m = call i32 @_cudaStreamCreate(ptr %slot)",
            "%mine = load ptr, ptr %slot",
            "%d = call i32 @_cudaStreamDestroy(ptr %mine)",
            "%l = " + LAUNCH.format(data="%buffer", stream="%mine"),
        ),
        HostError,
        "which was neither passed nor created",
    ),
    "unknown launch attribute": (
        (
            "%list = alloca [72 x i8]",
            "store i32 77, ptr %list",
            "%l = call i32 @launch(ptr %buffer, i32 40, i32 2, ptr %stream, ptr %list, i32 1)",
        ),
        LaunchError,
        "add_one: launch attribute 77",
    ),
    "another configuration layout": (
        ("%l = call i32 @launch(ptr %buffer, i32 40, i32 2, ptr %stream, ptr %buffer, i32 70000)",),
        HostError,
        "has 70000 attributes.*another layout",
    ),
    "attributes nowhere": (
        (
            "%l = call i32 @launch(ptr %buffer, i32 40, i32 2, ptr %stream, ptr inttoptr (i64 8 to ptr), i32 1)",
        ),
        HostError,
        "launch attribute 0 of add_one points to 0x8",
    ),
    "too large a grid for a cooperative launch": (
        (
            "%list = alloca [72 x i8]",
            "store i32 2, ptr %list",
            "%value = getelementptr i8, ptr %list, i64 8",
            "store i32 1, ptr %value",
            "%l = call i32 @launch(ptr %buffer, i32 40, i32 100000, ptr %stream, ptr %list, i32 1)",
        ),
        LaunchError,
        "a cooperative launch of 100000 CTAs, of which only 4224 fit",
    ),
    "much shared memory without opting in": (
        ("%l = call i32 @launch_smem(ptr %buffer, i32 40, i32 2, ptr %stream, ptr null, i32 0, i64 49153)",),
        LaunchError,
        "49153 bytes of dynamic shared memory, where 49152 are allowed",
    ),
    "a cluster of 16 without opting in": (
        (
            "%list = alloca [72 x i8]",
            "store i32 4, ptr %list",
            "%value = getelementptr i8, ptr %list, i64 8",
            "store [3 x i32] [i32 16, i32 1, i32 1], ptr %value",
            "%l = call i32 @launch(ptr %buffer, i32 40, i32 16, ptr %stream, ptr %list, i32 1)",
        ),
        LaunchError,
        "clusters of 16 CTAs; 8 are possible everywhere",
    ),
    "an unknown device attribute": (
        ("%v = alloca i32", "%a = call i32 @_cudaDeviceGetAttribute(ptr %v, i32 4711, i32 0)"),
        HostError,
        "device attribute 4711",
    ),
    "an unknown symbol": (
        ("%a = call i32 @_cudaNotOfThisWorld(i32 1)",),
        HostError,
        "compiled by a test 0.1, calls _cudaNotOfThisWorld",
    ),
    "an assertion of success": (
        ("call void @cuda_dialect_assert_success(i32 700)",),
        HostError,
        "returned error 700",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_a_wrong_call_is_named(name: str) -> None:
    lines, kind, words = REFUSALS[name]
    with pytest.raises(kind, match=words):
        call(host_program(ir(*lines)), memory())


@pytest.mark.parametrize("opted_in", [False, True])
def test_a_cluster_that_the_kernel_declares_needs_opting_in_too(opted_in: bool) -> None:
    held = memory()
    opt_in = ("%a = call i32 @opt_in(i32 14, i32 1)",) if opted_in else ()
    lines = "%l = call i32 @launch(ptr %buffer, i32 40, i32 16, ptr %stream, ptr null, i32 0)"
    program = host_program(ir(*opt_in, lines))
    program = replace(
        program, ptx=program.ptx.replace(".param .u32 count)", ".param .u32 count) .reqnctapercluster 16")
    )
    if opted_in:
        call(program, held)
        assert (held["data"] == np.arange(COUNT) + 1).all()
    else:
        with pytest.raises(LaunchError, match="clusters of 16 CTAs; 8 are possible everywhere") as refused:
            call(program, held)
        assert refused.value.cuda_error == 912, "cudaErrorInvalidClusterSize, as on an H200"


def test_opting_in_makes_the_launch_legal() -> None:
    held = memory()
    lines = (
        "%a = call i32 @opt_in(i32 8, i32 100000)",
        "%l = call i32 @launch_smem(ptr %buffer, i32 40, i32 2, ptr %stream, ptr null, i32 0, i64 100000)",
    )
    call(host_program(ir(*lines)), held)
    assert (held["data"] == np.arange(COUNT) + 1).all()


def test_more_shared_memory_than_there_is_cannot_be_opted_in_to() -> None:
    with pytest.raises(HostError, match=r"returned error 1$"):
        call(host_program("  %a = call i32 @opt_in(i32 8, i32 232449)\n  ret i32 %a"), memory())


def test_the_c_library_serves_calls_of_the_compiler() -> None:
    held = memory()
    lines = ("%host = alloca [160 x i8]", "%a = call ptr @memcpy(ptr %out, ptr %buffer, i64 160)")
    call(host_program(ir(*lines)), held)
    assert (held["out"] == np.arange(COUNT)).all(), "host code, too, finds device memory at its real address"


def test_nothing_runs_after_an_error() -> None:
    held = memory()
    lost = "%a = " + LAUNCH.format(data="%buffer", stream="inttoptr (i64 4660 to ptr)")
    with pytest.raises(HostError, match="0x1234"):
        call(host_program(ir(lost, f"%b = {LAUNCH_ON_BUFFER}")), held)
    assert (held["data"] == np.arange(COUNT)).all(), "a launch after a failed call must not be performed"


def test_an_error_code_of_the_host_function_is_reported() -> None:
    with pytest.raises(HostError, match="returned error 35"):
        call(host_program("  ret i32 35"), memory())


def test_host_memory_copies_both_ways() -> None:
    held = memory()
    lines = (
        "%host = alloca [160 x i8]",
        "%a = call i32 @_cudaMemcpyAsync(ptr %host, ptr %buffer, i64 160, i32 2, ptr %stream)",
        "%b = call i32 @_cudaMemcpyAsync(ptr %out, ptr %host, i64 160, i32 4, ptr %stream)",
    )
    call(host_program(ir(*lines)), held)
    assert (held["out"] == np.arange(COUNT)).all(), "device to host, then host to device by address"


def test_streams_and_events_exist_once_created() -> None:
    lines = (
        "%s = alloca ptr", "%e = alloca ptr",
        "%a = call i32 @_cudaStreamCreate(ptr %s)", "%b = call i32 @_cudaEventCreate(ptr %e)",
        "%mine = load ptr, ptr %s", "%event = load ptr, ptr %e",
        f"%l = {LAUNCH_ON_BUFFER}",
        "%c = call i32 @_cudaEventRecord(ptr %event, ptr %stream)",
        "%d = call i32 @_cudaStreamWaitEvent(ptr %mine, ptr %event)",
        "%m = " + LAUNCH.format(data="%buffer", stream="%mine"),
        "%f = call i32 @_cudaStreamDestroy(ptr %mine)",
    )  # fmt: skip
    held = memory()
    launches = call(host_program(ir(*lines)), held)
    assert (held["data"] == np.arange(COUNT) + 2).all()
    assert launches[0].stream != launches[1].stream, "the created stream is another one than the caller's"


@pytest.mark.parametrize(("attribute", "value"), [(97, 232448), (16, 132), (75, 9), (10, 32)])
def test_the_device_is_an_h200(attribute: int, value: int) -> None:
    held = memory()
    lines = (
        "%v = alloca i32",
        f"%a = call i32 @_cudaDeviceGetAttribute(ptr %v, i32 {attribute}, i32 0)",
        "%b = call i32 @_cudaMemcpyAsync(ptr %out, ptr %v, i64 4, i32 1, ptr %stream)",
    )
    call(host_program(ir(*lines)), held)
    assert held["out"][0] == value, f"cudaDeviceAttr {attribute} of an sm_90a device"


def encode(box: int, swizzle: int = 3) -> tuple[str, ...]:
    """IR that encodes a map of `buffer` as [rows 5, columns 8] u32 and stores it in `out`."""
    return (
        "%map = alloca [128 x i8], align 64",
        "%dims = alloca [2 x i64]", "store [2 x i64] [i64 8, i64 5], ptr %dims",
        "%strides = alloca i64", "store i64 32, ptr %strides",
        "%box = alloca [2 x i32]", f"store [2 x i32] [i32 {box}, i32 2], ptr %box",
        "%steps = alloca [2 x i32]", "store [2 x i32] [i32 1, i32 1], ptr %steps",
        "%e = call i32 @_cuTensorMapEncodeTiled(ptr %map, i32 2, i32 2, ptr %buffer, ptr %dims, ptr %strides, "
        f"ptr %box, ptr %steps, i32 0, i32 {swizzle}, i32 2, i32 0)",
        "%c = call i32 @_cudaMemcpyAsync(ptr %out, ptr %map, i64 128, i32 1, ptr %stream)",
    )  # fmt: skip


def test_tensor_maps_hold_the_real_address() -> None:
    raw = np.zeros(COUNT + 4, np.uint32)
    start = (-raw.ctypes.data % 16) // 4
    held = {**memory(), "data": raw[start : start + COUNT]}
    call(host_program(ir(*encode(box=8))), held)
    found = decode_tensor_map(held["out"].tobytes()[:128])
    assert found.address == held["data"].ctypes.data, "kernels work on the caller's memory, so maps name its address"
    assert (found.element.name, found.dims, found.strides, found.box) == ("u32", (8, 5), (32,), (8, 2))


@pytest.mark.parametrize(
    ("box", "swizzle", "words"), [(300, 3, "300; 1 to 256"), (8, 1, None), (16, 1, "wider than"), (8, 9, "swizzle 9")]
)
def test_maps_that_the_driver_refuses_are_refused(box: int, swizzle: int, words: str | None) -> None:
    program = host_program(ir(*encode(box, swizzle)))
    raw = np.zeros(COUNT + 4, np.uint32)
    start = (-raw.ctypes.data % 16) // 4
    held = {**memory(), "data": raw[start : start + COUNT]}
    if words is None:
        call(program, held)
    else:
        with pytest.raises(HostError, match=words):
            call(program, held)


def test_an_object_of_another_format_is_refused() -> None:
    with pytest.raises(HostError, match=r"has format '9\.9'; the VM knows '1\.1'"):
        call(host_program(ir(), version="9.9"), memory())


def test_a_missing_entry_is_refused_with_those_that_exist() -> None:
    with pytest.raises(HostError, match=r"has no entry 'run'; its entries are: _mlir_test__mlir_ciface_run"):
        call(replace(host_program(ir()), entry="run"), memory())


def test_a_kernel_that_the_ptx_lacks_is_named() -> None:
    program = host_program(ir())
    with pytest.raises(LaunchError, match="no entry 'add_one'; its entries are: add_two"):
        call(replace(program, ptx=program.ptx.replace("add_one", "add_two")), memory())


OBJECT = host_object(ir())


@given(st.integers(0, len(OBJECT) - 1))
def test_an_object_cut_short_is_refused(length: int) -> None:
    with pytest.raises(HostError, match=r"damaged|no ELF file"):
        ObjectFile(OBJECT[:length])


def test_an_object_for_another_processor_is_refused() -> None:
    other = OBJECT[:18] + struct.pack("<H", 243) + OBJECT[20:]
    with pytest.raises(HostError, match=r"ELF machine 243; this processor .* compile it on this machine"):
        ObjectFile(other)


@pytest.mark.parametrize(
    ("arg", "words"),
    [
        (BufferArg("nowhere"), "'nowhere', which was not given"),
        (BufferArg("data", 164), "offset 164 lies outside"),
        (TensorArg("data", "u32", (COUNT + 1,)), "reaches to byte 164 of a tensor of 160 bytes"),
        (TensorArg("data", "u32", (4, 4), (1,)), "do not go together"),
        (TensorArg("data", "u31", (4,)), "dtype 'u31'"),
        (TensorArg("data", "u32", (4,), packed=PackedFields((0,), dim_bits=16)), "integers of 16 bits"),
        (ScalarArg("u8", 256), "256 does not fit a scalar argument of u8"),
        (ScalarArg("u9", 1), "dtype 'u9'"),
    ],
)
def test_an_argument_that_does_not_fit_is_named(arg: HostArg, words: str) -> None:
    program = host_program(ir())
    with pytest.raises(HostError, match=words):
        call(replace(program, args=(arg, BufferArg("out"), StreamArg())), memory())


def test_tensors_that_share_memory_are_refused() -> None:
    data = np.zeros(COUNT, np.uint32)
    with pytest.raises(HostError, match="'data' and 'out' share memory"):
        call(host_program(ir()), {"data": data, "out": data[4:]})


@pytest.mark.parametrize("arg", [ScalarArg("u8", 256), ScalarArg("u9", 1)])
def test_a_scalar_of_a_launch_that_does_not_fit_is_named(arg: ScalarArg) -> None:
    ptx = ".version 8.0\n.target sm_90a\n.address_size 64\n.visible .entry k(.param .u8 a) { ret; }"
    program = Program("sm_90a", ptx, (Launch("k", (1, 1, 1), (32, 1, 1), (arg,)),))
    with pytest.raises(HostError, match=f"scalar argument of .*{arg.dtype}"):
        EXECUTOR.run(program, {}, RunOptions())

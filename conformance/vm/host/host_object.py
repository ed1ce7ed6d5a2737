"""Host objects from LLVM IR: host functions with a few calls each, one for every runtime call under test.

They follow the packed convention. The function body can use %arg0, %arg1, ... (the addresses of its arguments), %buffer
(the first argument's value, a device address) and the calls declared in DECLARATIONS. It must end by `ret`-urning a
code.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import llvmlite.binding as llvm
import numpy as np
import numpy.typing as npt

from backends.vm.host.program import map_in_place, run_host_program
from backends.vm.host.runtime import LaunchRecord
from backends.vm.machine.machine import Machine
from megamoe.contract import BufferArg, HostArg, HostProgram, StreamArg

ENTRY = "_mlir_test__mlir_ciface_run"

PTX = """
.version 8.0
.target sm_90a
.address_size 64
.visible .entry add_one(.param .u64 data, .param .u32 count)
{
  .reg .b32 %r<6>; .reg .b64 %rd<4>; .reg .pred %p<2>;
  ld.param.u64 %rd1, [data];
  ld.param.u32 %r1, [count];
  mov.u32 %r2, %tid.x;
  mov.u32 %r5, %ctaid.x;
  mad.lo.s32 %r2, %r5, 32, %r2;
  setp.ge.u32 %p1, %r2, %r1;
  @%p1 bra DONE;
  mul.wide.u32 %rd2, %r2, 4;
  add.s64 %rd3, %rd1, %rd2;
  ld.global.u32 %r3, [%rd3];
  add.s32 %r4, %r3, 1;
  st.global.u32 [%rd3], %r4;
DONE:
  ret;
}
"""

DECLARATIONS = """
declare i32 @_cudaLibraryLoadData(ptr, ptr, ptr, ptr, i32, ptr, ptr, i32)
declare i32 @_cudaLibraryGetKernel(ptr, ptr, ptr)
declare i32 @_cudaLaunchKernelEx(ptr, ptr, ptr)
declare i32 @_cudaMallocAsync(ptr, i64, ptr)
declare i32 @_cudaFreeAsync(ptr, ptr)
declare i32 @_cudaMemsetAsync(ptr, i32, i64, ptr)
declare i32 @_cudaMemcpyAsync(ptr, ptr, i64, i32, ptr)
declare i32 @_cudaDeviceGetAttribute(ptr, i32, i32)
declare i32 @_cudaFuncSetAttribute(ptr, i32, i32)
declare i32 @_cudaStreamCreate(ptr)
declare i32 @_cudaStreamDestroy(ptr)
declare i32 @_cudaStreamWaitEvent(ptr, ptr)
declare i32 @_cudaEventCreate(ptr)
declare i32 @_cudaEventRecord(ptr, ptr)
declare i32 @_cuTensorMapEncodeTiled(ptr, i32, i32, ptr, ptr, ptr, ptr, ptr, i32, i32, i32, i32)
declare i32 @_cudaNotOfThisWorld(i32)
declare void @cuda_dialect_assert_success(i32)
declare ptr @memcpy(ptr, ptr, i64)
"""

_FRAME = """
@image = private constant [4 x i8] c"\\50\\ED\\55\\BA"
@name = private constant [8 x i8] c"add_one\\00"
@kernel = private global ptr null
@test_version = global [4 x i8] c"%(version)s\\00"

define void @_mlir_test_cuda_init(ptr %%slots) {
  %%slot = load ptr, ptr %%slots
  %%library = load ptr, ptr %%slot
  %%code = call i32 @_cudaLibraryLoadData(ptr %%library, ptr @image, ptr null, ptr null, i32 0, ptr null,
      ptr null, i32 0)
  ret void
}

define void @_mlir_test_cuda_load_to_device(ptr %%slots) {
  %%slot = load ptr, ptr %%slots
  %%place = load ptr, ptr %%slot
  %%library = load ptr, ptr %%place
  %%code = call i32 @_cudaLibraryGetKernel(ptr @kernel, ptr %%library, ptr @name)
  ret void
}

; add_one(data, count) on `ctas` blocks of 32 threads, with `attributes` (72 bytes each).
define i32 @launch(ptr %%data, i32 %%count, i32 %%ctas, ptr %%stream, ptr %%attributes, i32 %%attribute_count) {
  %%code = call i32 @launch_smem(ptr %%data, i32 %%count, i32 %%ctas, ptr %%stream, ptr %%attributes,
      i32 %%attribute_count, i64 0)
  ret i32 %%code
}

define i32 @opt_in(i32 %%attribute, i32 %%value) {
  %%handle = load ptr, ptr @kernel
  %%code = call i32 @_cudaFuncSetAttribute(ptr %%handle, i32 %%attribute, i32 %%value)
  ret i32 %%code
}

define i32 @launch_smem(ptr %%data, i32 %%count, i32 %%ctas, ptr %%stream, ptr %%attributes, i32 %%attribute_count,
    i64 %%smem) {
  %%config = alloca [56 x i8], align 8
  call void @llvm.memset.p0.i64(ptr %%config, i8 0, i64 56, i1 false)
  store i32 %%ctas, ptr %%config
  %%gy = getelementptr i8, ptr %%config, i64 4
  store i32 1, ptr %%gy
  %%gz = getelementptr i8, ptr %%config, i64 8
  store i32 1, ptr %%gz
  %%bx = getelementptr i8, ptr %%config, i64 12
  store i32 32, ptr %%bx
  %%by = getelementptr i8, ptr %%config, i64 16
  store i32 1, ptr %%by
  %%bz = getelementptr i8, ptr %%config, i64 20
  store i32 1, ptr %%bz
  %%m = getelementptr i8, ptr %%config, i64 24
  store i64 %%smem, ptr %%m
  %%s = getelementptr i8, ptr %%config, i64 32
  store ptr %%stream, ptr %%s
  %%a = getelementptr i8, ptr %%config, i64 40
  store ptr %%attributes, ptr %%a
  %%n = getelementptr i8, ptr %%config, i64 48
  store i32 %%attribute_count, ptr %%n
  %%p0 = alloca ptr
  store ptr %%data, ptr %%p0
  %%p1 = alloca i32
  store i32 %%count, ptr %%p1
  %%params = alloca [2 x ptr]
  store ptr %%p0, ptr %%params
  %%second = getelementptr i8, ptr %%params, i64 8
  store ptr %%p1, ptr %%second
  %%handle = load ptr, ptr @kernel
  %%code = call i32 @_cudaLaunchKernelEx(ptr %%config, ptr %%handle, ptr %%params)
  ret i32 %%code
}
declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)

define i32 @body(ptr %%buffer, ptr %%out, ptr %%stream) {
%(body)s
}

define void @_mlir_test__mlir_ciface_run(ptr %%slots, i32 %%count) {
  %%arg0 = load ptr, ptr %%slots
  %%buffer = load ptr, ptr %%arg0
  %%slot1 = getelementptr ptr, ptr %%slots, i64 1
  %%arg1 = load ptr, ptr %%slot1
  %%out = load ptr, ptr %%arg1
  %%slot2 = getelementptr ptr, ptr %%slots, i64 2
  %%arg2 = load ptr, ptr %%slot2
  %%stream = load ptr, ptr %%arg2
  %%slot3 = getelementptr ptr, ptr %%slots, i64 3
  %%result = load ptr, ptr %%slot3
  %%code = call i32 @body(ptr %%buffer, ptr %%out, ptr %%stream)
  store i32 %%code, ptr %%result
  ret void
}
"""


def host_object(body: str, *, version: str = "1.1") -> bytes:
    """The relocatable object of a host function whose body, in LLVM IR, returns a CUDA error code."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    module = llvm.parse_assembly(DECLARATIONS + _FRAME % {"body": body, "version": version})
    module.verify()
    machine = llvm.Target.from_default_triple().create_target_machine(codemodel="large", reloc="pic")
    return machine.emit_object(module)


def host_program(body: str, *, version: str = "1.1") -> HostProgram:
    """A program that passes (address of `data`, address of `out`, stream) to the function with this body."""
    args: Sequence[HostArg] = (BufferArg("data"), BufferArg("out"), StreamArg())
    return HostProgram(
        "sm_90a", PTX, host_object(body, version=version), ENTRY, tuple(args), "packed", {}, "a test 0.1"
    )


def call(
    program: HostProgram, memory: Mapping[str, npt.NDArray[np.uint32]], outputs: Collection[str] | None = None
) -> tuple[LaunchRecord, ...]:
    """Runs `program` on uint32 arrays, in place. If `outputs` is given, it may write only those arrays."""
    machine = Machine()
    places = {name: array.view(np.uint8) for name, array in memory.items()}
    return run_host_program(program, machine, map_in_place(machine, places, program.scratch, outputs))

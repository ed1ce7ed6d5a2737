"""Runtime calls by which compiled code reports an error, and the stream that TVM FFI functions ask for."""

from __future__ import annotations

import struct

from backends.vm.host.abi import DEVICE_CUDA, copy_from
from backends.vm.host.host_error import HostError
from backends.vm.host.runtime import GIVEN_STREAM, Runtime
from backends.vm.host.symbols import INT, POINTER, STRING, answers

_LONGEST = 4096


@answers("TVMFFIErrorSetRaisedFromCStr", STRING, STRING, result=None)
def set_raised(runtime: Runtime, kind: bytes, message: bytes) -> None:
    """The host function refuses its arguments."""
    runtime.refusal = f"{_text(kind)}: {_text(message)}"


@answers("TVMFFIErrorSetRaisedFromCStrParts", STRING, POINTER, INT, result=None)
def set_raised_from_parts(runtime: Runtime, kind: bytes, parts: int, count: int) -> None:
    """As above, with the message in pieces."""
    pointers = struct.unpack(f"<{count}Q", copy_from(parts, 8 * count, "the parts of an error message"))
    runtime.refusal = f"{_text(kind)}: {''.join(_string(pointer) for pointer in pointers if pointer)}"


@answers("TVMFFIEnvGetStream", INT, INT, result=POINTER)
def env_get_stream(runtime: Runtime, device_type: int, device: int) -> int:
    """The stream of the caller's environment."""
    if device_type != DEVICE_CUDA:
        raise HostError(
            f"the host function asks for a stream of device type {device_type}, where only CUDA's ({DEVICE_CUDA}) exist"
        )
    return GIVEN_STREAM


@answers("CuteDSLRT_TVMFFISetRaisedCudaError", POINTER, INT, result=None)
def set_raised_cuda_error(runtime: Runtime, set_error: int, code: int) -> None:
    """A runtime call has failed."""
    runtime.refusal = f"CUDA error {code}"


@answers(
    "CuteDSLRT_TVMFFISetRaisedCudaLaunchError",
    POINTER, INT, INT, INT, INT, INT, INT, INT, POINTER, INT, INT, INT, INT, INT, INT, INT, INT, INT, INT, STRING,
    STRING, INT, INT, INT,
    result=None,
)  # fmt: skip
def set_raised_launch_error(runtime: Runtime, set_error: int, *values: int | bytes) -> None:
    """The launch's own check, compiled in front of it, has found sizes that the device does not take."""
    violation = values[18]
    runtime.refusal = (
        f"a launch of grid {values[0:3]}, block {values[3:6]} and {values[7]} bytes of dynamic smem is refused: "
        f"{_text(violation) if isinstance(violation, bytes) else violation}"
    )


@answers("cuda_dialect_assert_success", INT, result=None)
def assert_success(runtime: Runtime, code: int) -> None:
    """CuTeDSL's runtime ends the process here."""
    if code:
        raise HostError(f"the host function asserts that a CUDA call has succeeded, which returned error {code}")


@answers("cuda_dialect_print_on_error", INT, result=None)
def print_on_error(runtime: Runtime, code: int) -> None:
    """CuTeDSL's runtime prints here and goes on."""
    assert_success(runtime, code)


@answers("cuda_dialect_get_error_name", INT, result=POINTER)
def get_error_name(runtime: Runtime, code: int) -> int:
    """Called only after an error, which ends the call."""
    raise HostError(f"the host function asks for the name of CUDA error {code}")


def _text(raw: bytes | None) -> str:
    return "" if raw is None else raw.decode(errors="replace")


def _string(address: int) -> str:
    pieces: list[bytes] = []
    for at in range(address, address + _LONGEST):
        one = copy_from(at, 1, "a part of an error message")
        if one == b"\0":
            break
        pieces.append(one)
    return b"".join(pieces).decode(errors="replace")

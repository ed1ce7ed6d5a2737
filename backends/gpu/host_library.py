"""A compiled host object made a shared library: linked against CuTeDSL's runtime and TVM FFI, and opened."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from functools import cache
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Final

from megamoe.contract import DeviceError, UnsupportedError

RUNTIME: Final = "libcute_dsl_runtime.so"
FFI: Final = "libtvm_ffi.so"
# The wheel for CUDA 13 first: an installation may hold both.
_DISTRIBUTIONS: Final = {
    RUNTIME: ("nvidia-cutlass-dsl-libs-cu13", "nvidia-cutlass-dsl-libs-cu12", "nvidia-cutlass-dsl-libs-base"),
    FFI: ("apache-tvm-ffi",),
}
LINKERS: Final = ("cc", "gcc", "clang")
LINK_SECONDS: Final = 60


@cache
def shared_library(host_object: bytes) -> ctypes.CDLL:
    """`host_object` linked and opened, once a process: what it loads on the device stays until the process ends.

    UnsupportedError without the libraries or a linker, DeviceError if the object cannot be linked.
    """
    linker = next((path for name in LINKERS if (path := shutil.which(name))), None)
    if linker is None:
        raise UnsupportedError(f"linking a host program needs a C compiler; none of {', '.join(LINKERS)} is on PATH")
    libraries = [runtime_library(RUNTIME), runtime_library(FFI)]
    with tempfile.TemporaryDirectory(prefix="megamoe-host-") as folder:
        source, library = Path(folder, "host.o"), Path(folder, "host.so")
        source.write_bytes(host_object)
        rpath = [f"-Wl,-rpath,{path.parent}" for path in libraries]
        command = [linker, "-shared", "-o", str(library), str(source), *map(str, libraries), *rpath]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=LINK_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            raise DeviceError(f"{linker} was still linking the host object after {LINK_SECONDS} s") from None
        if done.returncode:
            raise DeviceError(f"{linker} cannot link the host object (status {done.returncode}): {done.stderr.strip()}")
        try:
            return ctypes.CDLL(str(library))
        except OSError as error:
            raise DeviceError(f"the linked host object cannot be opened: {error}") from error


@cache
def runtime_library(name: str) -> Path:
    """The path of a library that a host object calls. UnsupportedError if no wheel that has it is installed."""
    for package in _DISTRIBUTIONS[name]:
        for file in _files(package):
            if file.name == name and "stubs" not in file.parts:
                return file
    raise UnsupportedError(
        f"a host program needs {name}, which none of {', '.join(_DISTRIBUTIONS[name])} has here: "
        f"install the extra `cutedsl` of megamoe"
    )


def _files(package: str) -> list[Path]:
    try:
        found: Distribution = distribution(package)
    except PackageNotFoundError:
        return []
    return [path for file in found.files or () if (path := Path(str(found.locate_file(file)))).is_file()]

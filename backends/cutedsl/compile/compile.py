"""Compile a CuTeDSL host function for a target, on a machine that needs no GPU."""

from __future__ import annotations

import inspect
import platform
import warnings
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Final, Protocol, cast

from backends.cutedsl.compile.artifact import Artifact, kernel_resources
from backends.cutedsl.compile.artifact_cache import ArtifactKey, cached_artifact, imported
from backends.cutedsl.compile.forgotten import contexts_forgotten
from backends.cutedsl.compile.unprinted import modules_unprinted
from megamoe.contract import Target, UnsupportedError
from megamoe.contract.cache import user_cache
from megamoe.contract.scratch import scratch_folder

DISTRIBUTIONS: Final = ("nvidia-cutlass-dsl", "apache-tvm-ffi")
PREFIX: Final = "megamoe"
# Plain x86-64: an artifact must run on every machine that shares the cache, not only where it was compiled.
_TRIPLES: Final = {"x86_64": "x86_64-unknown-linux-gnu"}


class _ExecutionArgs(Protocol):
    signature: inspect.Signature


class _Compiled(Protocol):
    """The part of cute.compile's result that we use."""

    function_name: str
    execution_args: _ExecutionArgs

    @property
    def __ptx__(self) -> str | bytes | None: ...
    @property
    def __cubin__(self) -> str | bytes | None: ...
    def dump_to_object(self, function_prefix: str) -> bytes:
        """The relocatable object; its symbols begin with the prefix."""
        ...


def compiler_version() -> str:
    """Names and versions of the compiler's packages, without importing them. UnsupportedError if one is missing."""
    try:
        return ", ".join(f"{name} {metadata.version(name)}" for name in DISTRIBUTIONS)
    except metadata.PackageNotFoundError as missing:
        raise UnsupportedError(
            f"compiling CuTeDSL kernels needs the package {missing.name}, which is not installed; "
            f"the extra `cutedsl` of megamoe has it"
        ) from None


def compiled_kernel(
    kernel: str, target: Target, options: Mapping[str, str | int], build: Callable[[], Artifact], name: str = ""
) -> Artifact:
    """The artifact of `kernel`, a folder of backends/cutedsl, from the user's cache if it is there, else from `build`.

    `options`: all constants that are compiled in. `name`: the function, if the kernel has several; empty: the folder.
    UnsupportedError if CuTeDSL is not installed.
    """
    key = ArtifactKey(name or kernel, imported(kernel), options, target, compiler_version())
    return cached_artifact(key, build, user_cache("cutedsl"))


def compile_host_function(
    function: Callable[..., object], *args: object, target: Target, options: str = "", **named_args: object
) -> Artifact:
    """Compile `function` (a cute.jit function, or an object whose __call__ is one) and the kernels it launches.

    `args` and `named_args` are fake tensors, numbers, streams (cutlass.cute.runtime.make_fake_*) and constants;
    `options` are added to those of cute.compile. Errors of CuTeDSL pass through. UnsupportedError if CuTeDSL is not
    installed.
    """
    compiler = compiler_version()
    import cutlass.cute as cute
    from cutlass.cutlass_dsl.cutlass import CutlassBaseDSL

    with (
        scratch_folder("cutedsl") as folder,
        contexts_forgotten(),
        modules_unprinted(CutlassBaseDSL),
        warnings.catch_warnings(),
    ):
        # Long static loops are intended: registers cannot be indexed at run time. If warnings are errors, CuTeDSL
        # would turn this one into an unrelated error.
        warnings.filterwarnings("ignore", message="This static loop has")
        kept = f"--gpu-arch {target} --keep-ptx --keep-cubin --dump-dir={folder} --enable-tvm-ffi"
        # Only the object is kept. An engine to call it here would generate the host code once more.
        compiled = cast(
            _Compiled,
            cute.compile(
                function, *args, options=f"{kept} {_host_target()} {options}", no_jit_engine=True, **named_args
            ),
        )
        ptx, cubin = _text(compiled.__ptx__), compiled.__cubin__
    # For a function that launches nothing, these attributes hold file names instead.
    if ".entry" not in ptx or not isinstance(cubin, bytes):
        raise UnsupportedError(
            f"CuTeDSL ({compiler}) gave no PTX and cubin for {target}: {compiled.function_name} launches no kernel"
        )
    name = compiled.function_name
    return Artifact(
        target=target,
        ptx=ptx,
        cubin=cubin,
        host_object=compiled.dump_to_object(PREFIX),
        entry=f"{PREFIX}___tvm_ffi_{name}",
        packed_entry=f"_mlir_{PREFIX}__mlir_ciface_{name}",
        parameters=tuple(compiled.execution_args.signature.parameters),
        compiler=compiler,
        resources=kernel_resources(cubin),
    )


def _text(content: str | bytes | None) -> str:
    return (content.decode() if isinstance(content, bytes) else content or "").rstrip("\0")


def _host_target() -> str:
    triple = _TRIPLES.get(platform.machine())
    return f"--host-target 'llvm -mtriple={triple}'" if triple else ""

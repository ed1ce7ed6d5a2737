"""Compiles traced functions to machine code.

A NumPy call on 32 lanes costs a microsecond, and a special function makes 20 to 40 of them. Compiled, it takes 2 us.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable
from functools import cache
from typing import Any, Final, Protocol

import llvmlite
import llvmlite.binding as llvm
import numpy as np
import numpy.typing as npt
from llvmlite import ir

from backends.vm.numerics.traced import INDEX, Traced, holds_addresses
from backends.vm.numpy_calls import address_of

Words = npt.NDArray[np.uint32]

ENTRY: Final = "entry"
"""The name of the function in each module."""

_alive: list[object] = []


@cache
def _target_machine(level: int) -> llvm.TargetMachine:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    features = llvm.get_host_cpu_features().flatten()
    target = llvm.Target.from_default_triple()
    return target.create_target_machine(cpu=llvm.get_host_cpu_name(), features=features, opt=level, jit=True)


@cache
def _linker() -> llvm.ExecutionEngine:
    """One engine for all functions: an engine each would hold a module, and 0.2 MB, for the life of the process."""
    return llvm.create_mcjit_compiler(llvm.parse_assembly(""), _target_machine(1))


class CodeShelf(Protocol):
    """A store of machine code across processes. It may return only what this user has stored: the code is run."""

    def kept(self, name: str, decoded: Callable[[bytes], bytes]) -> bytes | None:
        """`decoded` of the content under `name`; None if there is none that can be trusted and decoded."""
        ...

    def keep(self, name: str, content: bytes) -> None:
        """Stores `content` under `name`. May fail silently."""
        ...


_shelf: CodeShelf | None = None
_addresses: dict[str, int] = {}


def keep_between_processes(shelf: CodeShelf | None) -> None:
    """From now on, look for machine code in `shelf` and store new code there."""
    global _shelf
    _shelf = shelf


def linked(module: ir.Module) -> int:
    """The address of the function ENTRY of a module of vectors. The module is compiled without optimisation passes.

    The machine code stays for the life of the process, and on the shelf under the SHA-256 of the module's text and of
    its compiler. Compiling takes 2 to 15 ms, a lookup a tenth of that.
    """
    text = str(module)
    digest = hashlib.sha256(f"{_compiler()}\n{text}".encode()).hexdigest()
    if digest not in _addresses:
        name = f"{ENTRY}_{digest}"
        shelf = None if holds_addresses(module) else _shelf
        code = None if shelf is None else shelf.kept(f"{digest}.o", bytes)
        if code is None:
            code = _target_machine(1).emit_object(llvm.parse_assembly(text.replace(f'@"{ENTRY}"', f'@"{name}"')))
            if shelf is not None:
                shelf.keep(f"{digest}.o", code)
        _linker().add_object_file(llvm.ObjectFileRef.from_data(code))
        _linker().finalize_object()
        _addresses[digest] = _linker().get_function_address(name)
    return _addresses[digest]


@cache
def _compiler() -> str:
    machine = _target_machine(1)
    features = llvm.get_host_cpu_features().flatten()
    return f"llvmlite {llvmlite.__version__}, {machine.triple}, {llvm.get_host_cpu_name()}, {features}"


def _loop(function: Callable[..., Any], operands: int) -> ir.Module:
    """`void f(u32 *a, ..., u32 *result, i64 count)`: applies `function` to each element."""
    module, pointer, word = ir.Module("words"), ir.PointerType(), ir.IntType(32)
    made = ir.Function(module, ir.FunctionType(ir.VoidType(), [pointer] * (operands + 1) + [INDEX]), "f")
    *sources, target, count = made.args
    target.add_attribute("noalias")
    b = ir.IRBuilder(made.append_basic_block())
    entry, body, end = b.block, made.append_basic_block(), made.append_basic_block()
    b.cbranch(b.icmp_signed(">", count, ir.Constant(INDEX, 0)), body, end)
    b.position_at_end(body)
    at = b.phi(INDEX)
    values = [Traced(b, np.uint32, b.load(b.gep(a, [at], source_etype=word), typ=word)) for a in sources]
    b.store(function(*values).astype(np.uint32).value, b.gep(target, [at], source_etype=word))
    following = b.add(at, ir.Constant(INDEX, 1))
    at.add_incoming(ir.Constant(INDEX, 0), entry)
    at.add_incoming(following, b.block)
    b.cbranch(b.icmp_signed("<", following, count), body, end)
    b.position_at_end(end)
    b.ret_void()
    return module


@cache
def compiled(function: Callable[..., Any], operands: int = 1) -> Callable[..., Words]:
    """`function` of uint32 arrays of one shape as machine code. The first call compiles it, in 20 to 40 ms.

    TypeError where the function does something that Traced cannot follow.
    """
    machine = _target_machine(3)
    module = llvm.parse_assembly(str(_loop(function, operands)))
    passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    passes.getModulePassManager().run(module, passes)
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    call = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * (operands + 1), ctypes.c_int64)(engine.get_function_address("f"))
    _alive.append((engine, passes))

    def run(*a: Words) -> Words:
        shape = a[0].shape
        if any(one.shape != shape for one in a):
            raise ValueError(f"operands of unlike shapes: {', '.join(str(one.shape) for one in a)}")
        sources = [np.ascontiguousarray(one, np.uint32) for one in a]
        result = np.empty(shape, np.uint32)
        call(*[address_of(one) for one in sources], address_of(result), result.size)
        return result

    return run

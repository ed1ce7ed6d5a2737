"""A NumPy function of words compiled: the function runs once on a symbolic operand and leaves LLVM IR behind.

A call of NumPy on 32 lanes costs a microsecond, and a special function takes 20 to 40 calls; the compiled one takes 2.
The NumPy source stays the only description, so that tests of it speak of the machine code too.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Final, cast

import llvmlite.binding as llvm
import numpy as np
import numpy.typing as npt
from llvmlite import ir

Words = npt.NDArray[np.uint32]

_TYPES: Final[Mapping[np.dtype[Any], Any]] = {
    np.dtype(bool): ir.IntType(1),
    np.dtype(np.int32): ir.IntType(32),
    np.dtype(np.uint32): ir.IntType(32),
    np.dtype(np.int64): ir.IntType(64),
    np.dtype(np.float32): ir.FloatType(),
    np.dtype(np.float64): ir.DoubleType(),
}
_INDEX: Final = ir.IntType(64)
_COMPARISONS: Final = {
    np.equal: "==", np.not_equal: "!=", np.less: "<", np.less_equal: "<=", np.greater: ">", np.greater_equal: ">=",
}  # fmt: skip
_ARITHMETIC: Final = {
    np.add: ("add", "fadd"), np.subtract: ("sub", "fsub"), np.multiply: ("mul", "fmul"), np.bitwise_and: ("and_", ""),
    np.bitwise_or: ("or_", ""), np.bitwise_xor: ("xor", ""), np.left_shift: ("shl", ""),
}  # fmt: skip


class Traced(np.lib.mixins.NDArrayOperatorsMixin):
    """One value while a function is traced. Follows NumPy's operators, comparisons, minimum, maximum and where."""

    def __init__(self, builder: ir.IRBuilder, dtype: npt.DTypeLike, value: ir.Value) -> None:
        self.builder, self.dtype, self.value = builder, np.dtype(dtype), value

    def _made(self, dtype: npt.DTypeLike, value: Any) -> Traced:
        return Traced(self.builder, dtype, value)

    def _constant(self, value: object, dtype: npt.DTypeLike) -> Traced:
        number = np.asarray(value).astype(dtype).item()
        return self._made(dtype, ir.Constant(_TYPES[np.dtype(dtype)], number))

    def _alike(self, *operands: object) -> list[Traced]:
        """The operands in the type that NumPy promotes them to; Python's numbers take that of the others."""
        dtype = np.result_type(*[one.dtype if isinstance(one, Traced) else one for one in operands])  # type: ignore[arg-type]
        return [one.astype(dtype) if isinstance(one, Traced) else self._constant(one, dtype) for one in operands]

    def astype(self, dtype: npt.DTypeLike) -> Traced:
        """As ndarray.astype: integers extend by their sign, floats convert exactly or round to nearest."""
        to, b = np.dtype(dtype), self.builder
        if to == self.dtype:
            return self
        new, old = _TYPES[to], _TYPES[self.dtype]
        if to.kind == "f":
            widen = b.fpext if to.itemsize > self.dtype.itemsize else b.fptrunc
            return self._made(to, widen(self.value, new) if self.dtype.kind == "f" else b.sitofp(self.value, new))
        if new.width == old.width:
            return self._made(to, self.value)
        if new.width < old.width:
            return self._made(to, b.trunc(self.value, new))
        return self._made(to, (b.sext if self.dtype.kind == "i" else b.zext)(self.value, new))

    def view(self, dtype: npt.DTypeLike) -> Traced:
        """As ndarray.view: the same bits."""
        return self._made(dtype, self.builder.bitcast(self.value, _TYPES[np.dtype(dtype)]))

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *operands: object, **options: object) -> Traced:
        a, *others = self._alike(*operands)
        b, floating, signed = self.builder, a.dtype.kind == "f", a.dtype.kind == "i"
        if method == "__call__" and not options:
            if ufunc in _ARITHMETIC:
                word = _ARITHMETIC[ufunc][floating]
                return self._made(a.dtype, getattr(b, word)(a.value, others[0].value))
            if ufunc is np.right_shift:
                return self._made(a.dtype, (b.ashr if signed else b.lshr)(a.value, others[0].value))
            if ufunc in _COMPARISONS:
                compare = b.fcmp_ordered if floating else b.icmp_signed if signed else b.icmp_unsigned
                return self._made(bool, compare(_COMPARISONS[ufunc], a.value, others[0].value))
            if ufunc in (np.minimum, np.maximum):
                first = a < others[0] if ufunc is np.minimum else a > others[0]
                return self._made(a.dtype, b.select(first.value, a.value, others[0].value))
            if ufunc is np.invert:
                return self._made(a.dtype, b.not_(a.value))
            if ufunc is np.negative:
                return self._made(a.dtype, (b.fneg if floating else b.neg)(a.value))
        raise TypeError(f"np.{ufunc.__name__} cannot be traced")

    def __array_function__(
        self, function: Callable[..., object], types: object, operands: tuple[Any, ...], options: object
    ) -> Traced:
        if function is np.where:
            chosen, *values = operands
            a, c = self._alike(*values)
            return self._made(a.dtype, self.builder.select(chosen.value, a.value, c.value))
        raise TypeError(f"np.{function.__name__} cannot be traced")

    def of(self, table: npt.NDArray[Any]) -> Traced:
        """The element of `table` at this index. The table stays where NumPy has it: the caller keeps it alive."""
        b, element = self.builder, _TYPES[table.dtype]
        base = b.inttoptr(ir.Constant(_INDEX, table.ctypes.data), ir.PointerType())
        place = b.gep(base, [self.astype(np.int64).value], inbounds=True, source_etype=element)
        return self._made(table.dtype, b.load(place, typ=element))


def taken(table: npt.NDArray[Any], index: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """`table[index]` as int64, for an array of indices or a traced one: np.take does not ask its indices."""
    return cast("Any", index.of(table) if isinstance(index, Traced) else table[index]).astype(np.int64)


_alive: list[object] = []


@cache
def _target_machine() -> llvm.TargetMachine:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    features = llvm.get_host_cpu_features().flatten()
    target = llvm.Target.from_default_triple()
    return target.create_target_machine(cpu=llvm.get_host_cpu_name(), features=features, opt=3, jit=True)


def _loop(function: Callable[..., Any], operands: int) -> ir.Module:
    """`void f(u32 *a, ..., u32 *result, i64 count)`, which applies `function` to each element."""
    module, pointer, word = ir.Module("words"), ir.PointerType(), ir.IntType(32)
    made = ir.Function(module, ir.FunctionType(ir.VoidType(), [pointer] * (operands + 1) + [_INDEX]), "f")
    *sources, target, count = made.args
    target.add_attribute("noalias")
    b = ir.IRBuilder(made.append_basic_block())
    entry, body, end = b.block, made.append_basic_block(), made.append_basic_block()
    b.cbranch(b.icmp_signed(">", count, ir.Constant(_INDEX, 0)), body, end)
    b.position_at_end(body)
    at = b.phi(_INDEX)
    values = [Traced(b, np.uint32, b.load(b.gep(a, [at], source_etype=word), typ=word)) for a in sources]
    b.store(function(*values).astype(np.uint32).value, b.gep(target, [at], source_etype=word))
    following = b.add(at, ir.Constant(_INDEX, 1))
    at.add_incoming(ir.Constant(_INDEX, 0), entry)
    at.add_incoming(following, b.block)
    b.cbranch(b.icmp_signed("<", following, count), body, end)
    b.position_at_end(end)
    b.ret_void()
    return module


@cache
def compiled(function: Callable[..., Any], operands: int = 1) -> Callable[..., Words]:
    """`function` of uint32 arrays of one shape as machine code. Compiles at the first call, which takes 20 to 40 ms.

    TypeError where the function calls what Traced cannot follow.
    """
    machine = _target_machine()
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
        call(*[one.ctypes.data for one in sources], result.ctypes.data, result.size)
        return result

    return run

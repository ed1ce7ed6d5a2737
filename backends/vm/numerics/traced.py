"""Traces a NumPy function: it runs once on symbolic operands and emits LLVM IR.

The NumPy source stays the only description of the computation, so its tests cover the machine code too. A Traced is one
value, or an array of fixed shape held in one LLVM vector: [32] or [32, n], for the lanes of a warp.

TypeError for anything that cannot be traced, above all a branch on values. A shortcut that first counts the elements
that need care must take the long way if `is_traced`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from math import prod
from typing import Any, Final, cast
from weakref import WeakSet

import llvmlite.binding as llvm
import numpy as np
import numpy.typing as npt
from llvmlite import ir

Shape = tuple[int, ...]

_TYPES: Final[Mapping[np.dtype[Any], Any]] = {
    np.dtype(bool): ir.IntType(1),
    **{np.dtype(f"{sign}{size}"): ir.IntType(8 * size) for sign in "iu" for size in (1, 2, 4, 8)},
    np.dtype(np.float16): ir.HalfType(),
    np.dtype(np.float32): ir.FloatType(),
    np.dtype(np.float64): ir.DoubleType(),
}
INDEX: Final = ir.IntType(64)
_COMPARISONS: Final = {
    np.equal: "==", np.not_equal: "!=", np.less: "<", np.less_equal: "<=", np.greater: ">", np.greater_equal: ">=",
}  # fmt: skip
_ARITHMETIC: Final = {
    np.add: ("add", "fadd"), np.subtract: ("sub", "fsub"), np.multiply: ("mul", "fmul"), np.divide: ("", "fdiv"),
    np.bitwise_and: ("and_", ""), np.bitwise_or: ("or_", ""), np.bitwise_xor: ("xor", ""),
}  # fmt: skip
_LOGIC: Final = {np.logical_and: "and_", np.logical_or: "or_", np.logical_xor: "xor"}
_OF_BOOLS: Final[Mapping[np.ufunc, np.ufunc | None]] = {
    np.add: np.logical_or, np.multiply: np.logical_and, np.subtract: None, np.negative: None, np.floor_divide: None,
    np.fmod: None, np.remainder: None, np.left_shift: None, np.right_shift: None,
}  # fmt: skip
"""The operation that NumPy applies to bools; None where NumPy raises an error or the result is not a bool."""
_TABLES: Final[list[npt.NDArray[Any]]] = []
"""Keeps tables alive, because machine code reads them."""
_BOUND: Final[WeakSet[Any]] = WeakSet()
"""Modules that contain the addresses of tables."""
_QUOTIENTS: Final = {np.floor_divide: ("sdiv", "udiv"), np.fmod: ("srem", "urem"), np.remainder: ("srem", "urem")}


def llvm_type(dtype: npt.DTypeLike, shape: Shape = ()) -> Any:
    """The LLVM type of an element, or of the vector of an array."""
    element = _TYPES[np.dtype(dtype)]
    return ir.VectorType(element, prod(shape)) if shape else element


def holds_addresses(module: ir.Module) -> bool:
    """Whether `module` contains addresses and is valid only in this process."""
    return module in _BOUND


def is_traced(a: object) -> bool:
    """Whether `a` is traced: its values are unknown."""
    return isinstance(a, Traced)


@cache
def _need_halves() -> None:
    """TypeError if the processor cannot convert float16: LLVM would call a library function that is missing here."""
    if not llvm.get_host_cpu_features().get("f16c"):
        raise TypeError("this processor does not convert float16")


class Traced(np.lib.mixins.NDArrayOperatorsMixin):
    """A symbolic value. Supports NumPy's operators, comparisons, minimum, maximum, where and astype."""

    def __init__(self, builder: ir.IRBuilder, dtype: npt.DTypeLike, value: Any, shape: Shape = ()) -> None:
        self.builder, self.dtype, self._value, self.shape = builder, np.dtype(dtype), value, shape

    @property
    def value(self) -> Any:
        """The LLVM value."""
        return self._value

    def assign(self, source: object) -> None:
        """As `self[...] = source`."""
        self._value = self._broadcast(source).astype(self.dtype).value

    def _made(self, dtype: npt.DTypeLike, value: Any, shape: Shape | None = None) -> Traced:
        return Traced(self.builder, dtype, value, self.shape if shape is None else shape)

    def _constant(self, value: object, dtype: npt.DTypeLike, shape: Shape) -> Traced:
        found = np.asarray(value)
        if found.dtype == object or found.shape:
            raise TypeError(f"{value!r} is no number")
        number = ir.Constant(llvm_type(dtype), found.astype(dtype).item())
        if shape:
            number = ir.Constant(llvm_type(dtype, shape), [number] * prod(shape))
        return self._made(dtype, number, shape)

    def _broadcast(self, source: object, shape: Shape | None = None) -> Traced:
        """`source` in `shape` (default: this value's). A lane's single value is repeated for all its elements."""
        shape = self.shape if shape is None else shape
        if not isinstance(source, Traced):
            return self._constant(source, np.asarray(source).dtype, shape)
        if source.shape == shape:
            return source
        if len(shape) != 2 or source.shape != (shape[0], 1):
            raise TypeError(f"{source.shape} does not go with {shape} here")
        return self._picked(source, [i // shape[1] for i in range(prod(shape))], shape)

    def _picked(self, source: Traced, elements: Sequence[int], shape: Shape) -> Traced:
        mask = ir.Constant(
            ir.VectorType(ir.IntType(32), len(elements)), [ir.Constant(ir.IntType(32), i) for i in elements]
        )
        return self._made(source.dtype, self.builder.shuffle_vector(source.value, source.value, mask), shape)

    def _alike(self, *operands: object, shape: Shape | None = None) -> list[Traced]:
        """The operands in the type that NumPy promotes them to. Python numbers take the type of the others."""
        dtype = np.result_type(*[one.dtype if isinstance(one, Traced) else one for one in operands])  # type: ignore[arg-type]
        if shape is None:
            shape = np.broadcast_shapes(*[one.shape for one in operands if isinstance(one, Traced)])
        return [
            self._broadcast(one, shape).astype(dtype) if isinstance(one, Traced) else self._constant(one, dtype, shape)
            for one in operands
        ]

    def astype(self, dtype: npt.DTypeLike, *, copy: bool = True) -> Traced:
        """As ndarray.astype: integers extend by their sign, floats convert exactly or round to nearest.

        A float converted to an integer must be in the integer's range.
        """
        to, b, old = np.dtype(dtype), self.builder, self.dtype
        if to == old:
            return self
        new = llvm_type(to, self.shape)
        if to == np.dtype(bool):
            return self != 0
        if to.kind == "f":
            if old.kind != "f":
                return self._made(to, (b.sitofp if old.kind == "i" else b.uitofp)(self.value, new))
            if to == np.dtype(np.float16):
                _need_halves()
                if old != np.dtype(np.float32):
                    raise TypeError("processors round nothing but float32 to float16")
            return self._made(to, (b.fpext if to.itemsize > old.itemsize else b.fptrunc)(self.value, new))
        if old.kind == "f":
            return self._made(to, (b.fptosi if to.kind == "i" else b.fptoui)(self.value, new))
        if to.itemsize == old.itemsize and old != np.dtype(bool):
            return self._made(to, self.value)
        if to.itemsize < old.itemsize:
            return self._made(to, b.trunc(self.value, new))
        return self._made(to, (b.sext if old.kind == "i" else b.zext)(self.value, new))

    def view(self, dtype: npt.DTypeLike) -> Traced:
        """As ndarray.view: the same bits, in elements of the same size."""
        if np.dtype(dtype).itemsize != self.dtype.itemsize:
            raise TypeError(f"{self.dtype} is not seen as {np.dtype(dtype)}")
        if np.dtype(dtype) == np.dtype(np.float16):
            _need_halves()
        return self._made(dtype, self.builder.bitcast(self.value, llvm_type(dtype, self.shape)))

    def ravel(self) -> Traced:
        """As ndarray.ravel."""
        return self

    def dot(self, other: Traced) -> float:
        """NaN, so that a shortcut that tests a sum of squares for NaN goes on to test each element."""
        return np.nan

    def intrinsic(self, name: str, *operands: Any) -> Any:
        """LLVM's intrinsic `name` of LLVM values of one type, which is also the result's type."""
        kind, module = operands[0].type, self.builder.module
        element = kind.element if isinstance(kind, ir.VectorType) else kind
        spelt = element.intrinsic_name if element is kind else f"v{kind.count}{element.intrinsic_name}"
        full = f"llvm.{name}.{spelt}"
        found = module.globals.get(full) or ir.Function(module, ir.FunctionType(kind, [kind] * len(operands)), full)
        return self.builder.call(found, operands)

    def __getitem__(self, where: object) -> Traced:
        if where is Ellipsis:
            return self
        if isinstance(where, tuple) and where == (slice(None), None) and len(self.shape) == 1:
            return self._made(self.dtype, self.value, (*self.shape, 1))
        if isinstance(where, tuple) and where[0] == slice(None) and isinstance(where[1], int):
            rows, columns = self.shape
            return self._picked(self, [i * columns + where[1] for i in range(rows)], (rows,))
        raise TypeError(f"a traced array has no element {where!r}")

    def __setitem__(self, where: object, source: object) -> None:
        if where is not Ellipsis:
            raise TypeError(f"a traced array has no element {where!r} to write")
        self.assign(source)

    def __array__(self, *arguments: object, **options: object) -> Any:
        raise TypeError("a traced value is no array")

    def __bool__(self) -> bool:
        raise TypeError("a decision depends on a traced value")

    def __array_ufunc__(
        self, ufunc: np.ufunc, method: str, *operands: object, out: tuple[Any, ...] = (), where: object = True
    ) -> Any:
        if method != "__call__" or where is not True:
            raise TypeError(f"np.{ufunc.__name__} cannot be traced as it is called")
        result = self._applied(ufunc, *operands)
        if not out:
            return result
        out[0].assign(result)
        return out[0]

    def _applied(self, ufunc: np.ufunc, *operands: object) -> Traced:
        a, *others = self._alike(*operands)
        b, floating, signed, shape = self.builder, a.dtype.kind == "f", a.dtype.kind == "i", a.shape
        c = others[0] if others else a
        if a.dtype == np.dtype(bool) and ufunc in _OF_BOOLS:
            if (of_bools := _OF_BOOLS[ufunc]) is None:
                raise TypeError(f"np.{ufunc.__name__} of bools is no bool in NumPy")
            ufunc = of_bools
        if ufunc in _ARITHMETIC and _ARITHMETIC[ufunc][floating]:
            return self._made(a.dtype, getattr(b, _ARITHMETIC[ufunc][floating])(a.value, c.value), shape)
        if ufunc in _LOGIC and a.dtype == np.dtype(bool):
            return self._made(bool, getattr(b, _LOGIC[ufunc])(a.value, c.value), shape)
        if ufunc in (np.left_shift, np.right_shift) and not floating:
            return self._shifted(ufunc, a, c)
        if ufunc in _COMPARISONS:
            compare = b.fcmp_ordered if floating else b.icmp_signed if signed else b.icmp_unsigned
            if floating and ufunc is np.not_equal:
                compare = b.fcmp_unordered
            return self._made(bool, compare(_COMPARISONS[ufunc], a.value, c.value), shape)
        if ufunc in (np.minimum, np.maximum, np.fmin, np.fmax):
            first = cast("Traced", a < c if ufunc in (np.minimum, np.fmin) else a > c)
            if floating:
                first = cast("Traced", first | (np.isnan(a) if ufunc in (np.minimum, np.maximum) else np.isnan(c)))
            return self._made(a.dtype, b.select(first.value, a.value, c.value), shape)
        if ufunc in _QUOTIENTS and not floating:
            return self._quotient(ufunc, a, c)
        if ufunc is np.isnan and floating:
            return self._made(bool, b.fcmp_unordered("uno", a.value, a.value), shape)
        if ufunc is np.invert and not floating:
            return self._made(a.dtype, b.not_(a.value), shape)
        if ufunc is np.logical_not and a.dtype == np.dtype(bool):
            return self._made(bool, b.not_(a.value), shape)
        if ufunc is np.negative:
            return self._made(a.dtype, (b.fneg if floating else b.neg)(a.value), shape)
        if ufunc is np.absolute and floating:
            unsigned = np.dtype(f"u{a.dtype.itemsize}")
            return (a.view(unsigned) & unsigned.type((1 << (8 * unsigned.itemsize - 1)) - 1)).view(a.dtype)
        if ufunc is np.absolute:
            return cast("Traced", np.where(cast("Any", a < 0), -a, a)) if signed else a
        if ufunc is np.bitwise_count and a.dtype.kind == "u":
            return self._made(a.dtype, self.intrinsic("ctpop", a.value), shape).astype(np.uint8)
        raise TypeError(f"np.{ufunc.__name__} cannot be traced on {a.dtype}")

    def _shifted(self, ufunc: np.ufunc, a: Traced, by: Traced) -> Traced:
        """Shifts as NumPy does: a shift by the width or more leaves only shifted-in bits, undefined in LLVM."""
        b, bits = self.builder, 8 * a.dtype.itemsize
        arithmetic = ufunc is np.right_shift and a.dtype.kind == "i"
        unsigned = by.astype(f"u{by.dtype.itemsize}")
        inside = cast("Any", unsigned < bits)
        amount = np.where(inside, unsigned, bits - 1 if arithmetic else 0)
        shift = b.shl if ufunc is np.left_shift else b.ashr if arithmetic else b.lshr
        shifted = self._made(a.dtype, shift(a.value, cast("Any", amount).value), a.shape)
        return shifted if arithmetic else cast("Traced", np.where(inside, shifted, 0))

    def _quotient(self, ufunc: np.ufunc, a: Traced, by: Traced) -> Traced:
        """Integer floor_divide (rounds down) with remainder, and fmod (of truncated division), for `by` other than 0.

        The least integer divided by -1 would trap, so -1 is handled apart.
        """
        b, signed = self.builder, a.dtype.kind == "i"
        if not signed:
            return self._made(a.dtype, getattr(b, _QUOTIENTS[ufunc][1])(a.value, by.value), a.shape)
        negates = cast("Any", by == -1)
        safe = cast("Any", np.where(negates, 1, by))
        found = self._made(a.dtype, getattr(b, _QUOTIENTS[ufunc][0])(a.value, safe.value), a.shape)
        if ufunc is np.fmod:
            return cast("Traced", np.where(negates, 0, found))
        if ufunc is np.remainder:
            rest = cast("Any", np.where(negates, 0, found))
            return cast("Traced", np.where((rest != 0) & ((rest < 0) ^ (by < 0)), rest + by, rest))
        above = cast("Any", (a < 0) ^ (by < 0)) & (found * safe != a)
        return cast("Traced", np.where(negates, -a, found - above.astype(a.dtype)))

    def __array_function__(
        self, function: Callable[..., object], types: object, operands: tuple[Any, ...], options: Mapping[str, Any]
    ) -> Any:
        if function is np.where:
            chosen, *values = operands
            shape = np.broadcast_shapes(*[one.shape for one in operands if isinstance(one, Traced)])
            a, c = self._alike(*values, shape=shape)
            condition = self._broadcast(chosen, shape).astype(bool)
            return self._made(a.dtype, self.builder.select(condition.value, a.value, c.value), shape)
        if function is np.copyto and options.get("where", True) is True:
            operands[0].assign(operands[1])
            return None
        if function in (np.zeros_like, np.ones_like):
            return self._constant(int(function is np.ones_like), self.dtype, self.shape)
        if function is np.clip:
            value, low, high = operands
            return np.minimum(np.maximum(value, low), high)
        raise TypeError(f"np.{function.__name__} cannot be traced")

    def of(self, table: npt.NDArray[Any]) -> Traced:
        """The elements of `table` at these indices. The code reads NumPy's own memory."""
        _TABLES.append(table)
        _BOUND.add(self.builder.module)
        b, element = self.builder, llvm_type(table.dtype)
        base = b.inttoptr(ir.Constant(INDEX, table.ctypes.data), ir.PointerType())
        index = self.astype(np.int64).value

        def at(one: Any) -> Any:
            return b.load(b.gep(base, [one], inbounds=True, source_etype=element), typ=element)

        if not self.shape:
            return self._made(table.dtype, at(index))
        found: Any = ir.Constant(llvm_type(table.dtype, self.shape), ir.Undefined)
        for i in range(prod(self.shape)):
            place = ir.Constant(ir.IntType(32), i)
            found = b.insert_element(found, at(b.extract_element(index, place)), place)
        return self._made(table.dtype, found)


def fused(a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once, of traced floats of one type and shape."""
    return Traced(a.builder, a.dtype, a.intrinsic("fma", a.value, b.value, c.value), a.shape)


def taken(table: npt.NDArray[Any], index: Any) -> Any:
    """`table[index]` for an array of indices or a traced one. NumPy offers indices no hook to trace this."""
    return index.of(table) if isinstance(index, Traced) else table[index]

"""A traced function computes what NumPy computes, in NumPy's type, or is refused."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from llvmlite import ir

from backends.vm.numerics import traced
from backends.vm.numerics.compiled import ENTRY, linked
from backends.vm.numerics.traced import Traced, llvm_type

LANES = 32
TYPES = ("bool", "int8", "uint8", "int32", "uint32", "int64", "float32", "float64")
UNARY = (np.invert, np.logical_not, np.negative, np.absolute, np.bitwise_count, np.isnan)
BINARY = (
    np.add, np.subtract, np.multiply, np.divide, np.floor_divide, np.fmod, np.remainder, np.bitwise_and, np.bitwise_or,
    np.bitwise_xor, np.logical_and, np.logical_or, np.logical_xor, np.left_shift, np.right_shift, np.equal,
    np.not_equal, np.less, np.less_equal, np.greater, np.greater_equal, np.minimum, np.maximum, np.fmin, np.fmax,
)  # fmt: skip


def by_machine_code(function: Callable[..., Any], *operands: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """`function` on arrays of 32 elements, traced. Raises TypeError if it cannot be traced."""
    module, pointer = ir.Module("traced"), ir.PointerType()
    made = ir.Function(module, ir.FunctionType(ir.VoidType(), [pointer] * (len(operands) + 1)), ENTRY)
    b = ir.IRBuilder(made.append_basic_block())
    given: list[Traced] = []
    for place, one in zip(made.args, operands, strict=False):
        bits = np.dtype(np.uint8) if one.dtype == np.dtype(bool) else one.dtype
        loaded = b.load(place, typ=llvm_type(bits, (LANES,)), align=1)
        given.append(Traced(b, bits, loaded, (LANES,)).astype(one.dtype))
    result = function(*given)
    stored = result.astype(np.uint8) if result.dtype == np.dtype(bool) else result
    b.store(stored.value, made.args[-1], align=1)
    b.ret_void()
    out = np.empty(LANES, result.dtype)
    call = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * len(made.args))(linked(module))
    call(*[one.ctypes.data for one in operands], out.ctypes.data)
    return out


def drawn(dtype: str, seed: int) -> npt.NDArray[Any]:
    """Random numbers of both signs and the extremes of the type."""
    draw = np.random.default_rng(seed)
    if dtype == "bool":
        return draw.integers(0, 2, LANES).astype(bool)
    if dtype.startswith("float"):
        return np.concatenate([[np.nan, np.inf, -np.inf, 0.0], draw.normal(size=LANES - 4)]).astype(dtype)
    least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
    return draw.permutation([least, most, most - 1, *draw.integers(max(least, -9), 9, LANES - 3)]).astype(dtype)


def differing(ufunc: np.ufunc, dtype: str) -> str:
    """How the machine code differs from NumPy on this type; "" if it does not, or if it is refused."""
    operands = [drawn(dtype, seed) for seed in range(ufunc.nin)]
    if ufunc in (np.floor_divide, np.fmod, np.remainder) and dtype not in ("float32", "float64"):
        operands[1][operands[1] == 0] = 3
    with np.errstate(all="ignore"):
        try:
            wanted = ufunc(*operands)
        except TypeError:
            wanted = None
    try:
        found = by_machine_code(ufunc, *operands)
    except TypeError:
        return ""
    if wanted is None:
        return f"{ufunc.__name__} of {dtype}: NumPy refuses it"
    if found.dtype != wanted.dtype:
        return f"{ufunc.__name__} of {dtype} is {found.dtype}; in NumPy it is {wanted.dtype}"
    if not np.array_equal(found, wanted, equal_nan=found.dtype.kind == "f"):
        at = int(np.flatnonzero(found != wanted)[0])
        asked = ", ".join(str(one[at]) for one in operands)
        return f"{ufunc.__name__} of {dtype} {asked} is {found[at]}; in NumPy it is {wanted[at]}"
    return ""


@pytest.mark.parametrize("dtype", TYPES)
def test_what_is_traced_agrees_with_numpy_or_is_refused(dtype: str) -> None:
    wrong = [said for ufunc in (*UNARY, *BINARY) if (said := differing(ufunc, dtype))]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("ufunc", "dtype"), [(np.add, "bool"), (np.floor_divide, "int32"), (np.bitwise_count, "uint32"), (np.fmod, "int8")]
)
def test_these_are_followed(ufunc: np.ufunc, dtype: str) -> None:
    """Ensures that the test above has something to compare."""
    assert by_machine_code(ufunc, *[np.full(LANES, 3).astype(dtype)] * ufunc.nin).shape == (LANES,)


def test_a_wrong_translation_of_bools_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault adds two bits where NumPy takes `or`."""
    monkeypatch.setattr(traced, "_OF_BOOLS", {})
    assert "add of bool" in differing(np.add, "bool"), "a sum of bools that is XOR is not noticed"
    assert "subtract of bool" in differing(np.subtract, "bool"), "a difference that NumPy refuses is not noticed"

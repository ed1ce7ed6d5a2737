"""Floating-point comparisons of `set`, `setp` and `slct` (PTX ISA 9.3.1.2)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Float = npt.NDArray[np.float32] | npt.NDArray[np.float64]
Truth = npt.NDArray[np.bool_]


def _ordered_unequal(a: Float, b: Float) -> Truth:
    return (a < b) | (a > b)


def _numbers(a: Float, b: Float) -> Truth:
    return (a == a) & (b == b)


# An ordered comparison is false if an operand is NaN, an unordered one (`u`) true.
COMPARISONS: dict[str, Callable[[Float, Float], Truth]] = {
    "eq": np.equal,
    "ne": _ordered_unequal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "equ": lambda a, b: ~_ordered_unequal(a, b),
    "neu": np.not_equal,
    "ltu": lambda a, b: ~np.greater_equal(a, b),
    "leu": lambda a, b: ~np.greater(a, b),
    "gtu": lambda a, b: ~np.less_equal(a, b),
    "geu": lambda a, b: ~np.less(a, b),
    "num": _numbers,
    "nan": lambda a, b: ~_numbers(a, b),
}
"""`COMPARISONS[op](a, b)`, a bool array; with `.ftz`, flush f32 operands first (`f32.flush`)."""

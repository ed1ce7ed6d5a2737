"""Fast replacements for NumPy calls that the machine makes several times an instruction.

`count_nonzero` counts the set elements of a mask. NumPy's wrapper takes twice as long as the count; calls of it were 7
% of the time of a Mixture-of-Experts layer. `address_of` gives the address of an array; `array.ctypes.data` takes eight
times as long.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy._core.multiarray import count_nonzero

__all__ = ["address_of", "count_nonzero", "word_at"]

_BEHIND_THE_HEAD = object.__basicsize__


def word_at(address: int) -> int:
    """The 64 bits at `address`, read as an address."""
    return _word_from(address).value


_word_from = ctypes.c_ssize_t.from_address


def address_of(array: npt.NDArray[Any]) -> int:
    """The address of the first element of `array`: the first field of NumPy's C struct (PyArrayObject_fields)."""
    return _word_from(id(array) + _BEHIND_THE_HEAD).value


_ONE = np.zeros(2, np.uint8)[1:]
if address_of(_ONE) != _ONE.ctypes.data:
    raise ImportError("a NumPy array does not begin with the address of its elements, as it does in CPython")

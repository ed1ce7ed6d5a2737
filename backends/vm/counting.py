"""NumPy's count of what is set, without its Python wrapper.

The machine asks whether a mask of 32 lanes has any set several times an instruction. The wrapper takes twice as long as
the count; calls of it were 7 % of the time of a Mixture-of-Experts layer.
"""

from __future__ import annotations

from numpy._core.multiarray import count_nonzero

__all__ = ["count_nonzero"]

"""A witness: a kernel of another package, how to call it, and the result it must compute."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from megamoe.contract import HostProgram, Target

TOLERANCE: Mapping[torch.dtype, float] = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-3}
"""Largest error that passes, by dtype of the output, as `error` measures it. For the 16-bit dtypes it is about five
roundings; softmax probabilities are rounded to them too."""


@dataclass(frozen=True, slots=True)
class Call:
    """Compiled programs to run one after the other on `tensors`, and the tensors expected afterwards.

    `expected`: float64, by name of the tensor, computed by torch from the same operands.
    """

    programs: tuple[HostProgram, ...]
    tensors: Mapping[str, torch.Tensor]
    expected: Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Witness:
    """One kernel at one shape. `prepare` compiles it (the package must be installed) and makes the operands.

    `known_fault`: why it breaks a rule of the VM although a GPU computes the right result; a sentence for the record.
    """

    package: str
    kernel: str
    target: Target
    options: str
    shape: str
    prepare: Callable[[], Call]
    known_fault: str = ""

    @property
    def name(self) -> str:
        """Unique name among all witnesses."""
        return " ".join(filter(None, (self.package, self.kernel, self.target, self.options, self.shape)))


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest error of an element, relative to its size plus the root mean square of all.

    inf if a value is not finite where a finite one is expected, or differs from an expected infinity.
    """
    exact = expected.isfinite()
    if not torch.equal(found.double()[~exact], expected[~exact]):
        return float("inf")
    found, expected = found.double()[exact], expected[exact]
    if not found.isfinite().all():
        return float("inf")
    size = expected.abs() + expected.square().mean().sqrt()
    return float(((found - expected).abs() / size).max()) if found.numel() else 0.0

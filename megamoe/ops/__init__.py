"""All that an op knows beyond its YAML and its kernels: OP.py, or OP/reference.py. No backend imports it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Protocol, cast

import torch

if TYPE_CHECKING:
    from megamoe.contract import Case


@dataclass(frozen=True, slots=True)
class Codes:
    """An output of codes, decoded: correct kernels store numbers in [lowest, highest]; a NaN in `seen` never is one.

    float64 of one shape, whose axes are named in `axes`. `rows`: where the entries of the first axis are in the output.
    """

    seen: torch.Tensor
    lowest: torch.Tensor
    highest: torch.Tensor
    axes: tuple[str, ...]
    rows: torch.Tensor


@dataclass(frozen=True, slots=True)
class Latitude:
    """What the contract leaves to a kernel, given its outputs. `oracle`: outputs for which this is the oracle instead,
    after the choices that the kernel made; `codes`: outputs that hold codes and are judged by `Codes` alone."""

    oracle: Mapping[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    codes: Mapping[str, Codes] = field(default_factory=dict[str, Codes])


@dataclass(frozen=True, slots=True)
class Sample:
    """A case of fewer rows out of a large one, which has the same results for them: what an oracle can be afforded for.

    `case` keeps the id of the large one, `inputs` are those of the rows chosen. `rows`: output -> int64, the indices
    along its first axis that the sample's output holds. `doc` says in words what was chosen.
    """

    case: Case
    inputs: Mapping[str, torch.Tensor]
    rows: Mapping[str, torch.Tensor]
    doc: str


class Reference(Protocol):
    """What an op's module gives. Tensors are named as in the op's spec; results lie on the device of `inputs`."""

    ABSOLUTE_SCALE: Mapping[str, float]
    """Outputs whose error counts in absolute terms, with the magnitude that one unit of it stands for."""

    MATRIX_RATES: Mapping[str, float]
    """How many times its bf16 rate a target's matrix unit has on the op's operands; 1 for a target left out."""

    def make_inputs(self, case: Case, device: str | torch.device = "cpu") -> dict[str, torch.Tensor]:
        """Every input tensor of `case`: the same bits for the same axes, distribution and seed, everywhere."""
        ...

    def oracle(self, case: Case, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Every output of `case` in float64, from the inputs as they are, without any other rounding."""
        ...

    def simulated(self, case: Case, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Every output of `case` in its own dtype, with the roundings that the contract prescribes."""
        ...

    def free(self, case: Case, inputs: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """bool, for the outputs that have them: elements that a kernel may leave alone or write anything to."""
        ...

    def latitude(
        self,
        case: Case,
        inputs: Mapping[str, torch.Tensor],
        outputs: Mapping[str, torch.Tensor],
        expected: Mapping[str, torch.Tensor],
    ) -> Latitude:
        """What else is correct, in view of a kernel's `outputs`; `expected` is the oracle."""
        ...

    def sample(self, case: Case, inputs: Mapping[str, torch.Tensor], most_flops: int) -> Sample | None:
        """A part of `case` of about `most_flops` useful operations; None if it has no more, or is of one piece."""
        ...

    def useful_flops(self, case: Case) -> int:
        """Floating-point operations that `case` needs, what masks and padding waste left out."""
        ...

    def minimum_bytes(self, case: Case) -> int:
        """Bytes that must cross the memory's interface if each needed one does so once."""
        ...


@cache
def referenced_ops() -> tuple[str, ...]:
    """Ops that have a reference, sorted: every module and package of this room is one."""
    return tuple(sorted(module.name for module in iter_modules(__path__)))


def reference(op: str) -> Reference:
    """The reference of `op`, imported on first use. ValueError, as a sentence, if there is none."""
    if op not in referenced_ops():
        known = ", ".join(referenced_ops()) or "none"
        raise ValueError(f"there is no reference for op {op!r}; references exist for: {known}")
    package = any(module.name == op and module.ispkg for module in iter_modules(__path__))
    return cast(Reference, import_module(f"{__name__}.{op}.reference" if package else f"{__name__}.{op}"))

"""All that an op needs beyond its YAML and its kernels, in OP.py or OP/reference.py; no backend imports it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Protocol, TypeVar, cast

if TYPE_CHECKING:
    import torch

    from megamoe.contract import Case

Distribution = TypeVar("Distribution")


@dataclass(frozen=True, slots=True)
class Codes:
    """An output of codes, decoded. A correct kernel stores numbers in [lowest, highest], never a NaN.

    `seen`, `lowest`, `highest`: float64 of one shape; `axes` names its axes. `rows`: int64, each entry's index along
    the output's first axis.
    """

    seen: torch.Tensor
    lowest: torch.Tensor
    highest: torch.Tensor
    axes: tuple[str, ...]
    rows: torch.Tensor


@dataclass(frozen=True, slots=True)
class Latitude:
    """What the contract allows, given a kernel's outputs.

    `oracle`: float64 outputs that replace the oracle's, adjusted to the kernel's choices. `codes`: outputs that hold
    codes; they are judged by `Codes` alone.
    """

    oracle: Mapping[str, torch.Tensor] = field(default_factory=dict)
    codes: Mapping[str, Codes] = field(default_factory=dict[str, Codes])


@dataclass(frozen=True, slots=True)
class Sample:
    """Some rows of a case that is too large for its oracle. Their results do not depend on the other rows.

    `case` keeps the id of the large case. `inputs` are the inputs of the chosen rows. `rows`: output -> int64, the
    indices along its first axis that the sample's output holds. `doc` describes the choice in words.
    """

    case: Case
    inputs: Mapping[str, torch.Tensor]
    rows: Mapping[str, torch.Tensor]
    doc: str


class Reference(Protocol):
    """What the module of an op provides. Tensors are named as in the spec; results lie on the device of `inputs`."""

    ABSOLUTE_SCALE: Mapping[str, float]
    """Output -> the smallest magnitude to divide its errors by, for errors that count in absolute terms."""

    MATRIX_RATES: Mapping[str, float]
    """Target -> rate of its matrix unit on the op's operands, as a multiple of the bf16 rate. 1 if left out."""

    def make_inputs(self, case: Case, device: str | torch.device = "cpu") -> dict[str, torch.Tensor]:
        """Every input tensor of `case`. The same axes, distribution and seed give the same bits everywhere."""
        ...

    def oracle(self, case: Case, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Every output of `case` in float64, computed from the inputs with no further rounding."""
        ...

    def simulated(self, case: Case, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Every output of `case` in its own dtype, with the roundings that the contract prescribes."""
        ...

    def free(self, case: Case, inputs: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Output -> bool of its shape: True where a kernel may leave the element unwritten or write anything."""
        ...

    def latitude(
        self,
        case: Case,
        inputs: Mapping[str, torch.Tensor],
        outputs: Mapping[str, torch.Tensor],
        expected: Mapping[str, torch.Tensor],
    ) -> Latitude:
        """What else is correct, given a kernel's `outputs`. `expected` holds the oracle's outputs."""
        ...

    def sample(self, case: Case, inputs: Mapping[str, torch.Tensor], most_flops: int) -> Sample | None:
        """A part of `case` with about `most_flops` useful operations. None if `case` has no more or cannot be split."""
        ...

    def useful_flops(self, case: Case) -> int:
        """Floating-point operations that `case` needs. Masked and padded work does not count."""
        ...

    def minimum_bytes(self, case: Case) -> int:
        """Bytes that must cross the memory interface if each needed byte crosses it once."""
        ...


def full_precision(case: Case) -> None:
    """Raises ValueError if torch uses reduced precision for fp32 matmuls. Simulated references need full precision."""
    import torch

    precision = torch.get_float32_matmul_precision()
    if precision != "highest":
        raise ValueError(
            f"{case.id}: torch's float32 matmul precision is {precision!r}; the simulated reference needs "
            "'highest' (torch.set_float32_matmul_precision)"
        )


def distribution_of(case: Case, distributions: Mapping[str, Distribution]) -> Distribution:
    """The input distribution of `case`. Raises ValueError for an unknown one."""
    if case.inputs not in distributions:
        known = ", ".join(distributions)
        raise ValueError(f"{case.id}: there is no input distribution {case.inputs!r} for {case.op}; there are: {known}")
    return distributions[case.inputs]


@cache
def referenced_ops() -> tuple[str, ...]:
    """The ops that have a reference, sorted: the module and package names in this folder."""
    return tuple(sorted(module.name for module in iter_modules(__path__)))


def reference(op: str) -> Reference:
    """The reference of `op`, imported on first use. Raises ValueError if there is none."""
    if op not in referenced_ops():
        known = ", ".join(referenced_ops()) or "none"
        raise ValueError(f"there is no reference for op {op!r}; references exist for: {known}")
    found = import_module(f"{__name__}.{op}")
    return cast(Reference, import_module(f"{found.__name__}.reference") if hasattr(found, "__path__") else found)

"""The functions that the Python in an exported dataset calls: megamoe's references and kernels.

The dataset is used where megamoe and its specs are installed. Unsigned bytes and words arrive as the signed type of the
same width, because the format has no unsigned types.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from megamoe.contract import AnyProgram, RunOptions, UnsupportedError, as_program, load_backend, load_executor
from megamoe.ops import reference
from megamoe.spec.load import load_specs
from megamoe.spec.selection import checked_targets
from megamoe.spec.spec import Spec

if TYPE_CHECKING:
    from megamoe.contract import AxisValue, Case

_UNSIGNED = {"u8": torch.uint8, "ue8m0": torch.uint8, "u32": torch.uint32}
_SIGNED = {torch.uint8: torch.int8, torch.uint32: torch.int32}


def reference_outputs(
    op: str, axes: Mapping[str, AxisValue], inputs: Mapping[str, torch.Tensor]
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """The outputs in the order of the spec; a single output is returned without a tuple."""
    spec = _specs()[op]
    case = _case(spec, axes)
    found = reference(op).simulated(case, _as_specified(spec, inputs))
    names = [name for name, tensor in spec.tensors_of(case).items() if tensor.role == "output"]
    outputs = tuple(found[name].view(_SIGNED.get(found[name].dtype, found[name].dtype)) for name in names)
    return outputs[0] if len(outputs) == 1 else outputs


def solve(
    op: str,
    backend: str,
    target: str,
    executor: str,
    axes: Mapping[str, AxisValue],
    tensors: Mapping[str, torch.Tensor],
) -> None:
    """Runs the kernel of `backend`, which writes the outputs among `tensors`.

    UnsupportedError if the executor cannot run it, RuntimeError if the kernel broke a rule of the machine.
    """
    spec = _specs()[op]
    case = _case(spec, axes)
    outputs = tuple(name for name, tensor in spec.tensors_of(case).items() if tensor.role == "output")
    machine = load_executor(executor)
    (checked,) = checked_targets([target])
    if why := machine.unavailable(checked):
        raise UnsupportedError(why)
    options = RunOptions(outputs=outputs)
    done = machine.run(_program(backend, target, case), _as_specified(spec, tensors), options)
    if done.violation:
        raise RuntimeError(done.violation)


def _case(spec: Spec, axes: Mapping[str, AxisValue]) -> Case:
    return spec.space.point(axes)


@lru_cache(maxsize=1)
def _specs() -> Mapping[str, Spec]:
    return load_specs()


@lru_cache(maxsize=64)
def _program(backend: str, target: str, case: Case) -> AnyProgram:
    (checked,) = checked_targets([target])
    return as_program(load_backend(backend).build(case, checked), backend)


def _as_specified(spec: Spec, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Views of `tensors` in the dtypes of the spec."""
    return {
        name: tensor.view(_UNSIGNED[spec.tensors[name].dtype]) if spec.tensors[name].dtype in _UNSIGNED else tensor
        for name, tensor in tensors.items()
    }

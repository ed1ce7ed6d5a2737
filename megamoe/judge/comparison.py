"""What a case's outputs must be, and whether they are: the references, the comparison, one sentence of complaints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from megamoe.judge.tolerance import Judgement, compare
from megamoe.ops import Codes, Latitude, Sample, reference

if TYPE_CHECKING:
    import torch

    from megamoe.contract import Case
    from megamoe.judge.arena import Arena
    from megamoe.spec.spec import Spec

Tensors = Mapping[str, "torch.Tensor"]


@dataclass(frozen=True)
class Expected:
    """The references of one case, or of a sample of it where the whole would cost too much.

    `oracle` and `simulated` are on the CPU, `inputs` on the device that computed the references. With a `sample`, all
    three, and `case`, are those of the sample.
    """

    case: Case
    inputs: Tensors
    oracle: Tensors
    simulated: Tensors
    sample: Sample | None = None

    @cached_property
    def free(self) -> Tensors:
        """bool, on the CPU: output elements that may hold anything."""
        return on_cpu(reference(self.case.op).free(self.case, self.inputs))

    def part(self, outputs: Tensors) -> Tensors:
        """The part of the whole case's outputs that is judged, on the CPU."""
        if self.sample is None:
            return on_cpu(outputs)
        return {name: outputs[name][rows.to(outputs[name].device)].cpu() for name, rows in self.sample.rows.items()}


def expected_of(case: Case, inputs: Tensors, max_flops: int | None = None) -> Expected:
    """The references of `case` for `inputs`, computed on the device of the inputs.

    With `max_flops`, a case of more useful operations is judged by a sample of its outputs, if its reference can take
    one (`Reference.sample`). None: judge all outputs, at any cost.
    """
    room = reference(case.op)
    sample = None if max_flops is None else room.sample(case, inputs, max_flops)
    if sample is not None:
        case, inputs = sample.case, sample.inputs
    oracle, simulated = room.oracle(case, inputs), room.simulated(case, inputs)
    return Expected(case, inputs, on_cpu(oracle), on_cpu(simulated), sample)


def compared(spec: Spec, expected: Expected, outputs: Tensors) -> Judgement:
    """Compares `outputs` (of the whole case, on any device) with the references, by the tolerance of `spec`."""
    case, room = expected.case, reference(expected.case.op)
    part = expected.part(outputs)
    tensors = spec.tensors_of(case)
    latitude = room.latitude(
        case, expected.inputs, _beside(expected.inputs, part), _beside(expected.inputs, expected.oracle)
    )
    return compare(
        case,
        part,
        expected.oracle,
        expected.simulated,
        spec.tolerance,
        spec.published(case),
        axes={name: tensors[name].shape for name in expected.oracle},
        absolute_scale=room.ABSOLUTE_SCALE,
        free=expected.free,
        latitude=_latitude_on_cpu(latitude),
    )


def complaints(arena: Arena, expected: Expected, judgement: Judgement) -> str:
    """One sentence with all faults of the memory and outputs of a call; "" if there is none.

    Unwritten outputs count here: their poison is NaN, which `compared` excuses where the oracle has NaN.
    """
    # A sample does not tell which other elements may stay unwritten.
    left = {} if expected.sample else arena.unwritten(expected.free)
    unwritten = [f"{count} elements of {name}" for name, count in left.items() if count]
    never = f"{' and '.join(unwritten)} were never written" if unwritten else None
    sampled = f" (among {expected.sample.doc}, which alone were judged)" if expected.sample else ""
    verdict = f"{judgement.sentence}{sampled}" if judgement.sentence else ""
    return "; ".join(sentence for sentence in (arena.damage(), never, verdict) if sentence)


def on_cpu(tensors: Tensors) -> dict[str, torch.Tensor]:
    """The tensors in host memory. Does not copy those that are there already."""
    return {name: tensor.cpu() for name, tensor in tensors.items()}


def _beside(inputs: Tensors, tensors: Tensors) -> Tensors:
    """`tensors` on the device of `inputs`."""
    device = next(iter(inputs.values())).device
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def _latitude_on_cpu(latitude: Latitude) -> Latitude:
    codes = {
        name: Codes(part.seen.cpu(), part.lowest.cpu(), part.highest.cpu(), part.axes, part.rows.cpu())
        for name, part in latitude.codes.items()
    }
    return Latitude(on_cpu(latitude.oracle), codes)

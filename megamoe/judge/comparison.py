"""Computes the references of a case, compares outputs with them, and describes every fault in one sentence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from megamoe.contract.counted import counted
from megamoe.judge.tolerance import Judgement, compare
from megamoe.ops import Sample, reference

if TYPE_CHECKING:
    import torch

    from megamoe.contract import Case
    from megamoe.judge.arena import Arena
    from megamoe.spec.spec import Spec

Tensors = Mapping[str, "torch.Tensor"]


@dataclass(frozen=True)
class Expected:
    """The references of one case, or of a sample of it if the whole case would cost too much.

    `inputs`, `oracle` and `simulated` lie on the device that computed the references; outputs are compared there too.
    With a `sample`, all three, and `case`, are the sample's.
    """

    case: Case
    inputs: Tensors
    oracle: Tensors
    simulated: Tensors
    sample: Sample | None = None

    @cached_property
    def free(self) -> Tensors:
        """bool: output elements that may hold anything."""
        return reference(self.case.op).free(self.case, self.inputs)

    @property
    def device(self) -> torch.device:
        """The device that holds the references."""
        return next(iter(self.inputs.values())).device

    def part(self, outputs: Tensors) -> Tensors:
        """The judged part of the whole case's outputs, on the device of the references."""
        if self.sample is not None:
            outputs = {name: outputs[name][rows.to(outputs[name].device)] for name, rows in self.sample.rows.items()}
        return {name: tensor.to(self.device) for name, tensor in outputs.items()}


def expected_of(case: Case, inputs: Tensors, max_flops: int | None = None) -> Expected:
    """The references of `case` for `inputs`, computed on the device of the inputs.

    A case with more than `max_flops` useful operations is judged by a sample of its outputs, if its reference can take
    one (`Reference.sample`). None: judge all outputs at any cost.
    """
    room = reference(case.op)
    sample = None if max_flops is None else room.sample(case, inputs, max_flops)
    if sample is not None:
        case, inputs = sample.case, sample.inputs
    return Expected(case, inputs, room.oracle(case, inputs), room.simulated(case, inputs), sample)


def compared(spec: Spec, expected: Expected, outputs: Tensors) -> Judgement:
    """Compares `outputs` (of the whole case, on any device) with the references, within the tolerance of `spec`."""
    case, room = expected.case, reference(expected.case.op)
    part = expected.part(outputs)
    tensors = spec.tensors_of(case)
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
        latitude=room.latitude(case, expected.inputs, part, expected.oracle),
    )


def complaints(arena: Arena, expected: Expected, judgement: Judgement) -> str:
    """One sentence with all faults in the memory and outputs of a call; "" if there are none.

    Unwritten outputs count here: their poison is NaN, and `compared` accepts NaN where the oracle has NaN.
    """
    # A sample does not know which other elements may stay unwritten.
    left = {} if expected.sample else arena.unwritten(expected.free)
    unwritten = [f"{counted(count, 'element')} of {name}" for name, count in left.items() if count]
    were = "was" if len(unwritten) == 1 and 1 in left.values() else "were"
    never = f"{' and '.join(unwritten)} {were} never written" if unwritten else None
    sampled = f" (among {expected.sample.doc}, which alone were judged)" if expected.sample else ""
    verdict = f"{judgement.sentence}{sampled}" if judgement.sentence else ""
    return "; ".join(sentence for sentence in (arena.damage(), never, verdict) if sentence)

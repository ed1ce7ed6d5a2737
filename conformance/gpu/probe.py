"""A probe: one program, its inputs and the VM's outputs, as a file to send to a device machine."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from megamoe.contract import Executor, HostProgram, Program, RunOptions, load_executor


@dataclass(frozen=True)
class Probe:
    """`tensors` are inputs and outputs before the run, `expected` the outputs after a run on the VM."""

    name: str
    program: Program | HostProgram
    tensors: Mapping[str, torch.Tensor]
    outputs: tuple[str, ...]
    expected: Mapping[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])

    def on(self, executor: Executor, device: str = "cpu") -> dict[str, torch.Tensor]:
        """The outputs of a run on `executor`, on the CPU. AssertionError with the sentence of a broken rule."""
        tensors = {name: tensor.clone().to(device) for name, tensor in self.tensors.items()}
        options = RunOptions(accumulate="hopper") if executor.name == "vm" else RunOptions()
        execution = executor.run(self.program, tensors, options)
        assert execution.violation is None, execution.violation
        return {name: tensors[name].cpu() for name in self.outputs}

    def with_expected(self) -> Probe:
        """This probe with outputs of the VM, under its bit-exact model of an H200's tensor core."""
        return Probe(self.name, self.program, self.tensors, self.outputs, self.on(load_executor("vm")))


def differences(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Elements of each tensor that differ in any bit."""
    return {name: int((_bits(found[name]) != _bits(expected[name])).sum()) for name in expected}


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(whole[tensor.element_size()])


def save(probe: Probe, path: Path) -> None:
    """Writes `probe` for `load`."""
    path.write_bytes(pickle.dumps(probe))


def load(path: Path) -> Probe:
    """Reads what `save` wrote. It is a pickle: load only files of your own."""
    return pickle.loads(path.read_bytes())

"""The device's probes on the VM: they compute what they claim, under every schedule."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from conformance.gpu.probe import (
    WORDS,
    Probe,
    compiled_product_probe,
    differences,
    exchange_probe,
    load,
    product_probe,
    save,
    scale_add_probe,
)
from megamoe.contract import HostProgram, RunOptions, load_executor

VM = load_executor("vm")


def test_the_product_is_that_of_its_operands() -> None:
    probe = product_probe()
    out = probe.on(VM)["out"]
    exact = probe.tensors["a"].double() @ probe.tensors["b"].double().T
    assert torch.allclose(out.double(), exact, atol=1e-4), "the product is wrong, and so would be what a device is told"


def test_each_cta_has_its_neighbours_words() -> None:
    out = exchange_probe().on(VM)["out"].long() & 0xFFFFFFFF
    words = torch.arange(4 * WORDS).reshape(4, WORDS)[[1, 0, 3, 2]]
    assert torch.equal(out, words * 2_654_435_761 & 0xFFFFFFFF)


@pytest.mark.parametrize("make", [product_probe, exchange_probe])
@pytest.mark.parametrize("schedule", ["lazy", "random:1"])
def test_the_probes_obey_every_rule_of_the_machine(make: Callable[[], Probe], schedule: str) -> None:
    probe = make()
    tensors = {name: tensor.clone() for name, tensor in probe.tensors.items()}
    execution = VM.run(probe.program, tensors, RunOptions(schedule=schedule))
    assert execution.violation is None, execution.violation


def test_one_bit_is_a_difference(tmp_path: Path) -> None:
    probe = product_probe().with_expected()
    save(probe, tmp_path / "it")
    held = load(tmp_path / "it")
    assert differences(probe.expected, held.expected) == {"out": 0}
    held.expected["out"].view(torch.int32)[3, 5] ^= 1
    assert differences(probe.expected, held.expected) == {"out": 1}
    nan = {"out": torch.full((2,), float("nan"))}
    assert differences(nan, nan) == {"out": 0}, "the bits of a NaN are bits like any other"


def test_a_broken_rule_is_no_result() -> None:
    probe = product_probe()
    barrier = probe.program.ptx.replace("READY: bar.sync 0;", "READY:")
    broken = dataclasses.replace(probe, program=dataclasses.replace(probe.program, ptx=barrier))
    with pytest.raises(AssertionError):
        broken.on(VM)


@pytest.mark.skipif(
    find_spec("cutlass") is None or find_spec("tvm_ffi") is None,
    reason="compiling needs nvidia-cutlass-dsl and apache-tvm-ffi (the extra `cutedsl`)",
)
@pytest.mark.filterwarnings("ignore")
def test_the_compiled_probes_compute_what_they_say() -> None:
    product, scaled = compiled_product_probe(), scale_add_probe()
    conventions = {probe.program.convention for probe in (product, scaled) if isinstance(probe.program, HostProgram)}
    assert conventions == {"tvm_ffi", "packed"}
    exact = product.tensors["a"].double() @ product.tensors["b"].double().T
    assert torch.allclose(product.on(VM)["c"].double(), exact, atol=1e-4), "the product is wrong"
    assert torch.equal(scaled.on(VM)["y"], scaled.tensors["y"] + 2 * scaled.tensors["x"]), "the sum is wrong"

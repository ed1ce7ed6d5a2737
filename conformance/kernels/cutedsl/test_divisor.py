"""backends/cutedsl/divisor.py on the machine: quotients and remainders of non-negative int32 numbers."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

import pytest
import torch

from backends.cutedsl.compile.artifact import Artifact
from backends.cutedsl.compile.compile import compile_host_function
from backends.vm.executor import EXECUTOR
from conformance.kernels.cutedsl.execution import made
from megamoe.contract import HostProgram, PackedFields, RunOptions, ScalarArg, StreamArg, TensorArg

MOST = 2**31 - 1
DIVISORS = (1, 2, 3, 4, 5, 7, 22, 127, 128, 129, 132, 641, 4096, 4097, 65_535, 715_827_883, 2**30, 2**30 + 1, MOST)
WAYS = ("same", "own")


@cache
def artifact() -> Artifact:
    """The compiled host function. Skips the test without CuTeDSL."""

    def build() -> Artifact:
        import cutlass
        import cutlass.cute as cute
        from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

        from conformance.kernels.cutedsl.division import divide

        n = cute.sym_int32()
        number = make_fake_compact_tensor(cutlass.Int32, (n,), assumed_align=4)
        results = (make_fake_compact_tensor(cutlass.Int32, (n, 2), stride_order=(1, 0), assumed_align=4) for _ in WAYS)
        return compile_host_function(divide, number, *results, cutlass.Int32(1), make_fake_stream(), target="sm_90a")

    return made(build)


def numbers_of(divisor: int) -> list[int]:
    """Numbers next to multiples of `divisor`, from 0 up to the largest, and random ones."""
    drawn = torch.randint(0, MOST, (12,), generator=torch.Generator().manual_seed(divisor)).tolist()
    multiples = [divisor * times for times in (0, 1, 2, MOST // divisor // 2, MOST // divisor)]
    near = [number + offset for number in multiples for offset in (-1, 0, 1)]
    return [number for number in (*near, *drawn, MOST) if 0 <= number <= MOST]


def program_of(divisor: int, count: int) -> HostProgram:
    """Builds the division of `count` numbers."""
    rows = PackedFields(dims=(0,))
    results = {name: TensorArg(name, "s32", (count, 2), packed=rows) for name in WAYS}
    arguments = {"number": TensorArg("number", "s32", (count,), packed=rows), **results}
    return artifact().program({**arguments, "value": ScalarArg("s32", divisor), "stream": StreamArg()})


def wrong(divisor: int, fault: str | None = None) -> str | None:
    """The first number that is divided wrongly. `fault`: replaces an instruction's lower half by its upper half."""
    numbers = numbers_of(divisor)
    program = program_of(divisor, len(numbers))
    if fault:
        pattern, _, replacement = fault.partition(" -> ")
        changed = re.sub(pattern, replacement, program.ptx)
        assert changed != program.ptx, f"no instruction of the kernel matches {fault}"
        program = replace(program, ptx=changed)
    tensors = {name: torch.full((len(numbers), 2), -1, dtype=torch.int32) for name in WAYS}
    tensors["number"] = torch.tensor(numbers, dtype=torch.int32)
    violation = EXECUTOR.run(program, tensors, RunOptions()).violation
    assert violation is None, violation
    for name in WAYS:
        for number, seen in zip(numbers, tensors[name].tolist(), strict=True):
            if tuple(seen) != divmod(number, divisor):
                return f"{name}: {number} / {divisor} is {divmod(number, divisor)}, not {tuple(seen)}"
    return None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("divisor", DIVISORS)
def test_numbers_are_divided(divisor: int) -> None:
    seen = wrong(divisor)
    assert seen is None, seen


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fault", [r"mul\.hi\.u32 -> mul.lo.u32", r"mov\.b64 \{low, (%r\d+)\} -> mov.b64 {\1, low}"])
def test_a_lower_half_for_an_upper_is_noticed(fault: str) -> None:
    assert wrong(7, fault), f"{fault} was not noticed"

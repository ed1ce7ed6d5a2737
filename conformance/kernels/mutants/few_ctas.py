"""A program on few persistent CTAs, each of which computes several tiles, or parts of them that it hands over.

A device has more SMs than a small case has tiles, so in rows of a matrix hardly any CTA of a grouped GEMM, or of
CuTeDSL's attention, has a second.
Tests of the kernels run them so too: conformance/kernels/ptx/test_hopper_moe.py and test_moe_layer.py,
conformance/kernels/cutedsl/test_moe.py and test_sm90_moe.py.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from backends.cutedsl.sm90_fmha.program import fmha_program as sm90_fmha_program
from backends.cutedsl.sm90_moe.program import moe_program as sm90_moe_program
from backends.cutedsl.sm100_fmha.program import fmha_program as sm100_fmha_program
from backends.cutedsl.sm100_moe.program import moe_program as sm100_moe_program
from megamoe.contract import AxisValue, Case, HostProgram, Program, UnsupportedError, load_backend
from megamoe.spec.spec import Spec

COUNTS = (1, 5)
"""CTAs. One computes all tiles, and fills a ring several times. Among five, tiles are left that CTAs of the CuTeDSL
kernels share."""
SIZES = ((384, 384), (768, 384), (768, 768))
"""Values of hidden and intermediate, cheapest first: several tiles of an expert, and three steps or more along K."""
_SHORT_L1, _SHORT_L2 = (128, 1280), (2560, 128)
SHORT = {"l1": (_SHORT_L1,), "l2": (_SHORT_L2,), "layer": (_SHORT_L1, _SHORT_L2)}
"""By stage, of those with a grouped GEMM, hidden and intermediate for one step along K and 2560 weight rows.
Where a tile has several steps, a stage of the ring that a warp gives back without the others is covered by the stage
before it. So each must be the first of a tile, and be filled again: raw PTX has 5 stages for tiles of 256 weight rows,
and 9 for tiles of 128."""
SEQUENCES, KEYS = 4, {64: 500, 128: 400, 256: 300, 512: 200}
"""Sequences and, by head dimension, their keys, with which CuTeDSL's attention on one CTA fills its rings twice."""
GEMMS = ("moe_swiglu", "moe_rows")
"""How entries of the grouped GEMMs of the backend `ptx` begin."""


Sized = tuple[Case, Program | HostProgram]


def on_few_ctas(backend: str, target: str, spec: Spec, case: Case, text: str) -> dict[int, list[Sized]]:
    """Programs by their CTAs, of cases like `case` that build `text`; none where there is no such case.

    A grouped GEMM: skewed if that builds `text`, of the first of SIZES that does, and on one CTA of SHORT too.
    Attention: SEQUENCES of KEYS on one CTA.
    """
    if case.op == "fmha":
        return _attention(backend, target, spec, case, text)
    stage = str(case["stage"]) if case.op == "nvfp4_moe" else ""
    if stage not in SHORT:
        return {}

    def of(size: tuple[int, int], load: AxisValue, count: int) -> Sized:
        sized = spec.vary(case, hidden=size[0], intermediate=size[1], load=load)
        return sized, _built(backend, target, sized, count)

    for load, size in product(("skewed", case["load"]), SIZES):
        made = {count: [of(size, load, count)] for count in COUNTS}
        if all(program.ptx == text for ((_, program),) in made.values()):
            short = [of(one, load, 1) for one in SHORT[stage]]
            made[1] += [one for one in short if one[1].ptx == text]
            return made
    return {}


def _attention(backend: str, target: str, spec: Spec, case: Case, text: str) -> dict[int, list[Sized]]:
    """None where the kernel is one that `max_ctas` and `splits` do not reach."""
    if backend != "cutedsl" or case["ragged"]:
        return {}
    sized = spec.vary(case, s_k=KEYS[case.int("hd")], batch=SEQUENCES)
    of = sm90_fmha_program if target == "sm_90a" else sm100_fmha_program
    program = of(sized, splits=1, max_ctas=1)
    return {1: [(sized, program)]} if program.ptx == text else {}


def _built(backend: str, target: str, case: Case, count: int) -> Program | HostProgram:
    if backend == "cutedsl":
        return sm90_moe_program(case, count) if target == "sm_90a" else sm100_moe_program(case, max_ctas=count)
    program = load_backend(backend).build(case, "sm_90a" if target == "sm_90a" else "sm_100a")
    if not isinstance(program, Program):
        raise UnsupportedError(
            f"{case.id}: the grids of {backend}'s {type(program).__name__} cannot be told to be smaller"
        )
    launches = (
        replace(one, grid=(min(count, one.grid[0]), 1, 1)) if one.entry.startswith(GEMMS) else one
        for one in program.launches
    )
    return replace(program, launches=tuple(launches))

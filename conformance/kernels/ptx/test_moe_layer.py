"""Laws of the ptx backend's MoE kernels beyond the spec's: the routing's tables are right, and neither the number of
persistent CTAs nor the schedule changes a bit. Each checker meets a planted fault.

The tests also show which register of which thread holds which (M, N) of a fused SwiGLU tile: row M = thread, column N =
register. One tcgen05.ld.32x32b gives thread t lane t of tensor memory, row t of the tile, and column c in register c. A
thread has gates 0 to 7 in registers 0 to 7, their ups in 8 to 15, gates 8 to 15 in 16 to 23, and so on. The test zeroes
one register of one thread; the activation made from it must become zero.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from backends.ptx import BACKEND
from backends.ptx.sm100_moe.geometry import HALF_N, THREADS
from backends.vm.executor import EXECUTOR
from conformance.kernels.laws.law import spec_of
from megamoe.codec.nvfp4 import unpack
from megamoe.codec.routing import routing
from megamoe.contract import Case, Program, RunOptions, load_executor
from megamoe.judge.guarded import GuardedCase
from megamoe.ops import reference
from megamoe.spec.spec import Spec

Tensors = dict[str, torch.Tensor]
NO_ROW = -1
SMALL = "hidden=1152,intermediate=256,num_experts=3,tokens=9,topk=2"
"""Five stages along K in the first GEMM, one more than the ring has; with a single CTA, several tiles on it."""


@cache
def spec() -> Spec:
    """The spec of NVFP4 MoE."""
    return spec_of("nvfp4_moe")


def case_of(axes: str) -> Case:
    """The case `nvfp4_moe:` with these axes."""
    return spec().parse_case(f"nvfp4_moe:{axes}")


def built(case: Case, *, ctas: int | None = None) -> Program:
    """The program of a case; its grouped GEMMs run on `ctas` persistent CTAs if given."""
    program = BACKEND.build(case, "sm_100a")
    if ctas is None:
        return program
    launches = [replace(x, grid=(min(ctas, x.grid[0]), 1, 1)) if x.block[0] == THREADS else x for x in program.launches]
    return replace(program, launches=tuple(launches))


def run(case: Case, program: Program, schedule: str = "eager") -> tuple[Tensors, str]:
    """Returns the outputs with free elements zeroed, and the fault that the machine or the arena found."""
    options = RunOptions(schedule=schedule, step_budget=2_000_000)
    ran = GuardedCase(spec(), case, load_executor("vm")).run(program, options)
    return ran.settled, ran.fault()


def differences(left: Tensors, right: Tensors) -> list[str]:
    """Names of the outputs whose bits differ."""
    return [name for name in left if not torch.equal(left[name].view(torch.uint8), right[name].view(torch.uint8))]


@cache
def plain(axes: str) -> Tensors:
    """The outputs of a case under the schedule eager."""
    outputs, sentence = run(case_of(axes), built(case_of(axes)))
    assert not sentence, f"{axes}: {sentence}"
    return outputs


def is_noticed(case: Case, whole: Program, taken_out: str, right: Tensors) -> bool:
    """Removes all lines with `taken_out`, and the loop around each wait. Whether the machine or a bit other than in
    `right` shows it."""
    lines = whole.ptx.splitlines()
    waits = [index for index, line in enumerate(lines) if taken_out in line]
    assert waits, f"the kernel has no {taken_out!r}"
    for index in waits:
        is_loop = "try_wait" in lines[index]
        lines[index] = ""
        if is_loop:
            lines[index + 1] = ""
    broken = replace(whole, ptx="\n".join(lines))
    runs = (run(case, broken, schedule) for schedule in ("eager", "lazy", "random:1"))
    return any(sentence or differences(outputs, right) for outputs, sentence in runs)


@pytest.mark.parametrize("schedule", ["eager", "lazy", "random:1", "random:2"])
@pytest.mark.parametrize("stage", ["l1", "l2"])
def test_persistence_changes_no_bit(stage: str, schedule: str) -> None:
    """One CTA that processes all tiles with overlapping accumulators gives the same bits as one CTA a tile."""
    axes = f"{SMALL},stage={stage},load=skewed"
    outputs, sentence = run(case_of(axes), built(case_of(axes), ctas=1), schedule)
    assert not sentence, f"{axes} on one CTA: {sentence}"
    assert not differences(outputs, plain(axes)), f"{axes}: one CTA computes other bits, {schedule}"


@pytest.mark.parametrize(
    ("stage", "taken_out"),
    [
        ("l1", "%tile_free_completed, ["),
        ("l1", "%ring_full_completed, ["),
        ("l1", "%ring_empty_completed, ["),
        ("l1", "%tile_full_completed, ["),
        ("l2", "cp.async.bulk.wait_group.read 0;"),
        ("l2", "fence.proxy.async.shared::cta;"),
    ],
)
def test_a_missing_wait_is_noticed(stage: str, taken_out: str) -> None:
    axes = f"{SMALL},stage={stage},load=skewed"
    assert is_noticed(case_of(axes), built(case_of(axes), ctas=1), taken_out, plain(axes)), (
        f"stage {stage} without {taken_out!r} goes unnoticed under every schedule"
    )


@pytest.mark.parametrize(
    ("fault", "right", "wrong"),
    [
        ("gate and up change places", "mul.rn.f32 %acc_0, %acc_0, %acc_8;", "mul.rn.f32 %acc_0, %acc_8, %acc_8;"),
        (
            "scale factors of B half a tile off",
            "[%sf_columns + 20], %atom_descriptor",
            "[%sf_columns + 16], %atom_descriptor",
        ),
        ("codes of another half", "mad.wide.u32 %half_codes_at, %half, 32,", "mad.wide.u32 %half_codes_at, %half, 0,"),
    ],
)
def test_a_wrong_layout_is_noticed(fault: str, right: str, wrong: str) -> None:
    axes = f"{SMALL},stage=l1,load=skewed"
    whole = built(case_of(axes))
    assert right in whole.ptx, f"the kernel has no {right!r}"
    outputs, sentence = run(case_of(axes), replace(whole, ptx=whole.ptx.replace(right, wrong)))
    assert sentence or differences(outputs, plain(axes)), f"goes unnoticed: {fault}"


@pytest.mark.parametrize(
    "axes",
    [
        "hidden=128,intermediate=128,num_experts=70,tokens=90,topk=3,load=skewed",
        "hidden=128,intermediate=128,num_experts=5,tokens=300,topk=2,load=balanced",
        "hidden=128,intermediate=128,num_experts=6,tokens=40,topk=4,load=slice",
        "hidden=128,intermediate=128,num_experts=9,tokens=1,topk=2,load=one_token",
    ],
)
@pytest.mark.parametrize("schedule", ["eager", "random:4"])
def test_routing_tables(axes: str, schedule: str) -> None:
    case = case_of(f"{axes},stage=combine")
    wrong = _wrong_tables(case, built(case), schedule)
    assert not wrong, f"{axes}: {wrong}"


def test_a_wrong_routing_table_is_noticed() -> None:
    case = case_of("hidden=128,intermediate=128,num_experts=5,tokens=80,topk=2,load=skewed,stage=combine")
    whole = built(case)
    right = "mov.u32 %lanes_below, %lanemask_lt;"
    assert right in whole.ptx, f"the kernel has no {right!r}"
    wrong = _wrong_tables(
        case, replace(whole, ptx=whole.ptx.replace(right, "mov.u32 %lanes_below, %lanemask_le;")), "eager"
    )
    assert wrong, "ranks that are one too large go unnoticed"


def _wrong_tables(case: Case, program: Program, schedule: str) -> str:
    """Compares the tables that the routing launch writes with the reference; "" if they are right."""
    topk_ids = reference(case.op).make_inputs(case)["topk_ids"]
    tables = {name: torch.full((size // 4,), -2, dtype=torch.int32) for name, size in program.scratch.items()}
    alone = replace(program, launches=program.launches[:1], scratch={})
    execution = EXECUTOR.run(alone, {"topk_ids": topk_ids, **tables}, RunOptions(schedule=schedule))
    if execution.violation:
        return execution.violation
    expected = _tables(case, topk_ids)
    rows = len(expected["token_of_row"])
    sizes = {"token_of_row": rows, "route_of_row": rows, "expert_of_tile": rows // 128}
    found = {name: table[: sizes.get(name, len(table))] for name, table in tables.items()}
    return ", ".join(
        f"{name} is {found[name].tolist()[:8]}..., not {table.tolist()[:8]}..."
        for name, table in expected.items()
        if found[name].tolist() != table.tolist()
    )


def _tables(case: Case, topk_ids: torch.Tensor) -> dict[str, torch.Tensor]:
    routes, tokens, topk = routing(case, topk_ids), case.int("tokens"), case.int("topk")
    route = routes.token * topk + routes.choice
    counts = torch.bincount(routes.expert, minlength=case.int("num_experts"))
    expert_of_tile = torch.repeat_interleave(torch.arange(len(counts)), (counts + 127) // 128)
    token_of_row = torch.full((128 * len(expert_of_tile),), tokens)
    route_of_row = torch.full_like(token_of_row, tokens * topk)
    row_of_route = torch.full((tokens * topk,), NO_ROW)
    token_of_row[routes.row], route_of_row[routes.row], row_of_route[route] = routes.token, route, routes.row
    return {
        "row_tiles": torch.tensor([len(expert_of_tile)]),
        "expert_of_tile": expert_of_tile,
        "token_of_row": token_of_row,
        "route_of_row": route_of_row,
        "row_of_route": row_of_route,
    }


LOADED = "tcgen05.wait::ld.sync.aligned;"
AXES = "hidden=128,intermediate=128,num_experts=1,tokens=128,stage=l1"
"""One tile: all 128 rows belong to tokens, as do both halves of its columns, of HALF_N registers each."""


def zeroed(ptx: str, thread: int, register: int) -> str:
    """Zeroes one accumulator register of one thread, in both halves of the tile."""
    probe = f".reg .pred %probe; setp.eq.u32 %probe, %thread, {thread}; @%probe mov.f32 %acc_{register}, 0f00000000;"
    assert ptx.count(LOADED) == 1, "the epilogue loads its accumulators in one place"
    return ptx.replace(LOADED, f"{LOADED}\n{probe}")


def changed(interleave: int, thread: int, register: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [128, intermediate] without and with the zeroed register."""
    case = case_of(f"{AXES},interleave={interleave}")
    program = built(case)
    codes: list[torch.Tensor] = []
    for ptx in (program.ptx, zeroed(program.ptx, thread, register)):
        outputs, sentence = run(case, replace(program, ptx=ptx))
        assert not sentence, sentence
        codes.append(unpack(outputs["a2_codes"]))
    return codes[0], codes[1]


@pytest.mark.parametrize(
    ("interleave", "thread", "register", "activation"),
    [(8, 0, 0, 0), (8, 77, 8, 0), (8, 127, 21, 13), (8, 33, 31, 15), (8, 70, 127, 63), (32, 5, 33, 1), (64, 96, 64, 0)],
)
def test_register_is_column_and_thread_is_row(interleave: int, thread: int, register: int, activation: int) -> None:
    """Register c belongs to activation g * (c // 2 g) + c % g of its half, both as a gate and as an up."""
    assert activation == interleave * (register // (2 * interleave)) + register % interleave, "the table errs"
    before, after = changed(interleave, thread, register)
    others = torch.arange(len(before)) != thread
    assert torch.equal(before[others], after[others]), f"register {register} of thread {thread} reaches another row"
    zeros = [activation + half * HALF_N // 2 for half in range(2)]
    assert (after[thread, zeros] & 7 == 0).all(), f"register {register} is not of activations {zeros}"
    blocks = {zero // 16 for zero in zeros}
    untouched = [column for column in range(before.shape[1]) if column // 16 not in blocks]
    assert torch.equal(before[thread, untouched], after[thread, untouched]), f"register {register} reaches other blocks"
    assert (before[thread, zeros] & 7 != 0).any(), (
        f"row {thread}: activations {zeros} were zero before: nothing was asked"
    )

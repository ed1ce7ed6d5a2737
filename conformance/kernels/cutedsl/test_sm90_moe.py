"""The CuTeDSL MoE kernels for sm_90a: plans fit the machine, CTAs that share a tile agree with the reference under
every schedule, planted faults are noticed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from backends.cutedsl.sm90_moe import program as sm90
from backends.cutedsl.sm90_moe.plan import (
    BF16_WIDTHS,
    BLOCK_BYTES,
    BLOCK_ROWS,
    CODES_BYTES,
    PRODUCER_REGISTERS,
    UNIT_K,
    WIDTHS,
    Sm90MoePlan,
    max_columns,
    width_for,
)
from backends.cutedsl.sm90_moe.program import moe_program
from conformance.kernels.cutedsl.execution import counters, made, outputs, without
from conformance.kernels.laws.law import inputs_of, spec_of
from megamoe.codec import routing
from megamoe.contract import Case, HostProgram
from megamoe.judge.comparison import compared, expected_of

MAX_SMEM, SM_REGISTERS = 227 * 1024, 1 << 16
OPERAND_REGISTERS = 80
"""Registers for two blocks of A, 16 words each, and their packed form; addresses and descriptors."""
PLANS = [
    Sm90MoePlan(width, swiglu, bf16)
    for bf16, widths in ((False, WIDTHS), (True, BF16_WIDTHS))
    for width in widths
    for swiglu in (True, False)
]
L2 = "hidden=128,intermediate=1280,num_experts=3,tokens=9,stage=l2"
"""Three tiles for two CTAs, each with more stages than a ring has; the second panel of a tile is past the end of W."""
W4A16 = "hidden=384,intermediate=128,num_experts=3,tokens=12,topk=2,activations=bf16,stage=l1,inputs=full_range"
L1 = "hidden=384,intermediate=128,num_experts=3,tokens=12,topk=2,load=slice,weight=before,clamp=0.5,stage=l1"


def case_of(text: str) -> Case:
    return spec_of("nvfp4_moe").parse_case(f"nvfp4_moe:{text}")


def program_of(text: str, *, max_ctas: int = 132, width: int = 16) -> HostProgram:
    return made(lambda: moe_program(case_of(text), max_ctas, width))


def refusal(text: str, seen: dict[str, torch.Tensor]) -> str:
    case = case_of(text)
    verdict = compared(spec_of(case.op), expected_of(case, inputs_of(case)), seen)
    return "" if verdict.passed else verdict.sentence


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_a_plan_fits_the_machine(plan: Sm90MoePlan) -> None:
    total = plan.stages * (plan.a_bytes + plan.b_bytes + 16) + plan.staged_bytes
    assert total + 1024 <= MAX_SMEM, f"{plan}: {total} bytes of shared memory, {MAX_SMEM} exist"
    assert plan.stages >= 4, f"{plan}: a stage is given back one unit late; a ring of {plan.stages} cannot hide that"
    assert plan.b_bytes % 1024 == 0, f"{plan}: a stage of tokens begins within a pattern of the swizzle"
    registers = plan.sums + OPERAND_REGISTERS
    assert registers <= plan.consumer_registers, f"{plan}: {registers} registers for sums and operands"
    wanted = plan.consumer_registers * plan.consumers + PRODUCER_REGISTERS * 128
    launched = SM_REGISTERS // plan.threads // 8 * 8 * plan.threads
    assert wanted <= launched, f"{plan}: setmaxnreg asks for {wanted} of {launched} registers: an H200 waits for ever"


def test_a_block_of_weights_is_four_and_a_half_bits_an_element() -> None:
    elements = BLOCK_ROWS * UNIT_K
    assert elements * 4.5 / 8 == BLOCK_BYTES, f"{BLOCK_BYTES} bytes for {elements} elements"
    assert elements // 2 == CODES_BYTES, f"{CODES_BYTES} bytes of codes for {elements} elements"


@pytest.mark.parametrize("routes", [1, 7, 64, 65, 1000, 12288])
@pytest.mark.parametrize("experts", [1, 3, 48])
def test_every_distribution_of_routes_fits_the_table_of_column_tiles(routes: int, experts: int) -> None:
    for width in {width_for(routes, experts, balanced) for balanced in (True, False)}:
        most = max_columns(routes, experts, width)
        for first in (1, routes // 2, routes):
            rest = [(routes - first) // max(experts - 1, 1)] * (experts - 1)
            counts = [routes - sum(rest), *rest]
            needed = sum(-(-count // width) for count in counts)
            assert needed <= most, f"{counts} routes need {needed} tiles of {width} columns; the table holds {most}"


@pytest.mark.parametrize("axes", ["", ",load=slice", ",load=slice,shared=1", ",load=skewed,shared=2"])
def test_a_kernel_expects_the_routes_that_others_expect(axes: str) -> None:
    """The kernel has its own rule for this: an import from another room would not be in the cache key."""
    case = case_of(f"hidden=128,intermediate=128,num_experts=16,tokens=21,topk=3{axes}")
    assert sm90.expected_routes(case) == routing.expected_routes(case), f"{case.id}: the column tile is of other loads"


def test_a_tile_of_more_than_128_columns_is_of_f16_alone() -> None:
    """A kernel with that many columns that takes bf16 tokens needs a stack."""
    assert width_for(6144, 48, balanced=False) == 152, "128 rows an expert come by chance: most fit in one such tile"
    assert width_for(6144, 48, balanced=False, bf16=True) <= 128, "a bf16 kernel of 152 columns spills"


@pytest.mark.parametrize("mean", [11, 21, 43, 85, 128, 171, 600])
def test_most_columns_hold_a_row(mean: int) -> None:
    """A wide tile's time is set by its columns. Loads are random, so some experts have more rows than most."""
    experts = 48
    counts = torch.randint(experts, (mean * experts,), generator=torch.Generator().manual_seed(mean)).bincount()
    width = width_for(mean * experts, experts, balanced=False)
    columns = int((-(-counts // width) * width).sum())
    assert columns <= 1.6 * mean * experts, f"{columns} columns in tiles of {width} for {mean * experts} rows"


def test_an_epilogue_stages_what_is_left_of_a_width() -> None:
    """152 columns: 64 tokens in L1's staging, 64 more, then 24. A test below checks that this kernel has no stack."""
    plan, empty = Sm90MoePlan(WIDTHS[-1], swiglu=True), 11
    assert plan.width % plan.staged_tokens > empty, f"{plan.width} columns: nothing is left, or no token lies there"
    text = f"hidden=128,intermediate=128,num_experts=1,tokens={plan.width - empty},topk=1,stage=l1"
    seen, broken = outputs(case_of(text), program_of(text, width=plan.width), "lazy")
    assert broken is None, f"{text}: {broken}"
    assert not refusal(text, seen), f"{text}: {refusal(text, seen)}"


@pytest.mark.parametrize("stage", ["l1", "l2"])
def test_no_kernel_uses_local_memory(stage: str) -> None:
    for kernel, resources in made(lambda: sm90.compiled(stage, WIDTHS[-1])).resources.items():
        assert resources.stack == 0, f"{kernel} has {resources.stack} bytes of stack a thread"


@pytest.mark.parametrize(
    ("text", "width", "schedules"),
    [(L1, 16, ("random:1",)), (W4A16, 8, ("random:2",)), (L2, 16, ("eager", "late_cta:0"))],
)
def test_ctas_that_share_tiles_agree_with_the_reference(text: str, width: int, schedules: tuple[str, ...]) -> None:
    """Two CTAs for three tiles: one hands its sums over, the other takes them."""
    wanted: dict[str, torch.Tensor] | None = None
    for schedule in schedules:
        seen, broken = outputs(case_of(text), program_of(text, max_ctas=2, width=width), schedule)
        assert broken is None, f"{text} under {schedule}: {broken}"
        assert not refusal(text, seen), f"{text} under {schedule}: {refusal(text, seen)}"
        wanted = wanted or seen
        for name, tensor in seen.items():
            assert torch.equal(tensor.view(torch.uint8), wanted[name].view(torch.uint8)), (
                f"{text}: {name} under {schedule} differs from {schedules[0]}: a sum depends on who is first"
            )


@pytest.mark.parametrize("stage", ["l1", "l2"])
def test_a_cta_expands_one_row_after_another(stage: str) -> None:
    """On 132 SMs that takes more than 3168 rows. The second expert's rows have other tokens than the rows before
    them."""
    text = f"hidden=128,intermediate=128,num_experts=2,tokens=28,stage={stage}"
    # It imports CuTeDSL, and no other test should wait for that.
    expand = pytest.importorskip("backends.cutedsl.sm90_moe.expand")
    assert expand.CTAS_PER_SM < 2 * 16, "the rows of two column tiles, for the CTAs of one SM"
    seen, broken = outputs(case_of(text), program_of(text, max_ctas=1), "eager")
    assert broken is None, f"{text}: {broken}"
    assert not refusal(text, seen), f"{text}: {refusal(text, seen)}"


# None of these faults leaves a flag unset: the machine would only wait for it until its limit.
FAULTS: dict[str, Callable[[str], str]] = {
    "sums taken before they are there": lambda ptx: ptx.replace("st.release.gpu", "st.relaxed.gpu"),
    "stages given back while the tensor core reads them": without(r"wgmma\.wait_group"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_noticed(name: str) -> None:
    program = program_of(L2, max_ctas=2)
    faulty = replace(program, ptx=FAULTS[name](program.ptx))
    assert faulty.ptx != program.ptx, f"{name}: the kernel has no such instruction any more"
    seen, broken = outputs(case_of(L2), faulty, "lazy")
    assert broken or refusal(L2, seen), f"{name}: nobody minds"


UNFENCED = "smem_unfenced_overwrites"


def test_copies_over_weights_that_threads_have_read_are_fenced() -> None:
    """Threads read weights through the generic proxy; the ISA wants a proxy fence before a bulk copy over them."""
    program = program_of(L2, max_ctas=2)
    found = counters(case_of(L2), program).get(UNFENCED, 0)
    assert not found, f"{found} bulk copies overwrite what threads have read, with no proxy fence in between"
    bare = replace(program, ptx=without(r"fence\.proxy\.async")(program.ptx))
    assert bare.ptx != program.ptx, "the kernel has no proxy fence"
    assert counters(case_of(L2), bare).get(UNFENCED, 0), "the fences are gone, and nobody minds"


def test_a_call_on_weights_that_were_not_prepared_is_noticed() -> None:
    text = "hidden=128,intermediate=128,num_experts=1,tokens=1,stage=l2"
    seen, broken = outputs(case_of(text), replace(program_of(text), prepare=()))
    assert broken or refusal(text, seen), "the packed weights were never written, and nobody minds"

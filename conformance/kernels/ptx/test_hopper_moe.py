"""The ptx backend's MoE kernels for sm_90a: they assemble and fit; weights are repacked without loss; neither the
number of CTAs nor the schedule changes a bit. Each checker meets a planted fault."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from backends.ptx import BACKEND, assembler
from backends.ptx.assembler import AssemblyError
from backends.ptx.moe.routing import COLUMN_WORDS
from backends.ptx.shared_memory import MAX_SMEM
from backends.ptx.sm90_moe.geometry import (
    PRODUCER_REGISTERS,
    UNIT_STEPS,
    WIDEST,
    ColumnTiling,
    widest_for,
    widths_up_to,
)
from backends.ptx.sm90_moe.kernel import PTX_VERSION, l1_kernel, l2_kernel
from backends.ptx.sm90_moe.swiglu import SwigluForm
from backends.vm.executor import EXECUTOR
from conformance.kernels.ptx.test_assembles import assembled, check_arguments, local_memory_bytes
from conformance.kernels.ptx.test_moe_layer import Tensors, case_of, differences, is_noticed, run, spec
from megamoe.codec.nvfp4 import decode_e4m3, unpack, unswizzle_scales
from megamoe.codec.routing import routing
from megamoe.contract import BufferArg, Case, Launch, Program, RunOptions, load_executor
from megamoe.judge.comparison import compared, expected_of
from megamoe.judge.guarded import GuardedCase
from megamoe.ops import reference

SM_REGISTERS = 1 << 16
STAGES = ("layer", "l1", "requantise", "l2", "combine")
SMALL = "hidden=512,intermediate=256,num_experts=2,tokens=20,topk=1,load=skewed"
"""More stages on a CTA than the ring has, tiles for mma.sync and tiles for wgmma."""
TILINGS = [ColumnTiling.of(widest, rows) for widest in WIDEST for rows in (128, 256)]


def built(axes: str, *, ctas: int | None = None) -> Program:
    """The program of a case; its grouped GEMMs run on `ctas` persistent CTAs if given."""
    program = BACKEND.build(case_of(axes), "sm_90a")
    if ctas is None:
        return program
    launches = [replace(one, grid=(ctas, 1, 1)) if _is_gemm(one) else one for one in program.launches]
    return replace(program, launches=tuple(launches))


def _is_gemm(launch: Launch) -> bool:
    return launch.entry.startswith(("moe_swiglu", "moe_rows"))


@cache
def plain(axes: str) -> Tensors:
    """The outputs of a case under the schedule eager."""
    outputs, sentence = run(case_of(axes), built(axes))
    assert not sentence, f"{axes}: {sentence}"
    return outputs


@pytest.mark.parametrize(
    "tiling",
    [
        *(ColumnTiling.of(8, 128), ColumnTiling.of(64, 256), ColumnTiling.of(128, 256), ColumnTiling.of(256, 256)),
        ColumnTiling.of(32, 256, bf16=True),
    ],
)
def test_a_gemm_assembles_without_spills(tiling: ColumnTiling) -> None:
    variant = SwigluForm(clamped=tiling.widest != 128, weighted=tiling.widest != 128)
    for kernel in (l1_kernel(variant, tiling), l2_kernel(tiling)):
        assembly = assembled(kernel.builder.text(), "sm_90a")
        assert local_memory_bytes(assembly) == 0, f"{kernel.builder.entry} uses local memory: {assembly}"
        needed = tiling.registers * tiling.consumers + PRODUCER_REGISTERS * 128
        assert needed <= assembly.registers * tiling.threads, (
            f"{kernel.builder.entry}: setmaxnreg asks for {needed} registers where the CTA is launched with "
            f"{assembly.registers} for each of {tiling.threads} threads: an H200 would wait for ever"
        )
        assert assembly.registers * tiling.threads <= SM_REGISTERS


@pytest.fixture
def older_ptxas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses Triton's assembler: 12.9 leaves fewer registers than the pinned one, as does the 13.0 of a device
    machine."""
    triton = importlib.util.find_spec("triton")
    ptxas = Path(str(triton.origin)).parent / "backends" / "nvidia" / "bin" / "ptxas" if triton else None
    if ptxas is None or not ptxas.is_file():
        pytest.skip("unsupported: Triton, which brings an older ptxas, is not installed")
    monkeypatch.setattr(assembler, "find_ptxas", lambda: ptxas)


@pytest.mark.usefixtures("older_ptxas")
@pytest.mark.parametrize("tiling", [ColumnTiling.of(64, 256), ColumnTiling.of(256, 256)])
def test_the_widest_tiles_fit_an_older_ptxas(tiling: ColumnTiling) -> None:
    assembled(l1_kernel(SwigluForm(clamped=True, weighted=True), tiling).builder.text(), "sm_90a")


@pytest.mark.usefixtures("older_ptxas")
def test_serialised_wgmmas_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ColumnTiling, "group_steps", property(lambda _: UNIT_STEPS))
    with pytest.raises(AssemblyError, match="serialized"):
        assembled(l2_kernel.__wrapped__(ColumnTiling.of(64, 256)).builder.text(), "sm_90a")


@pytest.mark.parametrize("tiling", TILINGS, ids=str)
def test_it_fits_the_machine(tiling: ColumnTiling) -> None:
    assert tiling.smem.size <= MAX_SMEM, f"{tiling.smem.size} bytes of shared memory; a CTA may have {MAX_SMEM}"
    assert tiling.stages >= 3, "codes are loaded a stage ahead of the one that is multiplied"
    ends = 0
    for name, (offset, size) in tiling.smem.places.items():
        assert offset >= ends, f"{name} at {offset} overlaps what ends at {ends}"
        ends = offset + size


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("weight", ["before", "after"])
def test_arguments_are_the_parameters(stage: str, weight: str) -> None:
    program = built(f"hidden=256,intermediate=128,num_experts=4,tokens=6,topk=2,stage={stage},weight={weight}")
    assert assembled(program.ptx, "sm_90a").code_size > 0
    for launch in (*program.prepare, *program.launches):
        check_arguments(program.ptx, launch)


@pytest.mark.parametrize("stage", STAGES)
def test_prepare_reads_weights_alone(stage: str) -> None:
    """Prepared data is neither timed nor counted, so it must not depend on activations."""
    program = built(f"{SMALL},stage={stage}")
    read = {arg.tensor for launch in program.prepare for arg in launch.args if isinstance(arg, BufferArg)}
    inputs = read - set(program.scratch)
    assert inputs <= {"w1_codes", "w1_sf", "w2_codes", "w2_sf"}, f"stage {stage}: prepare reads {sorted(inputs)}"


def test_preparing_again_changes_and_costs_nothing() -> None:
    """Preparation launches are not counted, and weights that are repacked twice are the same."""
    axes = "hidden=128,intermediate=128,num_experts=1,tokens=3,stage=l2"
    guarded = GuardedCase(spec(), case_of(axes), load_executor("vm"))
    once = built(axes)
    first, second = (guarded.run(program) for program in (once, replace(once, prepare=once.prepare * 2)))
    assert first.execution.counters == second.execution.counters, "a launch that prepares is counted"
    assert not differences(first.settled, second.settled), "weights repacked twice give other outputs"
    counted = guarded.run(replace(once, launches=(*once.prepare, *once.launches), prepare=()))
    assert counted.execution.counters != first.execution.counters, "the counters do not see a launch more"


UNFENCED = "smem_unfenced_overwrites"


def test_copies_over_weights_that_threads_have_read_are_fenced() -> None:
    """Threads read weights through the generic proxy; the ISA wants a proxy fence before a bulk copy over them."""
    axes = f"{SMALL},stage=l1"
    guarded, program = GuardedCase(spec(), case_of(axes), load_executor("vm")), built(axes, ctas=1)
    found = guarded.run(program).execution.counters.get(UNFENCED, 0)
    assert not found, f"{found} bulk copies overwrite what threads have read, with no proxy fence in between"
    fence = "fence.proxy.async.shared::cta;"
    assert fence in program.ptx, "the kernel has no proxy fence"
    bare = replace(program, ptx=program.ptx.replace(fence, ""))
    assert guarded.run(bare).execution.counters.get(UNFENCED, 0), "the fences are gone, and nobody minds"


@pytest.mark.parametrize(("interleave", "inputs"), [(8, "full_range"), (32, "zero_blocks")])
def test_repacked_weights_are_the_weights(interleave: int, inputs: str) -> None:
    """Unpacked by the layout's own definition, fragments and block scales give every weight, in gate and up pairs."""
    axes = f"hidden=128,intermediate=128,num_experts=2,tokens=2,topk=1,interleave={interleave},inputs={inputs},stage=l1"
    wrong = _wrong_weights(case_of(axes), built(axes), interleave)
    assert not wrong, f"{axes}: {wrong} of the weights are wrong"


def test_a_wrong_repacking_is_noticed() -> None:
    axes = "hidden=128,intermediate=128,num_experts=2,tokens=2,topk=1,interleave=8,inputs=full_range,stage=l1"
    whole = built(axes)
    right = "add.u32 %sf_bytes, %sf_bytes, 0x380038;"
    assert right in whole.ptx, f"the kernel has no {right!r}"
    faulty = replace(whole, ptx=whole.ptx.replace(right, "add.u32 %sf_bytes, %sf_bytes, 0x400038;"))
    assert _wrong_weights(case_of(axes), faulty, 8), "block scales twice too large go unnoticed"


def _wrong_weights(case: Case, program: Program, interleave: int) -> int:
    """Counts the weights of w1 that the repacked bytes give wrongly; NaN counts."""
    made = reference(case.op).make_inputs(case)
    packed = torch.zeros(program.scratch["w1_packed"], dtype=torch.uint8)
    alone = replace(program, launches=program.prepare, prepare=(), scratch={})
    tensors = {"w1_codes": made["w1_codes"], "w1_sf": made["w1_sf"], "w1_packed": packed}
    execution = EXECUTOR.run(alone, tensors, RunOptions())
    assert execution.violation is None, execution.violation
    experts, rows, k = case.int("num_experts"), 2 * case.int("intermediate"), case.int("hidden")
    codes = unpack(made["w1_codes"]).view(experts, rows, k)
    scales = torch.stack([decode_e4m3(unswizzle_scales(sf, rows, k // 16)) for sf in made["w1_sf"]])
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    wanted = values[(codes & 7).long()] * (1 - 2 * (codes >> 3).float()) * scales.repeat_interleave(16, dim=2)
    pairs = wanted.view(experts, -1, 2, interleave, k).transpose(2, 3).reshape(experts, -1, 2, k)
    found = _decoded(packed).view(experts, rows // 128, k // 64, 8, 16, 64).permute(0, 1, 3, 4, 2, 5).reshape(-1, 16, k)
    gates_and_ups = found.view(-1, 2, 8, k).transpose(1, 2).reshape(experts, -1, 2, k)
    return int((gates_and_ups != pairs).sum())


def _decoded(packed: torch.Tensor) -> torch.Tensor:
    """float32 [units, 16-row groups of a panel, 16, 64], as geometry.py, repack.py and unpack.py document it."""
    blocks = packed.view(-1, 2304)
    words = blocks[:, :2048].reshape(-1, 4, 32, 4, 4).to(torch.int64)
    word = (words << torch.tensor([0, 8, 16, 24])).sum(-1)  # block, warp, lane, k-step
    scale = blocks[:, 2048:].view(-1, 4, 8, 2, 2, 2)  # block, warp, row pair, pair of blocks, block, row of the pair
    exponent, mantissa = (scale >> 3).float(), (scale & 7).float()
    scales = (1 + mantissa / 8) * 2.0 ** (exponent - 22)
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    made = torch.zeros(len(blocks), 4, 16, 64)
    for step in range(4):
        code_word = word[..., step]
        registers = (code_word << 6, code_word << 9, code_word ^ code_word << 2, code_word ^ code_word >> 3)
        for half in range(2):
            for fragment, bits in enumerate(register >> 16 * half for register in registers):
                value = values[bits >> 9 & 7] * (1 - 2 * (bits >> 15 & 1).float())
                lane = torch.arange(32)
                row, element = lane // 4 + 8 * (fragment % 2), 8 * (step % 2) + 4 * (fragment // 2) + lane % 4
                column = 32 * (step // 2) + 16 * half + element
                by = scales[:, :, lane // 4, step // 2, half, fragment % 2]
                made[:, :, row, column] = value * by
    return made.view(-1, 8, 16, 64)


@pytest.mark.parametrize(("stage", "schedule"), [("l1", "random:1"), ("l2", "lazy")])
def test_persistence_changes_no_bit(stage: str, schedule: str) -> None:
    """One CTA that processes all tiles gives the same bits as one CTA a tile."""
    axes = f"{SMALL},stage={stage}"
    outputs, sentence = run(case_of(axes), built(axes, ctas=1), schedule)
    assert not sentence, f"{axes} on one CTA: {sentence}"
    assert not differences(outputs, plain(axes)), f"{axes}: one CTA computes other bits, {schedule}"


@pytest.mark.parametrize(
    ("stage", "taken_out"),
    [
        ("l2", "%ring_full_completed, ["),
        ("l1", "%ring_empty_completed, ["),
        ("l1", "wgmma.wait_group.sync.aligned 1;"),
        ("l2", "wgmma.wait_group.sync.aligned 0;"),
        ("l1", "// the staging is full"),
    ],
)
def test_a_missing_wait_is_noticed(stage: str, taken_out: str) -> None:
    axes = f"{SMALL},stage={stage}"
    assert is_noticed(case_of(axes), built(axes, ctas=1), taken_out, plain(axes)), (
        f"stage {stage} without {taken_out!r} goes unnoticed under every schedule"
    )


@pytest.mark.parametrize(
    "axes",
    [
        "hidden=128,intermediate=128,num_experts=12,tokens=40,topk=3,load=skewed",
        "hidden=128,intermediate=128,num_experts=6,tokens=40,topk=4,load=slice",
        "hidden=128,intermediate=128,num_experts=9,tokens=1,topk=2,load=one_token",
    ],
)
def test_column_tiles_hold_every_row_once(axes: str) -> None:
    """Each in the narrowest width that holds its rows, expert by expert."""
    case = case_of(f"{axes},stage=combine")
    program = BACKEND.build(case, "sm_90a")
    topk_ids = reference(case.op).make_inputs(case)["topk_ids"]
    tables = {name: torch.full((size // 4,), -2, dtype=torch.int32) for name, size in program.scratch.items()}
    alone = replace(program, launches=program.launches[:1], scratch={})
    execution = EXECUTOR.run(alone, {"topk_ids": topk_ids, **tables}, RunOptions())
    assert execution.violation is None, execution.violation
    count = int(tables["column_count"])
    columns = tables["columns"].view(-1, COLUMN_WORDS)[:count].tolist()
    routes = routing(case, topk_ids)
    held = [first + row for _, first, rows, _ in columns for row in range(rows)]
    assert held == sorted(routes.row.tolist()), f"{axes}: the column tiles hold other rows"
    widths = widths_up_to(widest_for(case.int("tokens") * case.int("topk"), case.int("num_experts")))
    expert_of_row = dict(zip(routes.row.tolist(), routes.expert.tolist(), strict=True))
    for expert, first, rows, width in columns:
        assert width == next(one for one in widths if one >= rows), f"{axes}: {rows} rows in a tile of {width}"
        assert expert_of_row[first] == expert, f"{axes}: row {first} is not of expert {expert}"


@pytest.mark.parametrize("stage", ["l1", "l2"])
def test_an_epilogue_stages_what_is_left_of_an_odd_width(stage: str) -> None:
    """101 rows in 112 columns: three times 32 tokens in the staging, then 16."""
    axes = f"hidden=128,intermediate=128,num_experts=1,tokens=101,topk=1,stage={stage}"
    case = case_of(axes)
    verdict = compared(spec(), expected_of(case, reference(case.op).make_inputs(case)), plain(axes))
    assert verdict.passed, f"{axes}: {verdict.sentence}"


def test_two_warpgroups_where_four_leave_most_sms_idle() -> None:
    """192 tiles of 256 rows are two rounds of 132 SMs; 384 of 128 rows are three, each half as long."""
    for experts, warpgroups in ((1, 4), (5, 4), (8, 2), (48, 4)):
        found = ColumnTiling.of(8, 6144, experts=experts).warpgroups
        assert found == warpgroups, f"{experts} experts of 6144 rows: {found} warpgroups, where {warpgroups} take less"


def test_two_warpgroups_leave_the_bits_of_four(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three tiles of 256 rows on two SMs are two rounds; six of 128 rows are three, each half as long."""
    axes = "hidden=128,intermediate=128,num_experts=3,tokens=6,topk=1,stage=l1"
    four, program = plain(axes), built(axes)
    monkeypatch.setattr("backends.ptx.sm90_moe.geometry.SM_COUNT", 2)
    narrower = built(axes)
    assert narrower.ptx != program.ptx, "the kernel still has four warpgroups, so nothing was tested"
    two, sentence = run(case_of(axes), narrower)
    assert not sentence, f"{axes} in tiles of 128 rows: {sentence}"
    assert not differences(two, four), f"{axes}: tiles of 128 rows leave other bits than those of 256"


def test_the_declared_version_is_the_lowest() -> None:
    assert PTX_VERSION == (8, 0), "wgmma and cp.async.bulk appeared in PTX ISA 8.0"

"""What each class of mutants changes in a program, their ids and their draws."""

from __future__ import annotations

from dataclasses import replace

import pytest

from conformance.kernels.mutants.campaign import drawn
from conformance.kernels.mutants.mutant import KINDS, LaunchEdit, Mutant, instructions, mutants
from megamoe.contract import BufferArg, Launch, Program, ScalarArg, TensorMapArg

PTX = """\
.version 8.6
.visible .entry k(.param .u64 a)
{
    .reg .pred %p, %done;  // bar.sync 9;
    mbarrier.init.shared::cta.b64 [%smem + 8], 1;
    fence.proxy.async.shared::cta;
    bar.sync 1, 128;
$again:
    mbarrier.try_wait.parity.shared::cta.b64 %done, [%smem + 8], %phase;
    @!%done bra $again;
    ld.shared.u32 %x, [%smem];
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%smem + 8], 64;
    cp.async.bulk.wait_group.read 0;
    fence.acq_rel.gpu;
    cp.async.bulk.wait_group 1;
    add.s32 %y, %x, 7;
    setp.lt.u32 %p, %x, %y;
    @%p st.global.f32 [%a + 4], %f;
    fma.rn.ftz.f32 %f, %g, %h, 0f3F800000;
    wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%d0,
        %d1}, %da, %db, %p, 1, 1, 0, 0;
    tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r}, [%taddr + 8];
    tcgen05.mma.cta_group::1.kind::f16 [%taddr], %da, %db, %idesc, %p;
    ret;
}
"""
PROGRAM = Program(
    "sm_90a",
    PTX,
    (
        Launch(
            "k",
            (4, 1, 1),
            (128, 1, 1),
            (BufferArg("q"), ScalarArg("u32", 7), TensorMapArg("q", "bf16", (64, 9), (128,), (64, 8), "128B")),
        ),
    ),
)
EXPECTED = {
    "drop": {"", "setp.eq.u32 %done, 0, 0;"},
    "weaken": {
        "bar.arrive 1, 128;",
        "fence.proxy.async.global;",
        "fence.acq_rel.cluster;",
        "cp.async.bulk.wait_group.read 1;",
        "cp.async.bulk.wait_group 2;",
    },
    "widen": {
        "fence.proxy.async;",
        "cp.async.bulk.wait_group 0;",
        "fence.acq_rel.sys;",
    },
    "parity": {
        "xor.b32 %phase, %phase, 0x1; mbarrier.try_wait.parity.shared::cta.b64 %done, [%smem + 8], %phase; "
        "xor.b32 %phase, %phase, 0x1;"
    },
    "count": {"mbarrier.init.shared::cta.b64 [%smem + 8], 2;", "bar.sync 2, 128;", "bar.sync 1, 96;"},
    "bytes": {"mbarrier.arrive.expect_tx.shared::cta.b64 _, [%smem + 8], 80;"},
    "instruction-descriptor": {
        "xor.b32 %idesc, %idesc, 0x2000; tcgen05.mma.cta_group::1.kind::f16 [%taddr], %da, %db, %idesc, %p; "
        "xor.b32 %idesc, %idesc, 0x2000;",
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%d0, %d1}, %da, %db, %p, 1, 1, 1, 0;",
    },
    "tensor-memory": {"tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r}, [%taddr + 9];"},
    "setp": {"setp.le.u32 %p, %x, %y;"},
    "immediate": {"add.s32 %y, %x, 8;", "fma.rn.ftz.f32 %f, %g, %h, 0f3F820000;"},
    "address": {"@%p st.global.f32 [%a + 8], %f;"},
    "operand": {"setp.lt.u32 %p, %y, %x;", "fma.rn.ftz.f32 %f, %g, %g, 0f3F800000;"},
    "opcode": {"sub.s32 %y, %x, 7;"},
    "predicate": {"@%done bra $again;", "@!%p st.global.f32 [%a + 4], %f;"},
    "guard": {"st.global.f32 [%a + 4], %f;"},
    "rounding": {"fma.rz.ftz.f32 %f, %g, %h, 0f3F800000;", "fma.rn.f32 %f, %g, %h, 0f3F800000;"},
    "store": {""},
}


def _of_kind(kind: str) -> list[Mutant]:
    return [one for one in mutants(PROGRAM) if one.kind == kind]


@pytest.mark.parametrize("kind", EXPECTED)
def test_each_class_changes_what_it_says(kind: str) -> None:
    made = {edit.text for one in _of_kind(kind) for edit in one.edits}
    assert EXPECTED[kind] <= made, f"{kind} makes {sorted(made)}"


def test_a_wait_moves_as_a_whole_and_an_arrival_both_ways() -> None:
    texts = [one.of(PROGRAM).ptx for one in _of_kind("move")]
    moved = (
        "ld.shared.u32 %x, [%smem]; $again: mbarrier.try_wait.parity.shared::cta.b64 %done, [%smem + 8], %phase; "
        "@!%done bra $again;"
    )
    assert any(moved in text for text in texts), "the wait stands behind the load, with its label and its branch"
    arrival = "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%smem + 8], 64;"
    assert any(f"{arrival} ld.shared.u32" in text for text in texts), "an arrival before what it publishes"


def test_a_matrix_descriptor_is_changed_and_changed_back() -> None:
    for one in _of_kind("matrix-descriptor"):
        before, _, after = (part.strip() for part in one.edits[0].text.rstrip(";").split(";"))
        undone = {"add": "sub", "xor": "xor"}[before[:3]] + before[3:]
        assert after == undone, f"{one.id}: the register keeps its change: {after}"


def test_launches_and_tensor_maps_change() -> None:
    changed = [one.of(PROGRAM) for one in mutants(PROGRAM) if one.launch is not None]
    launches = [one.launches[0] for one in changed if isinstance(one, Program)]
    assert {launch.grid[0] for launch in launches} >= {3, 5}
    assert 96 in {launch.block[0] for launch in launches}
    assert {launch.args[1] for launch in launches} >= {ScalarArg("u32", 8), ScalarArg("u32", 6)}
    maps = [launch.args[2] for launch in launches]
    assert {part.dims for part in maps if isinstance(part, TensorMapArg)} >= {(63, 9), (64, 10)}
    assert {part.swizzle for part in maps if isinstance(part, TensorMapArg)} == {"128B", "64B"}


def test_a_size_that_would_vanish_stays() -> None:
    small = replace(PROGRAM, launches=(replace(PROGRAM.launches[0], grid=(1, 1, 1)),))
    assert LaunchEdit(0, None, "grid", 0, -1).of(small).launches[0].grid == (1, 1, 1)


def test_every_mutant_has_a_name_and_keeps_the_lines() -> None:
    made = list(mutants(PROGRAM))
    assert len({one.id for one in made}) == len(made), "two mutants have one id"
    assert [one.id for one in mutants(PROGRAM)] == [one.id for one in made], "ids depend on the text alone"
    assert {one.kind for one in made} == set(KINDS), "a class without an example proves nothing"
    for one in made:
        changed = one.of(PROGRAM)
        assert changed != PROGRAM, f"{one.id} changes nothing"
        assert changed.ptx.count("\n") == PTX.count("\n"), f"{one.id}: findings would name other lines"


def test_comments_are_no_instructions() -> None:
    assert "bar.sync 9;" not in {one.spelled() for one in instructions(PTX)}
    (wide,) = (one for one in instructions(PTX) if one.opcode.startswith("wgmma.mma"))
    assert (wide.line, wide.operands[0]) == (20, "{%d0, %d1}"), "an instruction of two lines"


def test_draws_are_repeatable_and_take_classes_in_turn() -> None:
    every = list(mutants(PROGRAM))
    few = drawn(every, len(KINDS), 0)
    assert {one.kind for one in few} == set(KINDS)
    assert few == drawn(list(reversed(every)), len(KINDS), 0), "the order of the text decides nothing"
    assert few != drawn(every, len(KINDS), 1), "another seed draws others"

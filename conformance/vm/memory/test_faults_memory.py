"""Planted faults of ordinary memory and registers, each blamed by line, warp, lane, address and last writer."""

from __future__ import annotations

import numpy as np
import pytest

from backends.vm.faults import Fault
from backends.vm.memory import global_memory
from conformance.vm.kernel import EVERY_SCHEDULE, Kernel, assert_blamed, assert_clean, fault_of

OUT = np.zeros(64, np.uint32)


def shared(body: str, **options: object) -> Kernel:
    options.setdefault("buffers", {"out": OUT})
    return Kernel(".shared .align 16 .b8 buf[256];\n" + body, **options)  # type: ignore[arg-type]


BRANCH = "setp.ne.u32 %p9, USED, 0;\n@%p9 bra END; //!\nEND: ret;"
"""Reading and copying an undefined value is no fault; branching on it is, in the lanes that do."""
UNINITIALISED = {
    "one byte": (
        "st.shared.b8 [buf+1], %tx;\nld.shared.u16 %r1, [buf]; and.b32 %r1, %r1, 255;",
        "byte 0x400 of shared memory",
        "lane 0",
    ),
    "a lane": (
        """shl.b32 %r2, %lane, 2; mov.u32 %r3, buf; add.u32 %r2, %r2, %r3;
        setp.ne.u32 %p1, %lane, 5;
        @%p1 st.shared.u32 [%r2], 7;
        ld.shared.u32 %r1, [%r2];""",
        "lane 5",
        "byte 0x414 of shared memory",
    ),
    "the last of a vector": (
        "st.shared.v2.u32 [buf], {%tx, %tx}; st.shared.u32 [buf+8], %tx;\nld.shared.v4.u32 {%r2,%r3,%r4,%r1}, [buf];",
        "byte 0x40c of shared memory",
    ),
    "through a generic address": (
        "mov.u64 %rd1, buf; cvta.shared.u64 %rd1, %rd1;\nld.u32 %r1, [%rd1];",
        "byte 0x400 of shared memory",
    ),
}


@pytest.mark.parametrize("name", UNINITIALISED)
def test_a_branch_on_shared_memory_that_nobody_wrote(name: str) -> None:
    body, *clauses = UNINITIALISED[name]
    kernel = shared(f"{body}\n{BRANCH.replace('USED', '%r1')}")
    assert_blamed(
        kernel, "uninitialised-shared", "CTA (0, 0, 0), warp 0", "`%p9` decides where this branch goes", *clauses
    )


REGISTERS = {
    "never written": ("add.u32 %r1, %r2, 1;", "`%r2`", "lane 0"),
    "written under a guard": ("setp.lt.u32 %p1, %tx, 7;\n@%p1 mov.u32 %r1, 3;", "`%r1`", "lane 7"),
    "written by one side of a branch": (
        """setp.eq.u32 %p1, %lane, 9;
        @%p1 bra SKIP;
        mov.u32 %r2, 1;
        SKIP: add.u32 %r1, %r2, 1;""",
        "`%r2`",
        "lane 9",
    ),
    "carried around a loop": (
        """mov.u32 %r3, 0; mov.u32 %r1, 1;
        LOOP: setp.eq.u32 %p1, %r3, 2;
        @%p1 add.u32 %r1, %r2, 0;
        setp.eq.u32 %p2, %r3, 5;
        @%p2 mov.u32 %r2, 1;
        add.u32 %r3, %r3, 1;
        setp.lt.u32 %p3, %r3, 4;
        @%p3 bra LOOP;""",
        "`%r2`",
    ),
    "as a guard": ("mov.u32 %r1, 1; @%p5 mov.u32 %r1, 0;", "`%p5`"),
    "as half of a pair": (
        """mov.u32 %r4, 0; mov.b64 %rd1, {%r4, %r2};
        mov.b64 {%r3, %r4}, %rd1;
        add.u32 %r1, %r4, %r3;""",
        "`%r2`",
    ),
    "as half of a packed sum": (
        """mov.u32 %r4, 0; mov.b64 %rd1, {%r4, %r2}; add.f32x2 %rd2, %rd1, %rd1;
        mov.b64 {%r3, %r4}, %rd2;
        add.f32 %r1, %r4, %r3;""",
        "`%r2`",
    ),
    "as a pair": (
        "mov.u32 %r4, 0; mov.b64 %rd1, {%r2, %r4};\nadd.u64 %rd2, %rd1, 1; mov.b64 {_, %r1}, %rd2;",
        "`%r2`",
    ),
    "copied, in some lanes": (
        """setp.ge.u32 %p1, %lane, 4;
        @%p1 mov.u32 %r3, 0;
        mov.u32 %r2, %r3;
        add.u32 %r1, %r2, 1;""",
        "`%r3`",
        "lane 0",
    ),
}


@pytest.mark.parametrize("name", REGISTERS)
def test_a_branch_on_a_register_that_this_lane_never_wrote(name: str) -> None:
    body, *clauses = REGISTERS[name]
    kernel = Kernel(f"{body}\n{BRANCH.replace('USED', '%r1')}", {"out": OUT})
    assert_blamed(kernel, "uninitialised-register", "was never written in this lane", *clauses)


DECISIONS = {
    "an address": ("ld.global.u32 %r1, [%rd3]; //!", "`%rd3` decides the address"),
    "the guard of a store": ("@%p5 st.global.u32 [%out], %tx; //!", "`%p5` decides whether this instruction is"),
    "the guard of a branch": ("@%p5 bra END; //!\nEND: ret;", "`%p5` decides where this branch goes"),
    "a result": ("mov.u32 %r1, 0;\nst.global.v2.u32 [%out], {%r1, %r2}; //!", "`%r2`", "byte 4 of `out`"),
    "a lane index": ("mov.u32 %r1, 0; shfl.sync.idx.b32 %r3, %r1, %r2, 31, -1; //!", "`%r2` decides what this shfl"),
    "a member mask": ("vote.sync.any.pred %p1, %p1, %r2; //!", "`%r2`"),
    "a barrier": ("bar.sync %r2; //!", "`%r2` decides what this bar.sync does"),
    "an atomic": ("red.global.add.u32 [%out], %r2; //!", "`%r2` decides what this red"),
}


@pytest.mark.parametrize("name", DECISIONS)
def test_what_an_undefined_register_may_not_decide(name: str) -> None:
    body, *clauses = DECISIONS[name]
    if "%p1, %p1" in body:
        body = f"setp.eq.u32 %p1, %tx, 0;\n{body}"
    assert_blamed(Kernel(body, {"out": OUT}), "uninitialised-register", "was never written in this lane", *clauses)


def test_the_written_half_of_a_pair_can_be_taken_out() -> None:
    body = """cvt.rn.f32.u32 %r1, %tx; mov.b64 %rd1, {%r1, %r2}; mov.b64 %rd4, %rd1;
        add.f32x2 %rd2, %rd4, %rd4; sub.f32x2 %rd2, %rd2, %rd4;
        mov.b64 {%r3, _}, %rd2;
        mul.lo.u32 %r4, %tx, 4; cvt.u64.u32 %rd3, %r4; add.u64 %rd3, %out, %rd3;
        st.global.u32 [%rd3], %r3;"""
    assert_clean(Kernel(body, {"out": OUT[:32]}), {"out": np.arange(32, dtype=np.float32).view(np.uint32)})


def test_registers_written_on_every_path_are_not_doubted() -> None:
    body = """setp.lt.u32 %p1, %tx, 7;
    @%p1 mov.u32 %r1, 100;
    @!%p1 mov.u32 %r1, 200;
    setp.lt.u32 %p2, %tx, 16;
    @%p2 bra LOW;
    mov.u32 %r2, 1; bra JOIN;
    LOW: mov.u32 %r2, 2;
    JOIN: mov.u32 %r4, 0;
    LOOP: @%p1 add.u32 %r3, %r1, %r2;
    @!%p1 sub.u32 %r3, %r1, %r2;
    add.u32 %r4, %r4, 1; setp.lt.u32 %p3, %r4, %lane; @%p3 bra LOOP;
    mul.wide.u32 %rd1, %tx, 4; add.u64 %rd1, %rd1, %out; st.global.u32 [%rd1], %r3; ret;"""
    lane = np.arange(32)
    low = np.where(lane < 16, 2, 1)
    expected = np.where(lane < 7, 100 + low, 200 - low).astype(np.uint32)
    assert_clean(Kernel(body, {"out": OUT[:32]}), {"out": expected})


ADDRESSES = {
    "global, misaligned": (
        "setp.eq.u32 %p1, %lane, 3;\n@%p1 ld.global.u32 %r1, [%out+2]; //!",
        "misaligned",
        "lane 3",
        "not a multiple of 4 (byte 2 of `out`)",
    ),
    "global, misaligned vector": (
        "ld.global.v4.u32 {%r1,%r2,%r3,%r4}, [%out+8]; //!",
        "misaligned",
        "multiple of 16 (byte 8 of `out`)",
    ),
    "global, misaligned destination": (
        "cp.async.bulk.global.shared::cta.bulk_group [%out+4], [buf], 16; //!",
        "misaligned",
        "the destination (byte 4 of `out`) of a bulk copy is not a multiple of 16",
    ),
    "global, misaligned source": (
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [buf], [%out+20], 16, [buf+128]; //!",
        "misaligned",
        "the source (byte 20 of `out`) of a bulk copy is not a multiple of 16",
    ),
    "global, one past the end": (
        "mul.wide.u32 %rd1, %lane, 8; add.u64 %rd1, %rd1, %out;\nst.global.u32 [%rd1+8], %tx; //!",
        "out-of-bounds",
        "lane 31",
        "`out` (256 bytes)",
        "0 bytes after the end",
    ),
    "global, before the start": (
        "sub.u64 %rd1, %out, 16;\nld.global.u32 %r1, [%rd1]; //!",
        "out-of-bounds",
        "lane 0",
        "`out` (256 bytes), 16 bytes before the start",
    ),
    "global, across the end": (
        "cp.async.bulk.global.shared::cta.bulk_group [%out+144], [buf], 128; //!\n"
        "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;",
        "out-of-bounds",
        "is outside of every buffer; it begins at byte 144 of `out` (256 bytes) and runs 16 bytes past its end",
    ),
    "global, in a gap": ("add.u64 %rd1, %out, 65536;\nld.global.u32 %r1, [%rd1]; //!", "out-of-bounds", "`out`"),
    "global, null": ("mov.u64 %rd1, 0;\nld.global.u32 %r1, [%rd1]; //!", "out-of-bounds", "a null pointer"),
    "global, behind null": (
        "mov.u64 %rd1, 0;\nld.global.u32 %r1, [%rd1+8]; //!",
        "out-of-bounds",
        "outside of every buffer",
        "0x8 is 8 bytes behind a null pointer",
    ),
    "global, of nobody": (
        "mov.u64 %rd1, 0x3f800000;\nld.global.u32 %r1, [%rd1]; //!",
        "out-of-bounds",
        "outside of every buffer; the address is 0x3f800000",
    ),
    "global, misaligned and of nobody": (
        "mov.u64 %rd1, 0x3f800001;\nld.global.u32 %r1, [%rd1]; //!",
        "misaligned",
        "not a multiple of 4 (the address is 0x3f800001)",
    ),
    "global, atomic": (
        "setp.eq.u32 %p1, %lane, 4;\n@%p1 red.global.add.u32 [%out+512], 1; //!",
        "out-of-bounds",
        "lane 4",
    ),
    "shared, misaligned": ("ld.shared.u64 %rd1, [buf+4]; //!", "misaligned", "0x404", "multiple of 8"),
    "shared, past the end": ("st.shared.u32 [buf+256], %tx; //!", "out-of-bounds", "0x500", "256 bytes"),
    "shared, in the reserved bytes": ("mov.u32 %r1, 16;\nld.shared.u32 %r2, [%r1]; //!", "out-of-bounds", "0x10"),
    "shared, astray": ("mov.u32 %r1, 0xfffffff0;\nst.shared.u32 [%r1], %tx; //!", "out-of-bounds", "0xfffffff0"),
    "param, past the end": ("ld.param.u32 %r1, [p_out+8]; //!", "out-of-bounds", "8 bytes of parameters"),
    "param, misaligned": ("ld.param.u32 %r1, [p_out+2]; //!", "misaligned", "multiple of 4"),
    "local, past the end": (
        ".local .align 4 .b8 mine[16];\nshl.b32 %r1, %lane, 2;\nst.local.u32 [%r1], %tx; //!",
        "out-of-bounds",
        "lane 4",
        "16 bytes",
    ),
    "remote without ::cluster": (
        "mov.u32 %r1, buf; xor.b32 %r1, %r1, 0x01000000;\nld.shared.u32 %r2, [%r1]; //!",
        "remote-shared",
        "CTA rank",
        "shared::cluster",
    ),
    "remote, no such rank": (
        "mov.u32 %r1, buf; or.b32 %r1, %r1, 0x05000000;\nld.shared::cluster.u32 %r2, [%r1]; //!",
        "remote-shared",
        "CTA rank 5 of a cluster of 2",
    ),
}


@pytest.mark.parametrize("name", ADDRESSES)
def test_accesses_outside_or_askew(name: str) -> None:
    body, rule, *clauses = ADDRESSES[name]
    cluster = (2, 1, 1) if name.startswith("remote") else (1, 1, 1)
    assert_blamed(shared(body, grid=cluster, cluster=cluster), rule, *clauses)


NAMELESS = {
    **{name: shared(body) for name, (body, *_) in ADDRESSES.items() if name.startswith("global")},
    "undefined": Kernel("ld.global.u32 %r1, [%out]; ld.global.u32 %r2, [%out+4]; setp.eq.u32 %p1, %r1, %r2; @%p1 ret;",
                        {"out": OUT}, unwritten=("out",)),
    "undefined, an atomic": Kernel("red.global.add.u32 [%out], 1; ret;", {"out": OUT}, unwritten=("out",)),
    "left undefined": Kernel(".reg .b32 %n; st.global.u32 [%out], %n; ret;", {"out": OUT}),
    "read-only": Kernel("st.global.u32 [%out], 1; ret;", {"out": OUT}, inputs=("out",)),
    "a race": Kernel("st.global.u32 [%out], %cta; ret;", {"out": OUT}, grid=(2, 1, 1)),
    "a map": Kernel(".reg .b32 %z; mov.u32 %z, 0; cp.async.bulk.tensor.1d.global.shared::cta.tile.bulk_group "
                    "[%out+4, {%z}], [%z]; ret;", {"out": OUT}),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMELESS)
def test_a_finding_names_no_address_of_global_memory(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would differ from run to run. Debian's Python has its heap, and so small arrays, at addresses of 30 bits."""
    monkeypatch.setattr(global_memory, "FIRST_ADDRESS", 0x3D00_0000)
    fault = fault_of(NAMELESS[name], "eager")
    assert fault is not None, "nothing was found"
    assert fault.address is None, f"the finding carries an address: {fault}"
    assert "0x3d0" not in str(fault), f"the sentence names an address: {fault}"


def test_inputs_are_read_only() -> None:
    write = Kernel("st.global.u32 [%x], 1; //!", {"x": OUT}, inputs=("x",))
    assert_blamed(write, "read-only", "`x`", "an input", "(byte 0 of `x`)")
    assert_blamed(Kernel("red.global.add.u32 [%x], 1; //!", {"x": OUT}, inputs=("x",)), "read-only", "`x`")


def test_one_generic_access_may_reach_several_state_spaces() -> None:
    """The lanes of a generic access may address different windows (PTX ISA 5.1, 6.4.1.1)."""
    body = """mov.u64 %rd1, buf; cvta.shared.u64 %rd1, %rd1;
    setp.lt.u32 %p1, %lane, 16;
    selp.b64 %rd2, %rd1, %out, %p1;
    mul.wide.u32 %rd3, %lane, 4; add.u64 %rd2, %rd2, %rd3;
    st.u32 [%rd2], %lane;
    ld.u32 %r1, [%rd2];
    add.u64 %rd3, %rd3, %out; st.global.u32 [%rd3], %r1;
    ret;"""
    assert_clean(shared(body), {"out": np.r_[np.arange(32), np.zeros(32)].astype(np.uint32)})


def test_a_guarded_exit_does_not_repeat_what_came_before_it() -> None:
    body = """setp.lt.u32 %p1, %lane, 10;
    red.global.add.u32 [%out], 1;
    @%p1 ret;
    red.global.add.u32 [%out+4], 1;
    ret;"""
    assert_clean(Kernel(body, {"out": OUT[:2]}), {"out": np.array([32, 22], np.uint32)})


FAR = 2**63 - 1
WILD = {
    "a cp.async": f"cp.async.cg.shared.global [%r1+{FAR}], [%x], 16; //!",
    "a load": f"ld.shared.b8 %h0, [%r1+{FAR}]; //!",
    "a store through the cluster": f"st.shared::cluster.b8 [%r1+{FAR}], %h1; //!",
    "a bulk copy": f"cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1+{FAR - 15}], [%x], 16, "
    "[bar]; //!",
    "an offset of 64 bits": f"ld.shared.b8 %h0, [%r1+{2**64 - 2**20}]; //!",
    "a remote mbarrier": f"mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r1+{FAR}]; //!",
}


@pytest.mark.parametrize("name", WILD)
def test_an_address_beyond_all_memory_is_a_finding(name: str) -> None:
    body = f""".shared .align 16 .b8 buf[16]; .shared .align 8 .b64 bar; mov.u32 %r1, buf; mov.b16 %h1, 0;
setp.ne.u32 %p1, %tx, 0; @%p1 ret;
mbarrier.init.shared::cta.b64 [bar], 1;
{WILD[name]}
ret;"""
    kernel = Kernel(body, {"x": np.zeros(16, np.uint8)})
    for schedule in EVERY_SCHEDULE:
        with pytest.raises(Fault) as found:
            kernel.run(schedule)
        assert found.value.line == kernel.blamed_line, f"{schedule}, {name}: {found.value}"

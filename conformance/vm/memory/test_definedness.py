"""Undefined values: they move with the bytes silently, and are a fault where they decide something.

The law: whatever the undefined bytes of the operands hold, the defined bytes of a result are the same.
"""

from __future__ import annotations

import struct
import time

import numpy as np
import pytest

from backends.vm.bind import definedness, lanes
from backends.vm.faults import Findings
from backends.vm.load import load
from backends.vm.machine import code
from backends.vm.machine.machine import Machine
from backends.vm.memory.definedness import DEFINED, Origin
from backends.vm.memory.global_memory import Buffer
from conformance.vm.kernel import FENCE, Array, Kernel, assert_blamed, assert_clean, copy_kernel, init, wait
from conformance.vm.kernel import STORE as STORE_BOX
from conformance.vm.tensor_kernel import COMMIT, LOAD, MMA, STAGES, STORE, mma_kernel

OUT = np.zeros(64, np.uint32)
SOME = ("eager", "lazy", "random:0")
PLACE = "mul.wide.u32 %rd8, %tx, 4; add.u64 %rd9, %out, %rd8;"
"""%rd9 is the address of the thread's word of `out`."""


def kernel(body: str, declare: str = "", **options: object) -> Kernel:
    options.setdefault("buffers", {"out": OUT[:32], "part": np.full(32, 0x5A5A5A5A, np.uint32)})
    options.setdefault("unwritten", ("part",))
    return Kernel(f"{declare}\n{PLACE}\n{body}\nEND: ret;", **options)  # type: ignore[arg-type]


LANES = np.arange(32, dtype=np.uint32)
SILENT = {
    "a value that nobody uses": ("add.u32 %r1, %r2, 1; mul.lo.u32 %r1, %r1, %r2; st.global.b32 [%rd9], %tx;", LANES),
    "the low byte of a half-written pair": (
        """cvt.u16.u32 %h1, %tx; mov.b32 %r1, {%h1, %h2}; st.global.b8 [%rd9], %r1;""",
        LANES,
    ),
    "a converter of four packed floats, of which one is there": (
        """cvt.rn.f32.u32 %f1, %lane; cvt.rn.satfinite.e4m3x2.f32 %h1, %f2, %f1;
        mov.b32 %r1, {%h1, %h2}; prmt.b32 %r1, %r1, 0, 0x4440; st.global.b32 [%rd9], %r1;""",
        None,
    ),
    "the other half of a packed sum": (
        """cvt.rn.f32.u32 %r1, %tx; mov.b64 %rd1, {%r1, %r2}; fma.rn.f32x2 %rd1, %rd1, %rd1, %rd1;
        mov.b64 {%r3, _}, %rd1; mov.b32 %f1, %r3; cvt.rzi.u32.f32 %r3, %f1; st.global.b32 [%rd9], %r3;""",
        LANES * LANES + LANES,
    ),
    "what a mask takes away": ("and.b32 %r1, %r2, 0; or.b32 %r1, %r1, %tx; st.global.b32 [%rd9], %r1;", LANES),
    "what a shift takes away": (
        "cvt.u16.u32 %h1, %tx; mov.b32 %r1, {%h2, %h1}; shr.u32 %r1, %r1, 16; st.global.b32 [%rd9], %r1;",
        LANES,
    ),
    "what a selection does not choose": (
        "setp.lt.u32 %p1, %tx, 64; selp.b32 %r1, %tx, %r2, %p1; st.global.b32 [%rd9], %r1;",
        LANES,
    ),
    "a store that is predicated off": (
        "setp.gt.u32 %p1, %tx, 64; @%p1 st.global.b32 [%rd9+4096], %r2; st.global.b32 [%rd9], %tx;",
        LANES,
    ),
    "a vote that another lane decides": (
        """setp.lt.u32 %p2, %tx, 5; @%p2 setp.eq.u32 %p1, %tx, 3;
        vote.sync.any.pred %p3, %p1, -1; selp.b32 %r1, %tx, 0, %p3; st.global.b32 [%rd9], %r1;""",
        LANES,
    ),
    "a shuffle from a lane that has it": (
        """setp.lt.u32 %p1, %tx, 16; @%p1 mov.u32 %r1, 7;
        and.b32 %r2, %tx, 15; shfl.sync.idx.b32 %r3, %r1, %r2, 31, -1; st.global.b32 [%rd9], %r3;""",
        np.full(32, 7),
    ),
    "scratch that is stored, loaded and masked": (
        """add.u64 %rd1, %part, %rd8; st.global.b32 [%rd1], %r1; bar.warp.sync -1;
        ld.global.b32 %r2, [%rd1]; and.b32 %r2, %r2, 0; st.global.b32 [%rd9], %r2;""",
        np.zeros(32),
    ),
}


@pytest.mark.parametrize("name", SILENT)
def test_an_undefined_value_that_decides_nothing(name: str) -> None:
    body, expected = SILENT[name]
    if expected is None:
        kernel(body).run()
    else:
        assert_clean(kernel(body), {"out": expected}, SOME)


SMEM = ".shared .align 16 .b8 buf[512];"
SLOT = "mov.u32 %r40, buf; mad.lo.u32 %r41, %tx, 4, %r40;"
LINE = "mov.u32 %r40, buf; mad.lo.u32 %r42, %tx, 16, %r40;"
DECIDED = {
    "xor with itself": "xor.b32 %r1, %r2, %r2;",
    "sub of itself": "sub.u32 %r1, %r2, %r2;",
    "mul by 0": "mul.lo.u32 %r1, %r2, 0;",
    "mad by 0": "mad.lo.u32 %r1, %r2, 0, 0;",
    "a table that ignores": "lop3.b32 %r1, 0, %r2, %r3, 0xF0;",
    "a table that masks": "lop3.b32 %r1, %r2, 0, 0, 0xEA;",
    "a table of one register": "lop3.b32 %r1, %r2, %r2, 0, 0x3C;",
    "a comparison of what a mask leaves": "and.b32 %r1, %r2, 15; setp.ge.u32 %p1, %r1, 16; selp.b32 %r1, 1, 0, %p1;",
    "a signed comparison": "or.b32 %r1, %r2, 0x80000000; setp.ge.s32 %p1, %r1, 0; selp.b32 %r1, 1, 0, %p1;",
    "a comparison with itself": "setp.lt.u32 %p1, %r2, %r2; selp.b32 %r1, 1, 0, %p1;",
    "a predicate and 0": """setp.eq.u32 %p1, %r2, 3; setp.gt.u32 %p2, 0, 9; and.pred %p3, %p1, %p2;
        selp.b32 %r1, 1, 0, %p3;""",
    "a sign": "slct.b32.s32 %r1, 0, %r2, %tx;",
    "the low word of mad.wide": "mov.b64 %rd1, {0, %r2}; mad.wide.u32 %rd1, %tx, 0, %rd1; cvt.u32.u64 %r1, %rd1;",
}
"""Expressions of the undefined %r2 that are 0 whatever it holds."""


@pytest.mark.parametrize("name", DECIDED)
def test_an_operation_decides_what_its_operand_does_not(name: str) -> None:
    assert_clean(kernel(f"{DECIDED[name]} add.u32 %r1, %r1, %tx; st.global.b32 [%rd9], %r1;"), {"out": LANES}, SOME[:1])


JUMP = "setp.eq.u32 %p9, %r1, 77;\n@%p9 bra END; //!"
ORIGIN = ("`%r2`, which was never written in this lane", "reads it")
TRAVELS = {
    "through arithmetic": ("add.u32 %r1, %r2, 1; mul.lo.u32 %r1, %r1, 3;", "", ORIGIN),
    "through global scratch": (
        """add.u64 %rd1, %part, %rd8; st.global.b32 [%rd1], %r2; bar.warp.sync -1; ld.global.b32 %r1, [%rd1];""",
        "",
        (*ORIGIN, "stored the value"),
    ),
    "through shared memory": (
        f"{SLOT} st.shared.b32 [%r41], %r2; bar.warp.sync -1; ld.shared.b32 %r1, [%r41];",
        SMEM,
        (*ORIGIN, "stored the value"),
    ),
    "through local memory": (
        "st.local.b32 [own], %r2; ld.local.b32 %r1, [own];",
        ".local .align 4 .b8 own[16];",
        (*ORIGIN, "stored the value"),
    ),
    "through the fragments of matrices": (
        f"""{LINE} mov.u32 %r3, 0; stmatrix.sync.aligned.m8n8.x2.shared.b16 [%r42], {{%r3, %r2}}; bar.warp.sync -1;
        ldmatrix.sync.aligned.m8n8.x2.shared.b16 {{%r4, %r1}}, [%r42];""",
        SMEM,
        (*ORIGIN, "stored the value"),
    ),
    "through a shuffle": ("shfl.sync.bfly.b32 %r1, %r2, 1, 31, -1;", "", ORIGIN),
    "through a ballot": ("setp.eq.u32 %p1, %r2, 3; vote.sync.ballot.b32 %r1, %p1, -1;", "", ORIGIN),
    "through a reduction of the warp": ("redux.sync.add.u32 %r1, %r2, -1;", "", ORIGIN),
    "through a transpose": ("movmatrix.sync.aligned.m8n8.trans.b16 %r1, %r2;", "", ORIGIN),
    "through the second half of a pair": ("cvt.pack.sat.u16.s32 %r1, %tx, %r2;", "", ORIGIN),
    "through the rest under a pair": ("cvt.pack.sat.u8.s32.b32 %r1, %tx, %tx, %r2;", "", ORIGIN),
    "through a table": ("lop3.b32 %r1, %r2, %tx, 0, 0xFC;", "", ORIGIN),
    "through a predicated write": ("mov.u32 %r1, 5; setp.eq.u32 %p1, %r2, 3; @%p1 mov.u32 %r1, 6;", "", ORIGIN),
    "through a selection": ("setp.eq.u32 %p1, %r2, 3; selp.b32 %r1, 77, 6, %p1;", "", ORIGIN),
    "through mma.sync": (
        """mov.u32 %r3, 0; mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%r1,%r4,%r5,%r6}, {%r2,%r3}, {%r3},
        {%r3,%r3,%r3,%r3};""",
        "",
        ORIGIN,
    ),
    "through a bulk copy to scratch and back": (
        f"""{SLOT} st.shared.b32 [%r41], %r2; {init("bar")} {FENCE} bar.warp.sync -1;
        setp.ne.u32 %p1, %tx, 0; mov.u32 %r30, bar;
        @%p1 bra WAITING;
        cp.async.bulk.global.shared::cta.bulk_group [%part], [%r40], 128;
        cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
        mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r30], 128;
        cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r40+256], [%part], 128, [%r30];
        WAITING: {wait("%r30", 0)} ld.shared.b32 %r1, [%r41+256];""",
        f"{SMEM} .shared .align 8 .b64 bar;",
        ("`%r2`, which was never written in this lane", "stored the value"),
    ),
    "through cp.async": (
        f"""add.u64 %rd1, %part, %rd8; {SLOT} cp.async.ca.shared.global [%r41], [%rd1], 4; cp.async.wait_all;
        ld.shared.b32 %r1, [%r41];""",
        SMEM,
        ("byte 0 of `part`, which was not yet written", "reads it"),
    ),
    "from local memory": (
        "ld.local.b32 %r1, [own+8];",
        ".local .align 4 .b8 own[16];",
        ("byte 8 of local memory, which was never written in this lane", "reads it"),
    ),
}
RULE_OF = {"through cp.async": "uninitialised-global", "from local memory": "uninitialised-local"}
"""The rule follows the place that was never written; the other cases start in a register."""


@pytest.mark.parametrize("name", TRAVELS)
def test_a_branch_on_an_undefined_value_that_came_far(name: str) -> None:
    body, declare, clauses = TRAVELS[name]
    rule = RULE_OF.get(name, "uninitialised-register")
    assert_blamed(kernel(f"{body}\n{JUMP}", declare), rule, "decides where this branch goes", *clauses, schedules=SOME)


def test_what_a_discard_emptied() -> None:
    emptied = "setp.eq.u32 %p1, %tx, 0;\n@%p1 discard.global.L2 [%out], 128; //!\nbar.warp.sync -1;"
    clauses = ("memory that the discard of PTX line", "emptied")
    assert_blamed(kernel(emptied), "uninitialised-global", "is part of the result", *clauses, schedules=SOME)
    read = f"{emptied.replace('//!', '')} ld.global.b32 %r1, [%rd9]; {JUMP}"
    assert_blamed(kernel(read), "uninitialised-global", "decides where this branch goes", *clauses, schedules=SOME)
    assert_clean(kernel(f"{emptied} st.global.b32 [%rd9], %tx;"), {"out": LANES}, SOME)
    odd = kernel("setp.eq.u32 %p1, %tx, 0;\n@%p1 discard.global.L2 [%out+64], 128; //!")
    assert_blamed(odd, "misaligned", "not a multiple of 128", schedules=SOME[:1])


def test_many_undefined_words_take_no_time() -> None:
    """An undefined result of 16 MiB: the faults of its two stores are found without visiting each word."""
    out = Buffer("out", 0, np.zeros(1 << 24, np.uint8))
    out.forget(scratch=False)
    missing = np.ones((1 << 16, 128), np.bool_)
    begin = time.process_time()
    for line in (7, 8):
        first = 128 * np.arange(1 << 16) + (line - 7 << 23)
        out.undefine(first, missing, Origin("uninitialised-register", "`%r1`").stored_at(line, "warp 0"))
    blamed = [fault.line for fault in out.outcome()]
    assert blamed == [7], f"lines {blamed}: only the places of the first store are kept"
    assert time.process_time() - begin < 3, "it took longer than a look at each byte with NumPy takes"


RESULTS = {
    "a register": ("st.global.b32 [%rd9], %r2; //!", ""),
    "a byte": ("mov.u32 %r3, 0; cvt.u16.u32 %h1, %r3; mov.b32 %r1, {%h1, %h2};\nst.global.b32 [%rd9], %r1; //!", ""),
    "a bulk copy": (
        f"""{SLOT} st.shared.b32 [%r41], %r2; {FENCE} bar.warp.sync -1; setp.ne.u32 %p1, %tx, 0;
        @%p1 bra END;
        cp.async.bulk.global.shared::cta.bulk_group [%out], [%r40], 128; //!
        cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;""",
        SMEM,
    ),
}


@pytest.mark.parametrize("name", RESULTS)
def test_an_undefined_value_in_a_result(name: str) -> None:
    body, declare = RESULTS[name]
    clauses = ("of `out`, which PTX line", "is part of the result", "which was never written in this lane")
    assert_blamed(kernel(body, declare), "uninitialised-register", *clauses, schedules=SOME)


def test_a_result_that_is_overwritten_is_not_looked_at() -> None:
    assert_clean(kernel("st.global.b32 [%rd9], %r2;\nst.global.b32 [%rd9], %tx;"), {"out": LANES}, SOME)


def test_the_origin_names_where_the_value_came_in_and_where_it_was_stored() -> None:
    body = "\n".join(
        ["add.u32 %r3, %r2, 1;", "add.u64 %rd1, %part, %rd8;", "st.global.b32 [%rd1], %r3;", "bar.warp.sync -1;",
         "ld.global.b32 %r1, [%rd1];", JUMP]
    )  # fmt: skip
    planted = kernel(body)
    first = next(i for i, line in enumerate(planted.ptx.splitlines(), 1) if line.startswith("add.u32 %r3"))
    clauses = (f"PTX line {first} reads it", f"PTX line {first + 2} stored the value", "lane 0")
    assert_blamed(planted, "uninitialised-register", *clauses, schedules=("eager",))


def test_a_run_that_collects_goes_on_behind_each_decision() -> None:
    """One finding per place that decides and one per store of a result, not one per lane."""
    twice = kernel(
        """setp.eq.u32 %p1, %r2, 77; @%p1 st.global.b32 [%rd9+4], %tx;
        setp.eq.u32 %p1, %r3, 77;
        @%p1 bra END;
        st.global.b32 [%rd9], %r4;"""
    )
    machine = Machine()
    machine.findings = Findings()
    twice.launch(machine)
    found = list(machine.findings.by_site.values())
    said = [str(one) for one in found]
    assert [one.rule for one in found] == ["uninitialised-register"] * 3, said
    for name, text in zip(("`%r2`", "`%r3`", "`%r4`"), said, strict=True):
        assert f"It comes from {name}" in text, said


# Tensor memory and its MMA: undefined rows of A make rows of D undefined, rows of B columns, accumulators their cells.


_STORED = STAGES["out"].split("; ")
ADDRESS, STORE_D = "; ".join(_STORED[:2]) + ";\n", _STORED[2]
_WRITE = "st.shared.v4.b32 [%r17], {"
ROW_OF_A = "setp.ne.u32 %p6, %tx, 5;\n" + STAGES["fill"].replace(_WRITE, f"@%p6 {_WRITE}", 1)
COLUMN_OF_B = STAGES["fill"].replace("%p2, %tx, 32", "%p2, %tx, 24")
"""Rows 8 to 15 of B are not written in the upper half of k, so columns 8 to 15 of D are undefined."""
KEEP_ROW = f"setp.ne.u32 %p6, %tx, 5;\n@%p6 {STORE_D}"


HALF_KNOWN = """mul.wide.u32 %rd1, %tx, 4; add.u64 %rd1, %out, %rd1; setp.lt.u32 %p1, %tx, 16;
@%p1 setp.lt.u32 %p2, %tx, 16; {} st.global.u32 [%rd1], 1; PAST: ret;"""
GUARDED = {
    "branch": ("@%p2 bra PAST;", [0] * 16 + [1] * 16),
    "return": ("@%p2 ret;", [0] * 16 + [1] * 16),
    "table": ("TABLE: .branchtargets PAST; mov.u32 %r1, 0; @%p2 brx.idx %r1, TABLE;", [0] * 16 + [1] * 16),
    "wait": ("@%p2 bar.warp.sync 0xffff;", [1] * 32),
}
"""An instruction that ends a block, under a guard that is defined and true in 16 lanes, and what is stored after it."""


@pytest.mark.parametrize("name", GUARDED)
def test_a_run_that_collects_goes_where_an_undefined_guard_sends_it(name: str) -> None:
    """Lanes with a defined guard obey it; the others behave as if their registers held zeros."""
    instruction, stored = GUARDED[name]
    machine = Machine()
    machine.findings = Findings()
    out = Kernel(HALF_KNOWN.format(instruction), {"out": np.zeros(32, np.uint32)}).launch(machine)["out"]
    assert [fault.rule for fault in machine.findings.by_site.values()] == ["uninitialised-register"]
    assert out.tolist() == stored


def test_an_mma_that_is_predicated_off_leaves_cells_that_nobody_needs() -> None:
    """Triton's attention loads such cells and replaces them by zeros."""
    zero = LOAD + "\ntcgen05.wait::ld.sync.aligned; setp.gt.u32 %p7, %tx, 999; selp.b32 %r0, %r0, 0, %p7;"
    changes = {"issue": f"setp.gt.u32 %p8, %tx, 999;\n@%p8 {MMA}\n{COMMIT}", "read": zero}
    assert_clean(mma_kernel(changes), {"out": np.zeros(128)}, SOME)


def test_a_row_of_a_that_nobody_wrote_is_a_row_of_d() -> None:
    clean = {"fill": ROW_OF_A, "out": ADDRESS + KEEP_ROW}
    expected = np.where(np.arange(128) == 5, 0, 16)
    assert_clean(mma_kernel(clean), {"out": expected}, SOME)
    stored = {"fill": ROW_OF_A, "out": ADDRESS + STORE_D + " //!"}
    assert_blamed(
        mma_kernel(stored), "uninitialised-shared", "byte 20 of `out`", "byte 0x450 of shared", schedules=SOME
    )


def test_a_row_of_b_that_nobody_wrote_is_a_column_of_d() -> None:
    assert_clean(mma_kernel({"fill": COLUMN_OF_B}), {"out": np.full(128, 16)}, SOME)
    stored = {"fill": COLUMN_OF_B, "out": ADDRESS + STORE_D.replace("%r0", "%r8") + " //!"}
    assert_blamed(mma_kernel(stored), "uninitialised-shared", "byte 0 of `out`", "of shared memory", schedules=SOME)


def test_tensor_memory_carries_undefined_registers() -> None:
    names = [f"mov.b32 %r{i}, 1;" for i in range(16) if i != 3]
    back = f"{' '.join(names)}\n{STORE}\ntcgen05.wait::st.sync.aligned;\n{LOAD}\ntcgen05.wait::ld.sync.aligned;"
    assert_clean(mma_kernel({"read": back}), {"out": np.full(128, 1, np.uint32).view(np.float32)}, SOME)
    stored = {"read": back, "out": ADDRESS + STORE_D.replace("%r0", "%r3") + " //!"}
    assert_blamed(mma_kernel(stored), "uninitialised-register", "byte 0 of `out`", "`%r3`", schedules=SOME)


WGMMA = """.shared .align 128 .b8 a[2048]; .shared .align 128 .b8 b[256];
mov.u32 %r40, a; mov.u32 %r41, b; shl.b32 %r42, %tx, 4; add.u32 %r43, %r40, %r42; mov.b32 %r16, 0x3c003c00;
setp.ne.u32 %p1, %tx, 5; @%p1 st.shared.v4.b32 [%r43], {%r16,%r16,%r16,%r16};
setp.lt.u32 %p2, %tx, 16; add.u32 %r43, %r41, %r42; @%p2 st.shared.v4.b32 [%r43], {%r16,%r16,%r16,%r16};
fence.proxy.async; bar.sync 0;
shr.u32 %r44, %r40, 4; cvt.u64.u32 %rd1, %r44; or.b64 %rd1, %rd1, 0x0000000800400000;
shr.u32 %r44, %r41, 4; cvt.u64.u32 %rd2, %r44; or.b64 %rd2, %rd2, 0x0000000800080000;
wgmma.fence.sync.aligned; setp.ne.u32 %p3, SCALE, 0;
wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f0,%f1,%f2,%f3}, %rd1, %rd2, %p3, 1, 1, 0, 0;
wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
mul.wide.u32 %rd3, %tx, 4; add.u64 %rd3, %rd3, %out; and.b32 %r1, %tx, 124; setp.ne.u32 %p4, %r1, 20;
"""
"""Row 5 of A is half unwritten. It makes row 5 of D undefined, which threads 20 to 23 hold in %f0 and %f1."""


def wgmma_kernel(store: str, scale: int = 0) -> Kernel:
    body = f"{WGMMA.replace('SCALE', str(scale))}{store}\nret;"
    return Kernel(body, {"out": np.zeros(128, np.float32)}, block=(128, 1, 1), target="sm_90a")


def test_wgmma_makes_the_rows_of_undefined_rows() -> None:
    expected = np.where(np.arange(128) // 4 == 5, 0, 16)
    assert_clean(wgmma_kernel("@%p4 st.global.f32 [%rd3], %f0;"), {"out": expected}, SOME)
    assert_clean(wgmma_kernel("st.global.f32 [%rd3], %f2;"), {"out": np.full(128, 16)}, SOME)
    clauses = ("byte 80 of `out`", "byte 0x450 of shared memory, which was not yet written")
    assert_blamed(wgmma_kernel("st.global.f32 [%rd3], %f0; //!"), "uninitialised-shared", *clauses, schedules=SOME)


def test_wgmma_adds_to_accumulators_that_nobody_wrote() -> None:
    clauses = ("byte 0 of `out`", "`%f2`, which was never written in this lane")
    planted = wgmma_kernel("st.global.f32 [%rd3], %f2; //!", scale=1)
    assert_blamed(planted, "uninitialised-register", *clauses, schedules=SOME)


WGMMA_LOOP = """.shared .align 128 .b8 a[2048]; .shared .align 128 .b8 b[256]; .shared .align 128 .b8 c[256];
mov.u32 %r40, a; mov.u32 %r41, b; mov.u32 %r45, c; shl.b32 %r42, %tx, 4; mov.b32 %r16, 0x3c003c00;
add.u32 %r43, %r40, %r42; st.shared.v4.b32 [%r43], {%r16,%r16,%r16,%r16}; setp.lt.u32 %p2, %tx, 16;
setp.ne.and.u32 %p5, %tx, 2, %p2; add.u32 %r43, %r41, %r42; @%p5 st.shared.v4.b32 [%r43], {%r16,%r16,%r16,%r16};
setp.ne.and.u32 %p6, %tx, 5, %p2; add.u32 %r43, %r45, %r42; @%p6 st.shared.v4.b32 [%r43], {%r16,%r16,%r16,%r16};
fence.proxy.async; bar.sync 0;
shr.u32 %r44, %r40, 4; cvt.u64.u32 %rd1, %r44; or.b64 %rd1, %rd1, 0x0000000800400000;
shr.u32 %r44, %r41, 4; cvt.u64.u32 %rd2, %r44; or.b64 %rd2, %rd2, 0x0000000800080000;
shr.u32 %r44, %r45, 4; cvt.u64.u32 %rd4, %r44; or.b64 %rd4, %rd4, 0x0000000800080000;
wgmma.fence.sync.aligned; setp.ne.u32 %p3, %warp, 99;
wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f0,%f1,%f2,%f3}, %rd1, %rd2, 0, 1, 1, 0, 0;
wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f0,%f1,%f2,%f3}, %rd1, %rd2, %p3, 1, 1, 0, 0;
wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f0,%f1,%f2,%f3}, %rd1, %rd4, %p3, 1, 1, 0, 0;
wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
mul.wide.u32 %rd3, %tx, 4; add.u64 %rd3, %rd3, %out; and.b32 %r1, %tx, 3;
"""
"""Half of row 2 of `b` and of row 5 of `c` is unwritten: columns 2 and 5 of D are undefined, which threads 1 and 2 of
each quad hold in %f0 and %f1. The second wgmma affects the column that the first did, the third another one."""


def test_wgmma_in_a_loop_loses_each_column_of_an_undefined_row_of_b() -> None:
    def kernel(store: str) -> Kernel:
        return Kernel(
            f"{WGMMA_LOOP}{store}\nret;", {"out": np.zeros(128, np.float32)}, block=(128, 1, 1), target="sm_90a"
        )

    for register, thread in (("%f0", 1), ("%f1", 2)):
        others = f"setp.ne.u32 %p4, %r1, {thread}; @%p4 st.global.f32 [%rd3], {register};"
        assert_clean(kernel(others), {"out": np.where(np.arange(128) % 4 == thread, 0, 48)}, SOME)
        clauses = (f"byte {4 * thread} of `out`", "of shared memory, which was not yet written")
        assert_blamed(
            kernel(f"st.global.f32 [%rd3], {register}; //!"), "uninitialised-shared", *clauses, schedules=SOME
        )


# Reductions by the copy engine: the destination counts as an operand.


REDUCE = "cp.reduce.async.bulk.global.shared::cta.bulk_group"
INTO_SHARED = """mov.u32 %r43, bar; mov.u32 %r44, buf; mapa.shared::cluster.u32 %r43, %r43, 0;
add.u32 %r44, %r44, 256; mapa.shared::cluster.u32 %r44, %r44, 0;"""
REDUCED = {
    "a run of bytes": (f"{REDUCE}.add.u32 [%part], [%r40], 128;", "ld.global.b32 %r1, [%rd1];"),
    "halves": (f"{REDUCE}.add.noftz.f16 [%part], [%r40], 128;", "ld.global.b32 %r1, [%rd1];"),
    "bits": (f"{REDUCE}.or.b32 [%part], [%r40], 128;", "ld.global.b32 %r1, [%rd1];"),
    "shared memory": (
        f"""{INTO_SHARED} mov.u32 %r45, bar; mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r45], 128;
        cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.add.u32 [%r44], [%r40], 128,
        [%r43];""",
        f"mov.u32 %r45, bar; {wait('%r45', 0)} ld.shared.b32 %r1, [%r41+256];",
    ),
    "one word of shared memory": (
        f"""{INTO_SHARED.replace("43, 0;", "43, %r46;").replace("44, 0;", "44, %r46;")}
        mov.u32 %r45, bar; mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r45], 4;
        red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32 [%r44], %tx, [%r43];""",
        f"mov.u32 %r45, bar; {wait('%r45', 0)} ld.shared.b32 %r1, [%r40+256];",
    ),
}
"""What thread 0 issues on memory that was never written, and how the threads look at the sum."""


def reduction(name: str, after: str, stored: str = "%tx", before: str = "") -> Kernel:
    issue, look = REDUCED[name]
    # red.async is for another CTA, here the other one of a pair.
    pair = "red.async" in issue
    meet = "xor.b32 %r46, %cta, 1; barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" if pair else ""
    ctas = (1 + pair, 1, 1)
    body = f"""{before} {SLOT} st.shared.b32 [%r41], {stored}; {init("bar")} {FENCE} bar.warp.sync -1; {meet}
    add.u64 %rd1, %part, %rd8; setp.ne.u32 %p1, %tx, 0; @%p1 bra ISSUED;
    {issue} cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
    ISSUED: bar.warp.sync -1; {look}
    {after}"""
    return kernel(body, f"{SMEM} .shared .align 8 .b64 bar;", grid=ctas, cluster=ctas)


@pytest.mark.parametrize("name", REDUCED)
def test_a_reduction_into_memory_that_nobody_wrote(name: str) -> None:
    rule = "uninitialised-shared" if "shared" in name else "uninitialised-global"
    clauses = ("decides where this branch goes", "which was not yet written", "stored the value")
    assert_blamed(reduction(name, JUMP), rule, *clauses, schedules=SOME)
    assert_clean(reduction(name, "st.global.b32 [%rd9], %tx;"), {"out": LANES}, SOME)


def test_a_reduction_of_part_of_an_element_loses_all_of_it() -> None:
    pair = "mov.u32 %r3, 0; st.global.b32 [%rd1], %r3; cvt.u16.u32 %h1, %tx; mov.b32 %r2, {%h3, %h1};"
    half = f"ld.global.u16 %h4, [%rd1+2]; cvt.u32.u16 %r1, %h4; {JUMP}"
    planted = reduction("a run of bytes", half, "%r2", f"add.u64 %rd1, %part, %rd8; {pair} fence.proxy.async;")
    assert_blamed(planted, "uninitialised-register", "`%h3`, which was never written", schedules=SOME)


def test_a_box_reduced_into_a_tensor_that_nobody_wrote() -> None:
    store = STORE_BOX.replace("cp.async", "cp.reduce.async").replace("cta.tile", "cta.add.tile")
    decide = "cp.async.bulk.wait_group 0; ld.global.u32 %r1, [%out]; setp.eq.u32 %p9, %r1, 77;\n@%p9 bra END; //!"
    planted = copy_kernel({"store": store, "drain": decide}, unwritten=("out",))
    assert_blamed(planted, "uninitialised-global", "byte 0 of `out`, which was not yet written", schedules=SOME)
    result = copy_kernel({"store": f"{store} //!"}, outputs=("out",))
    assert_blamed(result, "uninitialised-global", "is part of the result", "byte 0 of `out`", schedules=SOME)


# The law of defined bytes.


WORDS = [
    *(f"{op}.b32 %d, %a, %c;" for op in ("and", "or", "xor", "shl", "shr")),
    *(f"{op}.u32 %d, %a, %c;" for op in ("add", "sub", "mul.lo", "mul.hi", "min", "max", "div")),
    *(f"{op}.s32 %d, %a, 5;" for op in ("add", "sub", "mul.lo", "shr", "max")),
    "not.b32 %d, %a;", "brev.b32 %d, %a;", "popc.b32 %d, %a;", "clz.b32 %d, %a;", "neg.s32 %d, %a;",
    "shl.b32 %d, %a, 12;", "shr.u32 %d, %a, 9;", "shr.s32 %d, %a, 9;", "shf.l.wrap.b32 %d, %a, %c, 7;",
    "shf.r.clamp.b32 %d, %a, %c, %e;", "prmt.b32 %d, %a, %c, 0x7520;", "prmt.b32 %d, %a, %c, 0x9180;",
    *(f"lop3.b32 %d, %a, %c, %e, {table};" for table in (0xF0, 0xCC, 0xEA, 0xE8, 0xCA, 0x3C, 0x80, 0xFE, 0, 255)),
    *(f"lop3.b32 %d, %a, %c, %a, {table};" for table in (0x96, 0xEA, 0x5A)), "xor.b32 %d, %a, %a;",
    "lop3.or.b32 %d|%q, %a, %c, %e, 0x80, %p; selp.b32 %d, 1, 2, %q;",
    "sub.u32 %d, %a, %a;", "mul.lo.u32 %d, %a, 0;", "mul.lo.u32 %d, %a, 48;", "mul.lo.s32 %d, %a, %a;",
    "and.b32 %x, %a, 0xff00; and.b32 %y, %c, 0xfff0; mul.lo.u32 %d, %x, %y;",
    "and.b32 %x, %a, 0xff00; mad.lo.s32 %d, %x, %c, %e;", "mul.wide.s32 %w, %a, %c; cvt.u32.u64 %d, %w;",
    "mov.b64 %w, {%e, %a}; mad.wide.u32 %w, %a, 16, %w; mov.b64 {%d, _}, %w;",
    "mov.b64 %w, {%e, %a}; mad.wide.s32 %w, %c, %e, %w; mov.b64 {_, %d}, %w;",
    *(f"setp.{how}.{kind} %q, %a, %c; selp.b32 %d, 1, 2, %q;" for kind in ("u32", "s32")
      for how in ("lt", "le", "gt", "ge")),
    *(f"and.b32 %x, %a, 63; setp.{how} %q, %x, 63; selp.b32 %d, 1, 2, %q;"
      for how in ("lt.u32", "le.s32", "hi.u32", "ge.s32", "eq.u32")),
    "and.b32 %x, %c, 15; shl.b32 %d, %a, %x;", "and.b32 %x, %c, 0x7777; prmt.b32 %d, %a, %e, %x;",
    "and.b32 %x, %c, 1; setp.eq.u32 %q, %x, 0; selp.b32 %d, %a, %e, %q;",
    "setp.ge.s32 %q, %a, %a; selp.b32 %d, 1, 2, %q;", "slct.b32.s32 %d, %a, %c, %e;",
    "setp.lt.u32 %q, %a, 9; and.pred %q, %q, %p; selp.b32 %d, 1, 2, %q;",
    "setp.lt.u32 %q, %a, 9; xor.pred %q, %q, %q; selp.b32 %d, 1, 2, %q;",
    "not.pred %q, %p; or.pred %q, %q, %p; selp.b32 %d, 1, 2, %q;",
    "cvt.pack.sat.u16.s32 %d, %a, %c;", "cvt.pack.sat.s16.s32 %d, %c, %a;", "cvt.pack.sat.u8.s32.b32 %d, %a, %c, %e;",
    "prmt.b32 %d, %a, %c, %e;", "prmt.b32.f4e %d, %a, %c, 1;", "lop3.b32 %d, %a, %c, %e, 0x96;",
    "bfe.u32 %d, %a, 5, 14;", "bfe.s32 %d, %a, 5, 14;", "bfe.u32 %d, %a, %c, 8;", "bfi.b32 %d, %a, %c, 9, 11;",
    "szext.wrap.s32 %d, %a, 12;", "mad.lo.u32 %d, %a, 256, %c;", "selp.b32 %d, %a, %c, %p;",
    "setp.eq.u32 %q, %a, %c; selp.b32 %d, 1, 2, %q;", "setp.ne.and.u32 %q, %a, %c, %p; selp.b32 %d, 1, 2, %q;",
    "setp.lt.or.u32 %q, %a, %c, %p; selp.b32 %d, 1, 2, %q;", "setp.gt.f32 %q, %a, %c; selp.b32 %d, 1, 2, %q;",
    "mov.b32 {%h, %i}, %a; mov.b32 %d, {%i, %h};", "mov.b32 {%h, %i}, %a; cvt.u32.u16 %d, %i;",
    "cvt.u32.u8 %d, %a;", "cvt.s32.s8 %d, %a;", "cvt.u16.u32 %h, %a; mov.b32 %d, {%h, 0};", "cvt.rn.f32.s32 %d, %a;",
    "cvt.rn.satfinite.e4m3x2.f32 %h, %a, %c; mov.b32 %d, {%h, 0};", "cvt.rn.bf16x2.f32 %d, %a, %c;",
    "cvt.u16.u32 %h, %a; cvt.rn.f16x2.e4m3x2 %d, %h;", "mov.b32 {%h, %i}, %a; cvt.f32.bf16 %d, %i;",
    "add.f16x2 %d, %a, %c;", "fma.rn.bf16x2 %d, %a, %c, %e;", "add.f32 %d, %a, %c;", "ex2.approx.ftz.f32 %d, %a;",
    "mov.b64 %w, {%a, %c}; add.f32x2 %w, %w, %w; mov.b64 {%d, %e2}, %w;", "shfl.sync.bfly.b32 %d, %a, 3, 31, -1;",
    "mov.b64 %w, {%a, %c}; shr.u64 %w, %w, 24; cvt.u32.u64 %d, %w;", "redux.sync.or.b32 %d, %a, -1;",
    "setp.lt.u32 %q, %a, %c; vote.sync.ballot.b32 %d, %q, -1;", "match.any.sync.b32 %d, %a, -1;",
    "setp.lt.u32 %q, %a, %c; vote.sync.any.pred %q, %q, -1; selp.b32 %d, 1, 2, %q;",
    "mov.b32 %d, %e; setp.lt.u32 %q, %a, %c; @%q mov.b32 %d, 9;", "movmatrix.sync.aligned.m8n8.trans.b16 %d, %a;",
    "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%d,%x,%y,%z}, {%a,%a}, {%c}, {%e,%e,%e,%e};",
]  # fmt: skip
"""Instructions under test: %d from %a, %c, %e and the predicate %p, all four with some undefined bits."""


def _results(noise: int, seed: int, values: int = 0, note: str = "") -> tuple[Array, Array]:
    """The words that WORDS compute in 32 lanes, and the state of their bytes: uint8 [words, 128] each.

    `values` draws other operands with the same undefined bytes. `note` is a comment: bound code is cached by its text.
    """
    draw, hidden = np.random.default_rng(values or seed), np.random.default_rng(seed + 1)
    drawn = draw.integers(0, 256, (4, 128), np.uint8)
    drawn[:, ::4] &= hidden.choice(np.array([0, 3, 31, 255], np.uint8), (4, 32))
    known = hidden.random((4, 128)) < hidden.choice([0.3, 0.7, 1.0], (4, 1))
    filled = np.where(known, drawn, np.random.default_rng(noise).integers(0, 256, drawn.shape, np.uint8))
    takes = "".join(f"ld.global.b32 {name}, [%at+{128 * i}];\n" for i, name in enumerate(("%a0", "%c0", "%e0", "%s0")))
    tries = "".join(
        "mov.b32 %a, %a0; mov.b32 %c, %c0; mov.b32 %e, %e0; setp.eq.u32 %p, %s0, 0;\n"
        f"{text}\nst.global.b32 [%to+{128 * i}], %d;\n"
        for i, text in enumerate(WORDS)
    )
    declared = """.reg .b32 %a, %c, %e, %e2, %d, %x, %y, %z, %a0, %c0, %e0, %s0; .reg .b16 %h, %i;
    .reg .b64 %w, %at, %to; .reg .pred %p, %q;
    mul.wide.u32 %w, %tx, 4; add.u64 %at, %w, %given; add.u64 %to, %w, %out;\n"""
    body = f"{declared}{takes}{tries}ret; // {note}"
    text = Kernel(body, {"given": filled, "out": np.zeros(32 * len(WORDS), np.uint32)}).ptx
    machine = Machine()
    given = machine.memory.add("given", filled.reshape(-1).copy())
    out = machine.memory.add("out", np.zeros(128 * len(WORDS), np.uint8))
    given.forget(scratch=True)
    out.forget(scratch=True)
    assert given.state is not None
    assert out.state is not None
    given.state[known.reshape(-1)] = DEFINED
    params = [struct.pack("<Q", buffer.base) for buffer in (given, out)]
    machine.launch(load(text).entry("kernel"), (1, 1, 1), (32, 1, 1), params)
    return out.data.reshape(len(WORDS), 128), out.state.reshape(len(WORDS), 128)


@pytest.mark.parametrize("seed", [1, 2])
def test_defined_bytes_do_not_depend_on_undefined_ones(seed: int) -> None:
    first, state = _results(100, seed)
    for noise in (101, 102, 103):
        other, again = _results(noise, seed)
        both = (state == DEFINED) & (again == DEFINED)
        for text, one, two, known in zip(WORDS, first, other, both, strict=True):
            wrong = np.flatnonzero((one != two) & known)
            assert not wrong.size, f"`{text}`: byte {wrong[0] % 4} of lane {wrong[0] // 4} depends on undefined bytes"


def _states(patch: pytest.MonkeyPatch, often: int, note: str) -> list[Array]:
    """What is defined after runs on four draws of operands, two of them with the same undefined bytes."""
    patch.setattr(code, "OFTEN", often)
    patch.setattr(lanes, "WORTH", 0)
    return [_results(100, seed, values, note)[1] for seed in (1, 2) for values in (5, 6)]


def test_machine_code_leaves_the_same_bytes_undefined(monkeypatch: pytest.MonkeyPatch) -> None:
    """There, bits of whole stretches are marked before their values are computed, and results are remembered."""
    one_by_one, ahead = (_states(monkeypatch, often, f"{often}") for often in (1 << 40, 1))
    for one, other in zip(one_by_one, ahead, strict=True):
        wrong = [text for text, a, b in zip(WORDS, one, other, strict=True) if (a != b).any()]
        assert not wrong, f"in machine code other bytes are defined after `{wrong[0]}`"


LOADS = {
    "a value that the load does not define": "mov.b32 %r2, %r30; ld.global.b32 %r1, [%rd9]; mov.b32 %r5, %r2;",
    "a value that another one takes the place of": "mov.b32 %r3, 5; mov.b32 %r2, %r30; ld.global.b32 %r1, [%rd9]; "
    "mov.b32 %r5, %r3; mov.b32 %r3, %r2;",
}
"""Loops with an undefined register, and a load of undefined bytes. Then %r5 decides."""


@pytest.mark.parametrize("name", LOADS)
def test_a_load_of_undefined_bytes_is_in_no_stretch(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """What is undefined behind it is marked once, in machine code too."""
    body = f"""mov.u32 %r9, 0; L: {LOADS[name]} mov.b32 %r2, 0; add.u32 %r6, %r1, 1; st.global.b32 [%rd9+128], %r6;
    mov.b32 %r1, 0; setp.eq.u32 %p2, %r5, 6; @%p2 bra E;
    add.u32 %r9, %r9, 1; setp.lt.u32 %p1, %r9, 40; @%p1 bra L; E: ret;"""
    times = list[int]()
    for often in (1 << 40, 1):
        monkeypatch.setattr(code, "OFTEN", often)
        monkeypatch.setattr(lanes, "WORTH", 0)
        machine = Machine()
        machine.findings = Findings()
        out = machine.memory.add("out", np.zeros(256, np.uint8))
        out.forget(scratch=True)
        text = Kernel(f"{PLACE}\n{body} // {often}", {"out": np.zeros(64, np.uint32)}).ptx
        machine.launch(load(text).entry("kernel"), (1, 1, 1), (32, 1, 1), [struct.pack("<Q", out.base)])
        times.append(sum(one.times for one in machine.findings.by_site.values()))
    assert times[0] == (40 if "not define" in name else 0)
    assert times[1] == times[0], f"{times[1]} findings in machine code, {times[0]} without"


@pytest.mark.parametrize("opcode", ["and", "lop3", "min", "mul", "prmt", "selp", "setp", "shl"])
def test_a_rule_that_hides_what_it_watches_is_noticed(monkeypatch: pytest.MonkeyPatch, opcode: str) -> None:
    right = _states(monkeypatch, 1 << 40, "right")
    rules = definedness._RULES  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setitem(rules, opcode, (rules[opcode][0], lambda item: False))
    wrong = _states(monkeypatch, 1, f"{opcode} watches no value")
    assert any((one != other).any() for one, other in zip(right, wrong, strict=True)), f"no word shows it of {opcode}"


def test_the_exact_rules_keep_bytes_defined() -> None:
    """For a register whose upper half is undefined: results that do not depend on that half."""
    kept = {
        "and.b32 %r1, %r5, 0x0000ffff;": 4, "shl.b32 %r1, %r5, 16;": 4, "bfe.u32 %r1, %r5, 3, 9;": 4,
        "prmt.b32 %r1, %r5, 0, 0x4410;": 4, "add.u32 %r1, %r5, 7;": 2, "mul.lo.u32 %r1, %r5, 3;": 2,
        "xor.b32 %r1, %r5, 7;": 2, "cvt.u32.u16 %r1, %h1; add.u32 %r1, %r1, 1;": 4, "or.b32 %r1, %r5, 0xffff0000;": 4,
        "bfi.b32 %r1, %r5, 0, 8, 8;": 4, "shf.l.wrap.b32 %r1, 0, %r5, 16;": 4, "mad.lo.u32 %r1, %r5, 2, %r5;": 2,
    }  # fmt: skip
    for text, size in kept.items():
        store = f"st.global.b{8 * size} [%rd9], {'%r1' if size == 4 else '%h3'};"
        low = "" if size == 4 else "mov.b32 {%h3, _}, %r1;"
        body = f"cvt.u16.u32 %h1, %tx; mov.b32 %r5, {{%h1, %h2}}; {text} {low} {store}"
        kernel(body).run()
        planted = kernel(f"cvt.u16.u32 %h1, %tx; mov.b32 %r5, {{%h2, %h1}}; {text} {low}\n{store} //!")
        if "cvt.u32" not in text:
            assert_blamed(planted, "uninitialised-register", "`%h2`", schedules=("eager",))

"""Planted faults of tensor memory and the tensor core, each blamed by line, warp, lane, address and last writer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from backends.vm.faults import Fault
from conformance.vm.kernel import (
    ELECT,
    EVERY_SCHEDULE,
    SYNC,
    Kernel,
    assert_blamed,
    assert_clean,
    f16_idesc,
    fault_of,
    tmem_alloc,
    tmem_free,
    wait,
)
from conformance.vm.tensor_kernel import (
    COMMIT,
    EXPECTED,
    LOAD,
    MMA,
    STAGES,
    STORE,
    mma_kernel,
)


def test_the_kernel_without_a_fault_is_clean() -> None:
    assert_clean(mma_kernel(), {"out": EXPECTED})


def marked(stage: str, instruction: str, replacement: str | None = None) -> str:
    """A stage with one instruction (or its replacement) marked as the culprit."""
    assert STAGES[stage].count(instruction) == 1, instruction
    return STAGES[stage].replace(instruction, (replacement or instruction) + " //!")


ZEROS = "mov.b32 {0}, 0;"
FILL_REGISTERS = " ".join(ZEROS.format(f"%r{index}") for index in range(16))
MINE = ".reg .pred %p16; setp.ne.u32 %p16, %warp, 0;\n"
SPIN_UNTIL_STORED = """SPIN: ld.relaxed.gpu.global.b32 %r30, [%out+124]; ld.relaxed.gpu.global.b32 %r31, [%out+252];
min.u32 %r30, %r30, %r31; ld.relaxed.gpu.global.b32 %r31, [%out+380]; min.u32 %r30, %r30, %r31;
ld.relaxed.gpu.global.b32 %r31, [%out+508]; min.u32 %r30, %r30, %r31;
setp.eq.u32 %p4, %r30, 0; @%p4 bra SPIN;"""
"""Waits for the last thread of every warp. That is an order of execution, but not one of the memory model."""
RELAXED_OUT = STAGES["out"].replace("st.global", "st.relaxed.gpu.global")
WAIT_STORE = "tcgen05.wait::st.sync.aligned;"
ZERO_CELLS = f"tcgen05.st.sync.aligned.32x32b.x16.b32 [%r44], {{{', '.join(16 * ['%r18'])}}};"
"""Writes the cells that LOAD reads, from a separate register."""
A_IN_TMEM = MMA.replace("%rd10", "[%r40+16]")
SCALED = (
    "tcgen05.mma.cta_group::1.kind::mxf4.block_scale [%r40], %rd10, %rd11, "
    f"{1 << 7 | 1 << 10 | 16 >> 3 << 17 | 1 << 23 | 128 >> 7 << 27}, [%r40+28], [%r40+17], %p1;"
)
"""A product of fp4, with the scale factors of A and of B."""
BEFORE, AFTER = "tcgen05.fence::before_thread_sync;", "tcgen05.fence::after_thread_sync;"
WIDE = STORE.replace("[%r44]", "[%r44+16]")

STORED = STAGES["out"].replace("st.global", "\nst.global") + " //!"
"""Undefined cells and MMAs of undefined operands are no fault; storing their values is."""
PLANTED: dict[str, tuple[dict[str, str], str, tuple[str, ...]]] = {
    "lanes of another warp": (
        {"read": marked("read", LOAD, LOAD.replace("%r44", "%r40"))},
        "tmem-lane-ignored",
        ("tcgen05.ld of lanes 0..31 by warp", "reaches only lanes"),
    ),
    "columns of nobody": (
        {"read": marked("read", LOAD, f"xor.b32 %r44, %r44, 64;\n{LOAD}")},
        "tmem-not-allocated",
        ("no live tcgen05.alloc",),
    ),
    "columns outside of tensor memory": (
        {"read": marked("read", LOAD, LOAD.replace("[%r44]", "[%r44+504]"))},
        "tmem-out-of-bounds",
        ("tcgen05.ld reads lanes", "128 x 512"),
    ),
    "an accumulator that reaches beyond tensor memory": (
        {"issue": marked("issue", MMA, MMA.replace("[%r40]", "[%r40+500]"))},
        "tmem-out-of-bounds",
        ("tcgen05.mma writes lanes 0..127, columns ", "128 x 512"),
    ),
    "an accumulator beyond tensor memory": (
        {"issue": marked("issue", MMA, MMA.replace("[%r40]", "[%r40+4096]"))},
        "tmem-out-of-bounds",
        ("tcgen05.mma writes lanes 0..127, columns 4", "128 x 512"),
    ),
    "use after dealloc": (
        {"read": STAGES["free"] + f"\n{SYNC}\n{LOAD} //!", "free": ""},
        "tmem-not-allocated",
        ("no live tcgen05.alloc",),
    ),
    "dealloc of another size": (
        {"free": tmem_free(64) + " //!"},
        "tmem-dealloc",
        ("tcgen05.dealloc of 64 columns", "live allocations: 32 columns"),
    ),
    "dealloc of another address": (
        {"free": f"{SYNC}\nadd.u32 %r40, %r40, 32;\n@%p12 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r40, 32; //!"},
        "tmem-dealloc",
        ("tcgen05.dealloc of 32 columns",),
    ),
    "dealloc under a running mma": (
        {"wait": "", "read": "", "out": "", "free": STAGES["free"] + " //!"},
        "tmem-race",
        ("tcgen05.dealloc frees lane 0, column ", "the tensor core wrote"),
    ),
    "dealloc before the others have read": (
        {"out": RELAXED_OUT, "free": f"{SPIN_UNTIL_STORED}\n" + STAGES["free"].replace(SYNC, "").strip() + " //!"},
        "tmem-race",
        ("tcgen05.dealloc frees", " after warp", "read it", "nothing orders the two"),
    ),
    "alloc after relinquish": (
        {
            "free": STAGES["free"] + f"\n@%p12 tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;\n{SYNC}\n"
            "@%p12 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [taddr], 32; //!"
        },
        "tmem-alloc",
        ("gave up its permit",),
    ),
    "alloc of a larger piece": (
        {"free": STAGES["free"] + "\n@%p12 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [taddr], 64; //!"},
        "tmem-alloc",
        ("64 columns asked for after an allocation of 32",),
    ),
    "alloc of 48 columns": (
        {"setup": "mov.b32 %r41, 48;\n" + STAGES["setup"].replace("[taddr], 32;", "[taddr], %r41; //!")},
        "tmem-alloc",
        ("48 columns", "power of two in 32..512"),
    ),
    "tensor memory that nobody wrote": (
        {"read": STAGES["read"].replace("[%r44]", "[%r44+16]"), "out": STORED},
        "uninitialised-tmem",
        ("byte 0 of `out`", "of tensor memory, which was not yet written", "reads it"),
    ),
    "accumulating onto nothing": (
        {"before": STAGES["before"].replace("setp.ne.u32 %p1", "setp.eq.u32 %p1"), "out": STORED},
        "uninitialised-tmem",
        ("byte 0 of `out`", "of tensor memory, which was not yet written", "reads it"),
    ),
    "a store that is not waited for, read by its own warp": (
        {"issue": COMMIT, "read": f"{FILL_REGISTERS}\n{STORE}\n{LOAD} //!"},
        "tmem-store-not-waited",
        ("tcgen05.st by warp", "tcgen05.wait::st is missing", "PTX line"),
    ),
    "a store that is not waited for, read by an mma": (
        {"publish": f"{FILL_REGISTERS}\n{WIDE}\n" + STAGES["publish"], "issue": f"{A_IN_TMEM} //!\n{COMMIT}"},
        "tmem-store-not-waited",
        ("operand A of tcgen05.mma reads", "tcgen05.wait::st is missing"),
    ),
    "a stored operand with no barrier before the mma": (
        {
            "fill": STAGES["fill"] + f"\n{STAGES['publish']}",
            "publish": f"{FILL_REGISTERS}\n{WIDE}\n{WAIT_STORE}\nmov.b32 %r0, 1; {RELAXED_OUT}",
            "out": RELAXED_OUT,
            "before": STAGES["before"] + f"\n{SPIN_UNTIL_STORED}",
            "issue": f"{A_IN_TMEM} //!\n{COMMIT}",
        },
        "tmem-race",
        ("operand A of tcgen05.mma reads", "wrote it at PTX line"),
    ),
    "an mma whose D overlaps its A": (
        {
            "publish": f"{FILL_REGISTERS}\n{WIDE}\n{WAIT_STORE}\n{BEFORE}\n" + STAGES["publish"],
            "issue": f"{AFTER}\n{A_IN_TMEM.replace('+16', '+15')} //!\n{COMMIT}",
        },
        "tmem-race",
        ("writes D to lane 0", "where its own operand A", "they overlap"),
    ),
    "an mma whose D overlaps its scale factors": (
        {
            "publish": f"{FILL_REGISTERS}\n{STORE}\n{WIDE}\n{WAIT_STORE}\n{BEFORE}\n" + STAGES["publish"],
            "issue": f"{AFTER}\n{SCALED.replace('[%r40+17]', '[%r40+15]')} //!\n{COMMIT}",
        },
        "tmem-race",
        ("writes D to lane 0", "where its own scale factors of B", "they overlap"),
    ),
    "an accumulator that is not waited for": (
        {
            "wait": "",
            "read": f"@%p16 bra NOT_MINE;\n{LOAD} //!\nNOT_MINE:",
            "out": "",
            "before": MINE + STAGES["before"],
        },
        "tmem-race",
        ("tcgen05.ld reads lane 0, column ", "the tensor core wrote it at PTX line", "a commit and a wait"),
    ),
    "an accumulator of an mma after the commit": (
        {
            "issue": f"{MMA}\n{COMMIT}\n{MMA}",
            "read": f"@%p16 bra NOT_MINE;\n{LOAD} //!\nNOT_MINE:",
            "out": "",
            "before": MINE + STAGES["before"],
        },
        "tmem-race",
        ("the tensor core wrote it",),
    ),
    "a load that is neither used nor waited for, overwritten by its own warp": (
        {"read": f"mov.b32 %r18, 0;\n{LOAD}\n{ZERO_CELLS} //!"},
        "tmem-load-not-waited",
        ("tcgen05.st writes lane", "where the tcgen05.ld of PTX line", "tcgen05.wait::ld is missing"),
    ),
    "a load that is not waited for, overwritten by an mma behind a barrier": (
        {"read": f"{LOAD}\n{SYNC}\n@%p3 bra NOT_AGAIN;\n{MMA} //!\nNOT_AGAIN:", "out": ""},
        "tmem-load-not-waited",
        ("tcgen05.mma writes lane 0, column ", "by warp 0"),
    ),
    "a load that is waited for behind the barrier only, overwritten by an mma": (
        {
            "read": f"{LOAD}\n{SYNC}\ntcgen05.wait::ld.sync.aligned;\n@%p3 bra NOT_AGAIN;\n{MMA} //!\nNOT_AGAIN:",
            "out": "",
        },
        "tmem-load-not-waited",
        ("tcgen05.mma writes lane", "where the tcgen05.ld of PTX line"),
    ),
    "a load that is not waited for in memory that is given back": (
        {"read": LOAD, "out": "", "free": STAGES["free"] + " //!"},
        "tmem-load-not-waited",
        ("tcgen05.dealloc frees lane 0, column ",),
    ),
    "an operand that nobody wrote": (
        {"fill": "", "out": STORED},
        "uninitialised-shared",
        ("byte 0 of `out`", "byte 0x400 of shared memory, which was not yet written", "reads it"),
    ),
    "an operand overwritten before the commit is waited for": (
        {"wait": "@!%p3 st.shared.b32 [a], %tx; //!\n" + STAGES["wait"]},
        "race",
        ("the tensor core read it", "warp 0, lane 0, address 0x400"),
    ),
    "an operand beyond shared memory": (
        {"issue": "add.u64 %rd10, %rd10, 0x3000;\n" + marked("issue", MMA)},
        "out-of-bounds",
        ("operand A of tcgen05.mma", "outside of the CTA's shared memory"),
    ),
    "an mma by every lane": (
        {
            "before": "setp.ne.u32 %p3, %warp, 0; setp.ne.u32 %p1, 0, 0;\n@%p3 bra ISSUED;",
            "issue": marked("issue", MMA),
        },
        "issued-by-many",
        ("32 lanes at once",),
    ),
    "an accumulator at lane 32": (
        {"issue": marked("issue", MMA).replace("[%r40]", "[%r40+0x200000]")},
        "tmem-lane",
        ("M = 128 lies at lane 32",),
    ),
    "an N that does not exist": (
        {"issue": f"mov.b32 %r43, {f16_idesc(128, 0)};\n" + marked("issue", MMA)},
        "instruction-descriptor",
        ("N = 0", "PTX ISA 9.7.16"),
    ),
    "an M that does not exist": (
        {"issue": f"mov.b32 %r43, {f16_idesc(192, 16)};\n" + marked("issue", MMA)},
        "instruction-descriptor",
        ("M = 192", "64 or 128"),
    ),
    "bf16 into f16": (
        {"issue": f"mov.b32 %r43, {f16_idesc(128, 16, d_f32=False, bf16=True)};\n" + marked("issue", MMA)},
        "instruction-descriptor",
        ("bf16 into an f16 accumulator",),
    ),
    "a transposed operand in the layout of 32-byte atoms": (
        {
            "issue": f"mov.b32 %r43, {f16_idesc(128, 16, extra=1 << 15)}; or.b64 %rd10, %rd10, {1 << 61};\n"
            + marked("issue", MMA)
        },
        "instruction-descriptor",
        ("operand A of kind::f16 is transposed",),
    ),
    "a matrix descriptor without its constant": (
        {"issue": f"and.b64 %rd11, %rd11, {(1 << 46) - 1};\n" + marked("issue", MMA)},
        "matrix-descriptor",
        ("bits 48..46", "0b001"),
    ),
    "a matrix descriptor with swizzle 3": (
        {"issue": f"or.b64 %rd11, %rd11, {3 << 61};\n" + marked("issue", MMA)},
        "matrix-descriptor",
        ("swizzle code 3",),
    ),
    "a load by half of a warp": (
        {"read": f"setp.lt.u32 %p4, %lane, 16;\n@%p4 {LOAD} //!"},
        "diverged",
        ("tcgen05.ld", "all threads of the warp", "lane 16"),
    ),
    "an address that differs between lanes": (
        {"read": f"add.u32 %r44, %r44, %lane;\n{LOAD} //!"},
        "diverged",
        ("the tensor-memory address must be the same in all lanes",),
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted(name: str) -> None:
    changes, rule, clauses = PLANTED[name]
    assert_blamed(mma_kernel(changes), rule, *clauses)


def test_tensor_memory_that_is_never_given_back() -> None:
    kernel = mma_kernel({"free": ""})
    for schedule in EVERY_SCHEDULE:
        with pytest.raises(Fault, match=r"\[tmem-leak\].*CTA \(0, 0, 0\).*32 columns at \d+ \(PTX line \d+\)"):
            kernel.run(schedule)


PLACE_ASSUMED = {"setup": STAGES["setup"] + "\nmov.b32 %r40, 0;"}
"""Uses column 0 of tensor memory instead of the address that tcgen05.alloc gives."""


def test_an_allocation_is_anywhere() -> None:
    """Another CTA of the SM may hold the first columns. The kernel with no fault runs in the same schedules."""
    assert fault_of(mma_kernel(PLACE_ASSUMED), "eager") is None, "an ordered schedule gives the first place"
    found = [fault_of(mma_kernel(PLACE_ASSUMED), f"random:{seed}") for seed in range(4)]
    assert any(one is not None and one.rule == "tmem-not-allocated" for one in found), f"nothing is found: {found}"


def test_an_allocation_of_a_cta_that_fills_the_sm_is_first() -> None:
    """DeepGEMM asserts the address 0, and that no two of its CTAs share an SM."""
    kernel = replace(mma_kernel(PLACE_ASSUMED), dynamic_smem=160 << 10)
    assert not any(fault_of(kernel, schedule) for schedule in EVERY_SCHEDULE)


def test_an_allocation_that_does_not_fit_waits_for_a_dealloc() -> None:
    body = f""".shared .align 4 .b32 first; .shared .align 4 .b32 second;
    setp.ne.u32 %p1, %warp, 0;
    @%p1 bra OTHER;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [first], 512;
    ld.shared.u32 %r1, [first];
    st.global.u32 [%out], 1;
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r1, 512;
    ret;
    OTHER:
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [second], 512;
    {ELECT}
    ld.shared.u32 %r1, [second];
    @%p15 st.global.u32 [%out+4], 2;
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r1, 512;
    ret;"""
    assert_clean(Kernel(body, {"out": np.zeros(2, np.uint32)}, block=(64, 1, 1)), {"out": np.array([1, 2])})


def nested(*columns: int, between: str = "", **launch: Any) -> Kernel:
    """A warp that allocates so many columns one after another, and then frees the last ones first. `between` comes
    after the first allocation, whose dealloc is marked. `launch`: fields of Kernel."""
    alloc, dealloc = (f"tcgen05.{name}.cta_group::1.sync.aligned" for name in ("alloc", "dealloc"))
    got = [f"{alloc}.shared::cta.b32 [slot], {count}; ld.shared.u32 %r{i}, [slot];" for i, count in enumerate(columns)]
    freed = [f"{dealloc}.b32 %r{i}, {count};" for i, count in enumerate(columns)][:0:-1]
    last = f"@!%p2 {dealloc}.b32 %r0, {columns[0]}; //!"
    head = ".shared .align 4 .b32 slot; setp.ne.u32 %p1, %warp, 0; @%p1 bra END; setp.ne.u32 %p2, 0, 0;"
    return Kernel("\n".join([head, got[0], between, *got[1:], *freed, last, "END: ret;"]), **{"grid": MANY, **launch})


MANY = (16, 1, 1)
"""A grid of as many CTAs as tensor memory has allocations."""


def holding(columns: int, more: int, between: str = "", smem: int = 0) -> Kernel:
    """A warp that keeps columns until it has got more, except for what it does in between."""
    return nested(columns, more, between=between, dynamic_smem=smem)


@pytest.mark.parametrize(
    ("columns", "state"),
    [
        ((256, 256), "2 CTAs that keep 256 take all 512 columns"),
        ((128, 128), "4 CTAs that keep 128 take"),
        ((256, 32), "2 CTAs that keep 256 take"),
        ((128, 64, 32), "4 CTAs that keep 128 take"),
    ],
)
def test_columns_that_are_kept_until_there_are_more(columns: tuple[int, ...], state: str) -> None:
    """CTAs of one SM may each hold what the others wait for: two with 256 columns, four with 128."""
    assert_blamed(nested(*columns), "tmem-hold-and-wait", f"{columns[1]} more at PTX line", state)


THREE = 70 << 10
"""Shared memory that three CTAs of an SM have."""


def test_ctas_that_keep_unequal_amounts_wait_for_each_other() -> None:
    """With room for three, those that keep 192 leave 128, on which a third one sits."""
    told = "32 more at PTX line", "2 CTAs that keep 192 and 1 that keeps 128 take all", "an SM has room for 3 if regis"
    assert_blamed(nested(128, 64, 32, dynamic_smem=THREE), "tmem-hold-and-wait", *told)


def test_a_launch_of_too_few_ctas_does_not_wait_for_itself() -> None:
    told = "the launch has 2 for an SM"
    assert_blamed(nested(256, 256, grid=(2, 1, 1)), "tmem-hold-and-wait", told)
    assert_clean(nested(256, 256, grid=(1, 1, 1)), {})
    assert_clean(nested(128, 64, 32, grid=(2, 1, 1)), {})


def test_a_stated_number_of_registers_counts() -> None:
    kernel = nested(256, 256, block=(512, 1, 1))
    assert_blamed(kernel, "tmem-hold-and-wait", "room for 4 if registers suffice, of which no .maxnreg states the numb")
    assert_blamed(replace(kernel, directives=".maxnreg 64"), "tmem-hold-and-wait", "others; an SM has room for 2")
    assert_clean(replace(kernel, directives=".maxnreg 128"), {})


FREED_FIRST = """tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r0, 256;
setp.eq.u32 %p2, 0, 0;"""


@pytest.mark.parametrize(
    "kernel",
    [
        holding(256, 256, smem=113 << 10),
        holding(128, 128, smem=THREE),
        nested(128, 32, 32, dynamic_smem=THREE),
        holding(256, 256, FREED_FIRST),
    ],
    ids=["one CTA has room", "three CTAs have room", "160 and 128 in no way make 512", "freed before"],
)
def test_columns_that_no_other_cta_waits_for(kernel: Kernel) -> None:
    assert_clean(kernel, {})


def test_two_allocations_that_never_fit_together_are_a_deadlock() -> None:
    body = f""".shared .align 4 .b32 taddr;
    {tmem_alloc(512)}
    @%p12 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [taddr], 32;
    ret;"""
    with pytest.raises(Fault, match=r"\[deadlock\].*free columns of tensor memory; held: 512 columns \(PTX line \d+\)"):
        Kernel(body).run()


DOUBLE_BUFFERED = f"""{STAGES["declare"]}
setp.eq.u32 %p13, %tx, 0;
@%p13 mbarrier.init.shared::cta.b64 [mbar], 1;
@%p13 mbarrier.init.shared::cta.b64 [other], 128;
fence.mbarrier_init.release.cluster;
{SYNC}
{tmem_alloc(32)}
{STAGES["addresses"]}
{STAGES["fill"]}
{STAGES["publish"]}
setp.ne.u32 %p1, 0, 0;
mov.u32 %r20, 0; mov.f32 %f1, 0f00000000;
setp.eq.u32 %p3, %warp, 0; {ELECT} and.pred %p3, %p3, %p15;
LOOP: and.b32 %r21, %r20, 1; shl.b32 %r22, %r21, 4; add.u32 %r23, %r40, %r22; add.u32 %r24, %r44, %r22;
@!%p3 bra ISSUED;
setp.eq.u32 %p5, %r20, 0;
@%p5 bra FREE;
add.u32 %r25, %r20, 1; and.b32 %r25, %r25, 1;
{wait("other", "%r25")}
FREE: {MMA.replace("%r40", "%r23")}
{COMMIT}
ISSUED: {wait("mbar", "%r21")}
{LOAD.replace("%r44", "%r24")}
tcgen05.wait::ld.sync.aligned;
mbarrier.arrive.shared::cta.b64 _, [other];
add.f32 %f1, %f1, %r0;
add.u32 %r20, %r20, 1; setp.lt.u32 %p4, %r20, 5; @%p4 bra LOOP;
mul.wide.u32 %rd1, %tx, 4; add.u64 %rd1, %rd1, %out; st.global.f32 [%rd1], %f1;
{tmem_free(32)}
ret;"""


def test_accumulators_in_two_buffers_by_turns() -> None:
    kernel = Kernel(DOUBLE_BUFFERED, {"out": np.zeros(128, np.float32)}, block=(128, 1, 1))
    assert_clean(kernel, {"out": np.full(128, 80, np.float32)})


USE = "add.u32 %r17, %r0, %r0;"


@pytest.mark.parametrize(
    ("between", "counted"), [("tcgen05.wait::ld.sync.aligned;", False), (USE, True), (f"@%p3 {USE}", True)]
)
def test_overwriting_what_a_load_has_read(between: str, counted: bool) -> None:
    """A wait ends the load. So does a use of the register, as in FlashAttention-4, but that is counted."""
    stages = {"read": f"mov.b32 %r18, 0;\n{LOAD}\n{between}\n{ZERO_CELLS}\n{WAIT_STORE}"}
    for schedule in EVERY_SCHEDULE:
        data, counters = mma_kernel(stages).run(schedule)
        assert np.array_equal(data["out"], EXPECTED), f"{schedule}: the load is to give 16 everywhere"
        writes = counters.get("tmem_unwaited_overwrites", 0)
        assert (writes > 0) == counted, f"{schedule}: {writes} writes counted that only a register dependence orders"


def test_a_load_used_on_one_path_only() -> None:
    """One path uses the load, the other does not; the other one is blamed."""
    used = f"setp.eq.u32 %p4, %warp, 0;\n@!%p4 bra UNUSED;\n{USE}\nUNUSED:"
    kernel = mma_kernel({"read": f"mov.b32 %r18, 0;\n{LOAD}\n{used}\n{ZERO_CELLS} //!"})
    assert_blamed(kernel, "tmem-load-not-waited", "by warp")


@pytest.mark.parametrize("issue", [A_IN_TMEM, SCALED], ids=["A", "the scale factors"])
def test_operands_beside_the_accumulator_do_not_overlap_it(issue: str) -> None:
    stored = f"{FILL_REGISTERS}\n{WIDE}\n{WAIT_STORE}\n{BEFORE}\n" + STAGES["publish"]
    read = {"read": f"{AFTER}\n{STAGES['read']}"}
    assert_clean(mma_kernel({"publish": stored, "issue": f"{AFTER}\n{issue}\n{COMMIT}", **read}), {})

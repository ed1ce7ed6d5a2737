"""Inlined calls, jumps by a table, output and assertions of device code, and modifiers in any order."""

from __future__ import annotations

import re

import numpy as np
import pytest

from backends.vm.bind.forms import find
from backends.vm.faults import Fault, LaunchError, UnknownInstructionError
from backends.vm.host.session import open_session
from backends.vm.load import load
from backends.vm.machine.machine import Machine
from backends.vm.memory.global_memory import HEAP_BYTES
from backends.vm.ptx.ast import Instruction

HEAD = ".version 8.7\n.target sm_100a\n.address_size 64\n"
FUNCTIONS = """
.func (.param .b32 out) plus(.param .b32 x, .param .b32 y)
{
  .reg .b32 %r<4>;
  .reg .pred %p1;
  ld.param.u32 %r1, [x];
  ld.param.u32 %r2, [y];
  setp.gt.u32 %p1, %r1, 100;
  @%p1 bra large;
  add.u32 %r3, %r1, %r2;
  st.param.b32 [out], %r3;
  ret;
large:
  st.param.b32 [out], 0;
  ret;
}
.func (.param .b32 out) thrice(.param .b32 x)
{
  .reg .b32 %r<4>;
  .shared .u32 calls;
  ld.param.u32 %r1, [x];
  { .param .b32 a; .param .b32 b; .param .b32 r;
    st.param.b32 [a], %r1; st.param.b32 [b], %r1;
    call.uni (r), plus, (a, b);
    ld.param.b32 %r2, [r]; }
  { .param .b32 a; .param .b32 b; .param .b32 r;
    st.param.b32 [a], %r2; st.param.b32 [b], %r1;
    call.uni (r), plus, (a, b);
    ld.param.b32 %r3, [r]; }
  st.param.b32 [out], %r3;
  ret;
}
"""
CALLER = """
.visible .entry k(.param .u64 y)
{
  .reg .b32 %r<8>;
  .reg .b64 %rd<4>;
  .reg .pred %p<2>;
  ld.param.u64 %rd1, [y];
  mov.u32 %r1, %tid.x;
  mul.wide.u32 %rd2, %r1, 4;
  add.u64 %rd1, %rd1, %rd2;
  mul.lo.u32 %r4, %r1, 5;
  setp.ne.u32 %p1, %r1, 7;
  mov.u32 %r3, 77;
  { .param .b32 a; .param .b32 r;
    st.param.b32 [a], %r4;
    @%p1 call (r), thrice, (a);
    @%p1 ld.param.b32 %r3, [r]; }
  st.global.u32 [%rd1], %r3;
  ret;
}
"""


def _run(ptx: str, size: int = 32, schedule: str = "eager") -> tuple[list[int], str]:
    """Runs entry `k` on one warp. Returns the words that it stored at `y`, and what it printed."""
    machine, y, said = Machine(schedule), np.zeros(size, np.uint32), list[str]()
    machine.printed = said.append
    base = machine.memory.add("y", y.view(np.uint8)).base
    machine.launch(load(HEAD + ptx).entry("k"), (1, 1, 1), (32, 1, 1), [base.to_bytes(8, "little")])
    return y.tolist(), "".join(said)


def test_functions_call_functions_under_a_guard() -> None:
    stored, _ = _run(FUNCTIONS + CALLER)
    # 5 i three times. Above 100 `plus` gives 0, and its second call then adds to that.
    twice = [2 * x if x <= 100 else 0 for x in range(0, 160, 5)]
    expected = [t + x if t <= 100 else 0 for t, x in zip(twice, range(0, 160, 5), strict=True)]
    expected[7] = 77
    assert stored == expected


PROTO = "mov.u32 %r3, 77; proto: .callprototype (.param .b32 _) _ (.param .b32 _);"
INDIRECT = CALLER.replace("(r), thrice, (a)", "(r), %rd1, (a), proto").replace("mov.u32 %r3, 77;", PROTO)
REFUSED = [
    (FUNCTIONS.replace("(r), plus, (a, b)", "(r), thrice, (a)") + CALLER, "thrice, which calls itself"),
    (".extern .func (.param .b32 out) thrice(.param .b32 x);" + CALLER, "thrice, which has no body here"),
    (FUNCTIONS + INDIRECT, "calls a function through a register (an indirect call)"),
    (FUNCTIONS + CALLER.replace("(r), thrice, (a)", "(r), plus, (a)"), "plus with other arguments than its 3"),
    (FUNCTIONS + CALLER.replace("(r), thrice, (a)", "(r), thrice, (y)"), "thrice with other arguments than its 2"),
]


@pytest.mark.parametrize(("ptx", "sentence"), REFUSED)
def test_a_call_that_cannot_be_followed_is_named(ptx: str, sentence: str) -> None:
    with pytest.raises(UnknownInstructionError, match=re.escape(sentence)):
        _run(ptx)


TABLE = """
.visible .entry k(.param .u64 y)
{
  .reg .b32 %r<8>;
  .reg .b64 %rd<4>;
  ld.param.u64 %rd1, [y];
  mov.u32 %r1, %tid.x;
  mul.wide.u32 %rd2, %r1, 4;
  add.u64 %rd1, %rd1, %rd2;
  and.b32 %r2, %r1, MASK;
  jumps: .branchtargets zero, one, two;
  brx.idx %r2, jumps;
one:
  mov.u32 %r3, 111;
  bra done;
two:
  mov.u32 %r3, 222;
  bra done;
zero:
  mov.u32 %r3, 100;
done:
  st.global.u32 [%rd1], %r3;
  ret;
}
"""


def test_each_lane_jumps_by_its_index() -> None:
    stored, _ = _run(TABLE.replace("MASK", "1"))
    assert stored == [100, 111] * 16
    stored, _ = _run(TABLE.replace("MASK", "2"))
    assert stored == [100, 100, 222, 222] * 8


def test_an_index_beyond_the_table_is_a_fault() -> None:
    with pytest.raises(Fault, match="index 3 into a list of 3 labels") as caught:
        _run(TABLE.replace("MASK", "3"))
    assert (caught.value.rule, caught.value.lane) == ("branch-index", 3)


def _bytes(text: str) -> str:
    return ", ".join(str(byte) for byte in text.encode() + b"\0")


def _printing(form: str) -> str:
    return f"""
.extern .func (.param .b32 status) vprintf (.param .b64 format, .param .b64 arguments);
.global .align 1 .b8 form[{len(form) + 1}] = {{{_bytes(form)}}};
.global .align 1 .b8 word[6] = {{{_bytes("seven")}}};
.visible .entry k(.param .u64 y)
{{
  .reg .b32 %r<8>;
  .reg .b64 %rd<8>;
  .reg .pred %p<2>;
  .local .align 8 .b8 depot[40];
  ld.param.u64 %rd7, [y];
  mov.u32 %r1, %tid.x;
  setp.gt.u32 %p1, %r1, 1;
  @%p1 ret;
  mov.u64 %rd1, depot;
  cvta.local.u64 %rd2, %rd1;
  st.local.u32 [depot], %r1;
  mov.b64 %rd3, 0d3FF8000000000000;
  st.local.b64 [depot+8], %rd3;
  mov.u64 %rd4, word;
  cvta.global.u64 %rd5, %rd4;
  st.local.u64 [depot+16], %rd5;
  st.local.u32 [depot+24], 255;
  mov.u64 %rd4, form;
  cvta.global.u64 %rd6, %rd4;
  {{ .param .b64 a; .param .b64 b; .param .b32 r;
    st.param.b64 [a], %rd6; st.param.b64 [b], %rd2;
    call.uni (r), vprintf, (a, b);
    ld.param.b32 %r2, [r]; }}
  st.global.u32 [%rd7], %r2;
  ret;
}}
"""


def test_what_a_kernel_prints_is_handed_on() -> None:
    _, said = _run(_printing("%3d|%.2f|%6s|%x%%\n"))
    assert said == "  0|1.50| seven|ff%\n  1|1.50| seven|ff%\n"


def _asserting(meeting: str) -> str:
    """An assertion that lanes 16 to 31 fail while the others go to `meeting`, as in Triton's device_assert."""
    return f"""
.extern .func __assertfail (.param .b64 a, .param .b64 b, .param .b32 c, .param .b64 d, .param .b64 e);
.global .align 1 .b8 words[8] = {{{_bytes("too big")}}};
.visible .entry k(.param .u64 y)
{{
  .reg .b32 %r<4>;
  .reg .b64 %rd<4>;
  .reg .pred %p<2>;
  mov.u32 %r1, %tid.x;
  setp.lt.u32 %p1, %r1, 16;
  @!%p1 bra FAILED;
  {meeting}
  ret;
FAILED:
  {{ .param .b64 a; .param .b64 b; .param .b32 c; .param .b64 d; .param .b64 e;
    mov.u64 %rd1, words;
    cvta.global.u64 %rd2, %rd1;
    st.param.b64 [a], %rd2; st.param.b64 [b], %rd2; st.param.b32 [c], 7; st.param.b64 [d], %rd2; st.param.b64 [e], 1;
    call.uni __assertfail, (a, b, c, d, e); }}
  trap;
}}
"""


@pytest.mark.parametrize(
    "meeting", ["bar.sync 0;", "shfl.sync.idx.b32 %r2, %r1, 0, 31, -1;", "bar.sync 0; bar.sync 0;", ""]
)
def test_lanes_that_failed_an_assertion_are_missed_for_that(meeting: str) -> None:
    """The other lanes reach a barrier first, but to report a diverged warp there would hide the reason."""
    with pytest.raises(Fault, match="assertion `too big` failed in too big, too big:7") as caught:
        _run(_asserting(meeting))
    assert (caught.value.rule, caught.value.lane) == ("assert", 16)


@pytest.mark.parametrize(
    ("elsewhere", "rule", "blamed"),
    [
        ("  bar.sync 1;\n", "diverged", "bar.sync 0;"),
        ("  ld.global.u32 %r2, [%rd3];\n", "uninitialised-register", "ld.global.u32 %r2, [%rd3];"),
        ("AGAIN: bra.uni AGAIN;\n", "deadlock", ""),
    ],
)
def test_lanes_that_are_gone_for_no_assertion_are_told_of(elsewhere: str, rule: str, blamed: str) -> None:
    """The others wait for them at the barrier, and what keeps them is the defect."""
    with pytest.raises(Fault) as caught:
        _run(_asserting("bar.sync 0;").replace("FAILED:\n", f"FAILED:\n{elsewhere}"))
    assert (caught.value.rule, caught.value.text) == (rule, blamed), str(caught.value)


@pytest.mark.parametrize("form", ["%1000000000d", "%.1000000000f", f"%{'9' * 3000}d", "%d %1025x"])
def test_a_kernel_cannot_ask_for_any_width(form: str) -> None:
    with pytest.raises(Fault, match="at most 1024 are made") as caught:
        _run(_printing(form))
    assert caught.value.rule == "printf"


def test_the_width_and_the_precision_of_arguments_are_those_of_c() -> None:
    first = "st.local.u32 [depot], %r1;"
    wide = _printing("%*.3x|\n").replace(first, "st.local.u32 [depot], 5; st.local.u32 [depot+4], 10;")
    assert _run(wide)[1] == "  00a|\n  00a|\n"
    negative = _printing("%.*f|\n").replace(first, "st.local.u32 [depot], -1;")
    assert _run(negative)[1] == "1.500000|\n1.500000|\n", "a negative precision is none"


@pytest.mark.parametrize("pointer", [1 << 63, 2**64 - 1, 2**63 - 1])
@pytest.mark.parametrize("argument", ["a", "b", "word"])
def test_printf_reads_no_address_outside_of_every_window(argument: str, pointer: int) -> None:
    if argument == "word":
        ptx = _printing("%3d%.2f%s").replace("st.local.u64 [depot+16], %rd5", f"st.local.u64 [depot+16], {pointer}")
    else:
        given = {"a": "st.param.b64 [a], %rd6", "b": "st.param.b64 [b], %rd2"}[argument]
        ptx = _printing("%d").replace(given, f"st.param.b64 [{argument}], {pointer}")
    with pytest.raises(Fault) as caught:
        _run(ptx)
    assert caught.value.rule == "out-of-bounds"


ORDERS = [
    ("atom.acq_rel.gpu.global.add.u32", "atom.global.acq_rel.gpu.add.u32"),
    ("atom.acq_rel.gpu.add.u32", "atom.add.acq_rel.gpu.u32"),
    ("atom.acquire.gpu.cas.b32", "atom.cas.acquire.gpu.b32"),
    ("red.release.gpu.global.add.u32", "red.add.release.gpu.global.u32"),
    ("ld.acquire.gpu.global.u32", "ld.global.acquire.gpu.u32"),
    ("stmatrix.sync.aligned.m8n8.x2.shared.b16", "stmatrix.sync.aligned.x2.m8n8.shared.b16"),
    ("tcgen05.cp.cta_group::1.32x128b.warpx4", "tcgen05.cp.cta_group::1.warpx4.32x128b"),
]


def _found(spelling: str) -> object:
    return find(Instruction(tuple(spelling.split(".")), (), None, 1, spelling))


@pytest.mark.parametrize(("written", "other"), ORDERS)
def test_modifiers_stand_in_any_order(written: str, other: str) -> None:
    form, words = find(Instruction(tuple(written.split(".")), (), None, 1, written))
    assert find(Instruction(tuple(other.split(".")), (), None, 1, other)) == (form, words), other


@pytest.mark.parametrize(
    "spelling",
    [
        "atom.acq_rel.gpu.gpu.global.add.u32",
        "gpu.atom.acq_rel.global.add.u32",
        "cp.async.bulk.tensor.2d.shared::cta.global.bulk_group",
        "st.mbarrier::complete_tx::bytes.async.u32",
        "cp.async.bulk.L2.prefetch.global",
        "ldmatrix.sync.aligned.m16n16.x1.trans.shared.b4x16_p64.b8x16",
        "mbarrier.try_wait.relaxed.parity.cta.b64",
        "mma.sync.aligned.m16n8k8.col.row.f32.f16.f16.f32",
    ],
)
def test_the_order_of_names_types_and_spaces_matters(spelling: str) -> None:
    with pytest.raises(UnknownInstructionError):
        _found(spelling)


SAME = """
.visible .entry k(.param .u64 y)
{
  .reg .b32 %r<8>;
  .shared .u32 cell;
  mov.u32 %r1, %tid.x;
  shr.u32 %r1, %r1, 5;
  VALUE
  st.shared.u32 [cell], %r1;
  ret;
}
"""


@pytest.mark.parametrize(("value", "races"), [("mov.u32 %r1, 5;", False), ("", True)])
def test_warps_that_store_one_value_do_not_race(value: str, races: bool) -> None:
    for schedule in ("eager", "lazy", "random:3"):
        machine = Machine(schedule)
        entry = load(HEAD + SAME.replace("VALUE", value)).entry("k")

        def launch(machine: Machine = machine, entry: object = entry) -> None:
            machine.launch(entry, (1, 1, 1), (64, 1, 1), [bytes(8)])  # pyright: ignore[reportArgumentType]

        if races:
            with pytest.raises(Fault, match="nothing orders the two"):
                launch()
        else:
            launch()


ALLOCATING = """
.extern .func (.param .b64 func_retval0) malloc (.param .b64 malloc_param_0);
.extern .func free (.param .b64 free_param_0);
.visible .entry k(.param .u64 y)
{
  .reg .b32 %r<8>;
  .reg .b64 %rd<8>;
  .reg .pred %p<2>;
  ld.param.u64 %rd1, [y];
  mov.u32 %r1, %tid.x;
  mul.wide.u32 %rd2, %r1, 4;
  add.u64 %rd1, %rd1, %rd2;
  mov.b64 %rd3, SIZE;
  { .param .b64 size; .param .b64 place;
    st.param.b64 [size], %rd3;
    call.uni (place), malloc, (size);
    ld.param.b64 %rd4, [place]; }
  setp.eq.u64 %p1, %rd4, 0;
  @%p1 bra none;
  USE
  { .param .b64 place; st.param.b64 [place], %rd4; call.uni free, (place); }
  AGAIN
  st.global.u32 [%rd1], %r2;
  ret;
none:
  st.global.u32 [%rd1], 77;
  ret;
}
"""
STORED = "st.u32 [%rd4+16], %r1; ld.u32 %r2, [%rd4+16]; mad.lo.u32 %r2, %r2, 3, 5;"


def _allocating(size: int = 64, use: str = STORED, again: str = "") -> str:
    return ALLOCATING.replace("SIZE", str(size)).replace("USE", use).replace("AGAIN", again)


def test_each_thread_has_the_memory_that_it_allocates() -> None:
    assert _run(_allocating())[0] == [3 * lane + 5 for lane in range(32)]


def test_a_heap_that_is_too_small_answers_null() -> None:
    stored, _ = _run(_allocating(size=HEAP_BYTES // 4))
    assert stored[0] == 5, "the first thread found room"
    assert stored[-1] == 77, "32 quarters of the heap were given out"


SLOTS = [
    ("malloc, (size)", "malloc, (%rd3)", "an argument that is no variable of 1, 2, 4 or 8 bytes"),
    ("malloc, (size)", "malloc, (64)", "an argument that is no variable"),
    ("malloc, (size)", "malloc, ([size])", "an argument that is no variable"),
    ("malloc, (size)", "malloc, (y)", "an argument that is no variable"),
    (".param .b64 size;", ".param .align 8 .b8 size[16];", "an argument that is no variable"),
    ("(place), malloc", "(%rd4), malloc", "a result that is not one variable of 8 bytes"),
    ("(place), malloc", "(_), malloc", "a result that is not one variable"),
    ("(place), malloc", "(place, size), malloc", "a result that is not one variable"),
    (".param .b64 place;", ".param .b32 place;", "a result that is not one variable"),
]


@pytest.mark.parametrize(("old", "new", "sentence"), SLOTS, ids=[new for _, new, _ in SLOTS])
def test_a_system_call_takes_variables_of_its_sizes(old: str, new: str, sentence: str) -> None:
    with pytest.raises(UnknownInstructionError, match=re.escape(sentence)):
        _run(_allocating().replace(old, new, 1))


FREED = "{ .param .b64 place; st.param.b64 [place], %rd4; call.uni free, (place); }"


@pytest.mark.parametrize(
    ("ptx", "rule"),
    [
        (_allocating(again=FREED), "device-heap"),
        (_allocating(use=STORED + "add.u64 %rd4, %rd4, 16;"), "device-heap"),
        (_allocating(again="ld.u32 %r2, [%rd4+16];"), "out-of-bounds"),
        (_allocating(use="ld.u32 %r2, [%rd4+64];"), "out-of-bounds"),
        (_allocating(use="ld.u32 %r2, [%rd4];"), "uninitialised-global"),
    ],
    ids=["freed twice", "another address", "used after free", "past the end", "never written"],
)
def test_a_misuse_of_the_heap_is_found(ptx: str, rule: str) -> None:
    with pytest.raises(Fault) as fault:
        _run(ptx)
    assert fault.value.rule == rule


def test_a_kernel_that_launches_kernels_is_refused_by_name() -> None:
    launching = """
.extern .func (.param .b32 r) __cudaCDP2LaunchDeviceV2 (.param .b64 a, .param .b64 b);
.visible .entry k(.param .u64 y)
{
  .reg .b64 %rd<2>;
  ld.param.u64 %rd1, [y];
  { .param .b64 a; .param .b64 b; .param .b32 r; st.param.b64 [a], %rd1; st.param.b64 [b], %rd1;
    call.uni (r), __cudaCDP2LaunchDeviceV2, (a, b); }
  ret;
}
"""
    with pytest.raises(UnknownInstructionError, match=r"__cudaCDP2LaunchDeviceV2, by which a kernel launches another"):
        _run(launching)


GRID_BARRIER = """
.visible .entry k(.param .u64 y)
{
  .reg .b32 %r<12>;
  .reg .b64 %rd<8>;
  .reg .pred %p<4>;
  ld.param.u64 %rd1, [y];
  mov.u32 %r1, %ctaid.x;
  mov.u32 %r2, %tid.x;
  mov.u32 %r3, %envreg2;
  mov.u32 %r4, %envreg1;
  mov.b64 %rd3, {%r3, %r4};
  setp.ne.s64 %p1, %rd3, 0;
  @!%p1 trap;
  mad.lo.u32 %r5, %r1, 32, %r2;
  mul.wide.u32 %rd2, %r5, 4;
  add.u64 %rd2, %rd1, %rd2;
  mul.lo.u32 %r6, %r5, 7;
  st.global.u32 [%rd2], %r6;
  barrier.sync 0;
  setp.ne.u32 %p2, %r2, 0;
  @%p2 bra MET;
  mov.u32 %r7, %nctaid.x;
  sub.u32 %r8, 0x80000001, %r7;
  setp.eq.u32 %p3, %r1, 0;
  selp.b32 %r8, %r8, 1, %p3;
  atom.add.release.gpu.u32 %r9, [%rd3+4], %r8;
WAITING:
  ld.acquire.gpu.u32 %r10, [%rd3+4];
  xor.b32 %r10, %r10, %r9;
  setp.gt.s32 %p3, %r10, -1;
  @%p3 bra WAITING;
MET:
  barrier.sync 0;
  mov.u32 %r7, %nctaid.x;
  mul.lo.u32 %r7, %r7, 32;
  add.u32 %r11, %r5, 32;
  rem.u32 %r11, %r11, %r7;
  mul.wide.u32 %rd4, %r11, 4;
  add.u64 %rd4, %rd1, %rd4;
  ld.global.u32 %r6, [%rd4];
  mul.lo.u32 %r11, %r7, 4;
  cvt.u64.u32 %rd5, %r11;
  add.u64 %rd2, %rd2, %rd5;
  st.global.u32 [%rd2], %r6;
  ret;
}
"""
"""The code of cooperative_groups' grid.sync(), between a store and a load of another CTA's element."""


def _cooperate(ctas: int, schedule: str, *, cooperative: bool = True) -> list[int]:
    machine, y = Machine(schedule), np.zeros(2 * 32 * ctas, np.uint32)
    base = machine.memory.add("y", y.view(np.uint8)).base
    parameters = [base.to_bytes(8, "little")]
    entry = load(HEAD + GRID_BARRIER).entry("k")
    for _ in range(2):
        machine.launch(entry, (ctas, 1, 1), (32, 1, 1), parameters, cooperative=cooperative)
    return y[32 * ctas :].tolist()


@pytest.mark.parametrize("schedule", ["eager", "lazy", "random:3"])
def test_the_ctas_of_a_cooperative_launch_wait_for_each_other(schedule: str) -> None:
    ctas = 12
    assert _cooperate(ctas, schedule) == [7 * (x % (32 * ctas)) for x in range(32, 32 * ctas + 32)]


TILES = """
.visible .entry k(.param .u64 y)
{
  .reg .b32 %r<12>;
  .reg .b64 %rd<4>;
  .reg .pred %p<4>;
  ld.param.u64 %rd1, [y];
  mov.u32 %r1, %tid.x;
  shr.u32 %r2, %r1, 5;
  mov.u32 %r3, %reserved_smem_offset_1;
  cvt.u64.u32 %rd2, %r3;
  cvta.shared.u64 %rd2, %rd2;
  and.b32 %r4, %r1, 31;
  setp.ne.u32 %p1, %r4, 0;
  @%p1 bra STARTED;
  shl.b32 %r5, 1, %r2;
  not.b32 %r6, %r5;
  red.and.release.cta.b32 [%rd2], %r6;
STARTED:
  barrier.sync 0;
  @%p1 bra MET;
  red.or.release.cta.b32 [%rd2], %r5;
WAITING:
  ld.acquire.cta.u32 %r7, [%rd2];
  and.b32 %r7, %r7, 3;
  setp.ne.u32 %p2, %r7, 3;
  @%p2 bra WAITING;
MET:
  mov.u32 %r8, %reserved_smem_offset_end;
  mov.u32 %r9, %reserved_smem_offset_cap;
  st.global.v2.u32 [%rd1], {%r8, %r9};
  ret;
}
"""
"""The tiles of several warps of cooperative_groups meet in reserved shared memory that nobody has initialised."""


@pytest.mark.parametrize("schedule", ["eager", "lazy", "random:3"])
def test_tiles_of_several_warps_meet_in_reserved_shared_memory(schedule: str) -> None:
    machine, y = Machine(schedule), np.zeros(2, np.uint32)
    address = machine.memory.add("y", y.view(np.uint8)).base
    machine.launch(load(HEAD + TILES).entry("k"), (1, 1, 1), (64, 1, 1), [address.to_bytes(8, "little")])
    assert y.tolist() == [288, 1024], "the end of the reserved bytes and their number, as on an H200"


def test_other_launches_have_no_barrier_of_the_grid() -> None:
    with pytest.raises(Fault) as fault:
        _cooperate(2, "eager", cooperative=False)
    assert fault.value.rule == "trap"


def test_a_cooperative_launch_fits_on_the_device() -> None:
    session = open_session("sm_100a", sm_count=2)
    with pytest.raises(LaunchError, match="a cooperative launch of 65 CTAs, of which only 64 fit"):
        session.launch(HEAD + GRID_BARRIER, "k", (65, 1, 1), (32, 1, 1), [bytes(8)], cooperative=True)

"""Launches that are refused, and dependent launches that access memory too early."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from backends.vm.executor import VmExecutor
from backends.vm.faults import LaunchError, UnknownInstructionError
from backends.vm.load import load
from backends.vm.machine.code import BoundFunction
from backends.vm.machine.machine import Machine
from backends.vm.memory.dependent_launches import MOST_OVERLAPPING
from backends.vm.ptx.tree import PtxSyntaxError
from conformance.vm.kernel import Kernel, assert_blamed, assert_clean, collected, slugs
from megamoe.contract import BufferArg, Launch, Program, RunOptions

PLAIN = Kernel("ret;", {"out": np.zeros(4, np.uint32)})

MANY = {f"x{number}": np.zeros(1, np.uint32) for number in range(4096)}
SIZES = {
    "threads": ({"block": (1025, 1, 1)}, "1024"),
    "block z": ({"block": (1, 1, 65)}, "65 in z, where at most 64"),
    "nothing": ({"grid": (0, 1, 1)}, "at least 1"),
    "grid y": ({"grid": (1, 65536, 1)}, "65536 in y, where at most 65535"),
    "cluster": ({"grid": (32, 1, 1), "cluster": (32, 1, 1)}, "32"),
    "parts of a cluster": ({"grid": (3, 1, 1), "cluster": (2, 1, 1)}, "not a multiple of the cluster"),
    "dynamic shared memory": ({"dynamic_smem": 232449}, "232449 bytes of dynamic shared memory.* 232448"),
    "less than no shared memory": ({"dynamic_smem": -1}, "-1 bytes of dynamic shared memory"),
    "CTAs": ({"grid": (2**31 - 1, 1, 1)}, r"2147483647, 1, 1\) has more than the 1048576 CTAs"),
    "local memory": ({"body": ".local .b8 b[2147483647]; ret;"}, "2147483647 bytes of local memory a thread"),
    "constants": ({"module": ".const .b8 c[99857989632];"}, r"\.const variables .* 99857989632 bytes; at most 65536"),
    "parameters": ({"buffers": MANY}, "parameters of 32768 bytes; at most 32764"),
    "variables": ({"module": ".global .b8 g[99857989632];"}, r"\.global variables .* 99857989632 bytes"),
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_beyond_a_gpu(name: str) -> None:
    """Refused before anything of that size is allocated."""
    options, sentence = SIZES[name]
    with pytest.raises(LaunchError, match=sentence):
        replace(PLAIN, **options).run()  # type: ignore[arg-type]


@pytest.mark.parametrize(("size", "said"), [(10**15, "1000000000000000 bytes; at most"), (-1, "has -1 bytes")])
def test_workspaces_are_refused_before_they_are_made(size: int, said: str) -> None:
    launch = Launch("kernel", (1, 1, 1), (32, 1, 1), (BufferArg("work"),))
    program = Program("sm_90a", PLAIN.ptx, (launch,), {"work": size})
    violation = VmExecutor().run(program, {}, RunOptions()).violation
    assert said in (violation or "nothing"), f"a workspace of {size} bytes: {violation}"


def test_static_shared_memory_counts_as_well() -> None:
    kernel = replace(
        PLAIN, body=".shared .align 16 .b8 big[1024]; st.shared.u32 [big], 0; ret;", dynamic_smem=232448 - 1023
    )
    with pytest.raises(LaunchError, match="1024 static ones exceed 232448"):
        kernel.run()
    replace(kernel, dynamic_smem=232448 - 1024).run()


def test_the_largest_cluster_runs() -> None:
    """16 CTAs of 1024 threads, plus their copies: more agents than a narrower stamp could name."""
    body = """.shared .align 16 .b8 buf[16]; .shared .align 8 .b64 bar; mov.u32 %r1, buf; mov.u32 %r2, bar;
    setp.ne.u32 %p1, %tx, 0; @%p1 ret;
    mbarrier.init.shared::cta.b64 [%r2], 1; fence.mbarrier_init.release.cluster;
    mbarrier.arrive.expect_tx.shared::cta.b64 %rd1, [%r2], 16;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%x], 16, [%r2];
    WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r2], 0; @!%p3 bra WAIT;
    ld.shared.b32 %r3, [%r1]; mul.wide.u32 %rd2, %cta, 4; add.u64 %rd2, %rd2, %out; st.global.b32 [%rd2], %r3; ret;"""
    buffers = {"x": np.full(4, 7, np.uint32), "out": np.zeros(16, np.uint32)}
    kernel = Kernel(body, buffers, grid=(16, 1, 1), block=(1024, 1, 1), cluster=(16, 1, 1), inputs=("x",))
    assert kernel.run()[0]["out"].tolist() == [7] * 16


def _declaring(directives: str) -> BoundFunction:
    """A kernel that stores, for each CTA, its rank in its cluster times 100, plus its cluster's number of CTAs."""
    body = """mov.u32 %r1, %cluster_ctarank; mov.u32 %r2, %cluster_nctarank; mad.lo.u32 %r1, %r1, 100, %r2;
    setp.ne.u32 %p1, %tx, 0; @%p1 ret; mul.wide.u32 %rd1, %cta, 4; add.u64 %out, %out, %rd1; st.global.b32 [%out], %r1;
    ret;"""
    text = replace(PLAIN, body=body).ptx.replace(")\n{", f") {directives}\n{{")
    assert directives in text
    return load(text).entry("kernel")


@pytest.mark.parametrize(
    ("directives", "grid", "cluster"),
    [
        (".reqnctapercluster 2", 4, 1),
        (".explicitcluster .reqnctapercluster 2, 1, 1", 4, 1),
        (".reqnctapercluster 2", 4, 2),
        (".reqntid 32 .reqnctapercluster 2 .blocksareclusters", 2, 1),
        (".maxclusterrank 2", 4, 2),
    ],
)
def test_a_kernel_that_declares_its_cluster_gets_it(directives: str, grid: int, cluster: int) -> None:
    """PTX ISA 11.7.1: the runtime uses the declared size if the launch gives none."""
    machine, out = Machine(), np.zeros(4, np.uint32)
    address = machine.memory.add("out", out.view(np.uint8)).base.to_bytes(8, "little")
    machine.launch(_declaring(directives), (grid, 1, 1), (32, 1, 1), [address], (cluster, 1, 1))
    assert out.tolist() == [2, 102, 2, 102], "ranks and sizes of clusters of two"


@pytest.mark.parametrize(
    ("directives", "cluster", "sentence"),
    [
        (".reqnctapercluster 2", 4, r"cluster \(4, 1, 1\) where the kernel declares .reqnctapercluster \(2,\)"),
        (".maxclusterrank 2", 4, "a cluster of 4 CTAs where the kernel declares .maxclusterrank 2"),
    ],
)
def test_a_cluster_of_another_size_than_declared_is_refused(directives: str, cluster: int, sentence: str) -> None:
    with pytest.raises(LaunchError, match=sentence):
        Machine().launch(_declaring(directives), (4, 1, 1), (32, 1, 1), [bytes(8)], (cluster, 1, 1))


def test_declared_block_sizes_are_kept() -> None:
    for directive in (".reqntid 64", ".maxntid 16"):
        text = PLAIN.ptx.replace(")\n{", f") {directive}\n{{")
        assert directive in text
        with pytest.raises(LaunchError, match=directive.split()[0].replace(".", r"\.")):
            Machine().launch(load(text).entry("kernel"), (1, 1, 1), (32, 1, 1), [bytes(8)])


def test_parameters_must_fit_the_entry() -> None:
    module = load(PLAIN.ptx)
    with pytest.raises(LaunchError, match="kernel takes 1 parameter and is given 2"):
        Machine().launch(module.entry("kernel"), (1, 1, 1), (32, 1, 1), [bytes(8), bytes(8)])
    with pytest.raises(LaunchError, match="parameter `p_out` has 8 bytes and is given 4"):
        Machine().launch(module.entry("kernel"), (1, 1, 1), (32, 1, 1), [bytes(4)])
    with pytest.raises(LaunchError, match="no entry 'kernl'; its entries are: kernel"):
        Machine().launch(module.entry("kernl"), (1, 1, 1), (32, 1, 1), [bytes(8)])


UNKNOWN = {
    "an opcode that is spelt wrong": ("xorr.b32 %r1, %r2;", "the opcode `xorr`; did you mean `xor`?"),
    "a texture": (
        "tex.1d.v4.f32.s32 {%f1, %f2, %f3, %f4}, [%rd1, {%r1}];",
        r"this machine has no `tex`: textures and surfaces are not supported",
    ),
    "a surface": ("sust.b.1d.b32.trap [%rd1, {%r1}], {%r2};", "textures and surfaces are not supported"),
    "an opcode": ("frobnicate.b32 %r1, %r2;", "does not know the opcode `frobnicate`"),
    "a modifier": (
        "add.rx.f32 %f1, %f2, %f3;",
        r"no form of `add\.rx\.f32` is known; `\.rx` is no modifier of `add`; the nearest are `add.*PTX ISA 9\.",
    ),
    "a shape": ("tcgen05.ld.sync.aligned.32x64b.x2.b32 {%r1, %r2}, [%r3];", r"nearest are `tcgen05\.ld"),
    "a repetition": ("tcgen05.ld.sync.aligned.16x256b.x64.b32 {%r1}, [%r3];", "x64.*up to x32"),
    "too few registers": ("tcgen05.ld.sync.aligned.32x32b.x4.b32 {%r1, %r2}, [%r3];", "a vector of 2 where 4"),
    "an operand too many": ("add.u32 %r1, %r2, %r3, %r4;", "4 operands where this form takes 3"),
    "a register of another width for a type of bits": (
        "st.global.b64 [%rd1], %r2;",
        "`%r2` holds 32 bits where b64 needs 64",
    ),
    "a register of another width": ("add.u32 %r1, %rd2, %r3;", "`%rd2` holds 64 bits where .*32"),
    "a register of floats in an integer instruction": (
        "add.u32 %r1, %f1, %r3;",
        r"`%f1` is a register of type \.f32, where \.u32 takes one of type \.b32, \.u32 or \.s32",
    ),
    "a register of integers in a conversion of floats": (
        ".reg .s32 %whole; cvt.rni.f32.f32 %f1, %whole;",
        r"`%whole` is a register of type \.s32, where \.f32 takes one of type \.b32 or \.f32",
    ),
    "a register of floats as an address": (
        ".reg .f64 %where; ld.global.b32 %r1, [%where];",
        r"`%where` is a register of type \.f64, which holds no address",
    ),
    "a register that is not declared": ("add.u32 %r1, %nobody, %r3;", "%nobody.* is .*declared"),
    "a label": ("bra NOWHERE;", "NOWHERE|no such label"),
    "a register count": ("setmaxnreg.inc.sync.aligned.u32 41;", "41 must be a multiple of 8"),
    "a cp.async of 12 bytes": ("cp.async.ca.shared.global [%r1], [%rd1], 12;", "cp-size 12; it is 4, 8 or 16"),
    "a cp.async.cg of 8 bytes": ("cp.async.cg.shared.global [%r1], [%rd1], 8;", "16 with .cg"),
    "a scale of D": (
        "tcgen05.mma.cta_group::1.kind::f16 [%r1], %rd1, %rd2, %r2, %p1, 16;",
        "scale-input-d is an integer in 0..15",
    ),
    "a scale of an f8 product": (
        "tcgen05.mma.cta_group::1.kind::f8f6f4 [%r1], %rd1, %rd2, %r2, %p1, 1;",
        "only kind::f16 and kind::tf32",
    ),
    "a cp shape": ("tcgen05.cp.cta_group::1.64x128b [%r1], %rd1;", "there is no tcgen05.cp.64x128b; the forms are"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_instruction_that_the_machine_does_not_have(name: str) -> None:
    instruction, sentence = UNKNOWN[name]
    kernel = replace(PLAIN, body=f"{instruction} //!\nret;")
    with pytest.raises(Exception, match=sentence) as caught:
        kernel.run()
    assert isinstance(caught.value, UnknownInstructionError) or type(caught.value).__name__ == "PtxSyntaxError"
    said = str(caught.value)
    assert str(kernel.blamed_line) in said, f"line {kernel.blamed_line} is not named: {said}"


def test_the_refusals_of_a_function_are_told_together_and_not_without_end() -> None:
    many = "\n".join(f"bar.sync {number};" for number in range(16, 30))
    kernel = replace(PLAIN, body=f"bar.sync 0, 48; //!\n{many}\nbar.sync 17;\nret;")
    with pytest.raises(UnknownInstructionError) as caught:
        kernel.run()
    first, *others, last = str(caught.value).splitlines()
    line = kernel.blamed_line
    assert first.startswith(f"PTX line {line}: `bar.sync 0, 48;`: "), first
    assert [one.partition(":")[0] for one in others] == [f"PTX line {line + 1 + number}" for number in range(9)]
    assert last == "and 6 more"


def test_names_that_are_not_declared_are_told_with_what_binding_refuses() -> None:
    kernel = replace(PLAIN, body="bar.sync 17; //!\nadd.u32 %r1, %nobody, 1;\nadd.u32 %nobody, %r1, 1;\nret;")
    with pytest.raises(PtxSyntaxError) as caught:
        kernel.run()
    first, second = str(caught.value).splitlines()
    assert first.startswith(f"<ptx>, PTX line {kernel.blamed_line}: `bar.sync 17;`: "), first
    assert second.startswith(f"<ptx>, line {kernel.blamed_line + 1}, column "), second
    assert second.endswith("%nobody is not declared: no register, variable, parameter, function or label of that name "
                           "is seen here")  # fmt: skip
    assert caught.value.problem.startswith("%nobody")


FITTING = (
    "and.b32 %f1, %f2, %whole;", "mov.b32 %f1, %whole;", "add.s32 %r1, %whole, %r2;", "add.f32 %f1, %r1, %f2;",
    "cvt.rn.f32.s32 %f1, %whole;", "st.global.b32 [%out], %f1;", "selp.b32 %r1, %f1, %whole, %p1;",
    "ld.global.v2.u32 {%r1, %f1}, [%out];", "setp.lt.and.f32 %p1|%p2, %f1, %r2, %p3;",
)  # fmt: skip


@pytest.mark.parametrize("instruction", FITTING)
def test_registers_of_types_that_ptxas_takes(instruction: str) -> None:
    """A bit type fits every register, a .bX register every type (PTX ISA 9.2)."""
    load(replace(PLAIN, body=f".reg .s32 %whole; {instruction} ret;").ptx).entry("kernel")


# Programmatic dependent launch: bytes that a launch must not touch before griddepcontrol.wait, and the warps that a
# wait covers.


PAIR = "mul.wide.u32 %rd1, %tx, 4; add.u64 %rd2, %a, %rd1; add.u64 %rd3, %b, %rd1;\n"
FIRST = PAIR + "ld.global.b32 %r2, [%rd3]; st.global.b32 [%rd2], 7; griddepcontrol.launch_dependents; ret;"
"""Reads `b`, then writes `a`."""
WAIT = "griddepcontrol.wait;"
READ, WRITE, COUNT = "ld.global.b32 %r1, [%rd2];", "st.global.b32 [%rd3], 9;", "red.global.add.u32 [%rd2], 1;"
DEPENDENT = (("first", False), ("kernel", True))
THREADS = 64


def second(body: str, sequence: tuple[tuple[str, bool], ...] = DEPENDENT, middle: str = "ret;") -> Kernel:
    """`body` as the launch after FIRST, in one CTA of two warps; `c` is its own buffer."""
    buffers = {name: np.zeros(THREADS, np.uint32) for name in "abc"}
    body = f"{PAIR}add.u64 %rd4, %c, %rd1;\n{body}\nret;"
    others = {"first": FIRST, "middle": PAIR + middle}
    return Kernel(body, buffers, block=(THREADS, 1, 1), others=others, sequence=sequence)


PLANTED = {
    "a read of what it wrote": (READ, " of `a` is read, but first, which wrote it at PTX line"),
    "an overwrite of what it wrote": ("st.global.b32 [%rd2], 9;", "`a` is overwritten, but first, which wrote it"),
    "an overwrite of what it read": (WRITE, "`b` is overwritten, but first, which read it"),
    "an addition to what it wrote": (COUNT, "`a` is overwritten, but first, which wrote it"),
    "a byte of what it wrote": ("ld.global.b8 %h1, [%rd2+3];", " of `a` is read"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_before_the_wait(name: str) -> None:
    early, sentence = PLANTED[name]
    assert_blamed(second(f"{early} //!\n{WAIT}"), "dependent-launch-not-awaited", sentence, "nothing orders")


@pytest.mark.parametrize("name", PLANTED)
def test_after_the_wait(name: str) -> None:
    assert_clean(second(f"{WAIT}\n{PLANTED[name][0]}"), {})


@pytest.mark.parametrize("name", PLANTED)
def test_a_launch_without_the_attribute_starts_after_everything(name: str) -> None:
    assert_clean(second(PLANTED[name][0], (("first", False), ("kernel", False))), {})


def test_what_the_launch_before_does_not_touch_is_free() -> None:
    """Without a wait a launch may read what the previous one only read, and write its own buffers."""
    body = "ld.global.b32 %r1, [%rd3]; add.u32 %r1, %r1, 5; st.global.b32 [%rd4], %r1;"
    assert_clean(second(body), {"c": np.full(THREADS, 5, np.uint32)})


ONE_WAITS = "setp.eq.u32 %p1, %warp, 0; @%p1 griddepcontrol.wait;\n"


def test_a_barrier_carries_the_wait_of_one_warp() -> None:
    body = f"{ONE_WAITS}bar.sync 0; {READ} st.global.b32 [%rd4], %r1;"
    assert_clean(second(body), {"c": np.full(THREADS, 7, np.uint32)})


def test_the_wait_of_one_warp_is_not_the_other_s() -> None:
    assert_blamed(second(f"{ONE_WAITS}{READ} //!"), "dependent-launch-not-awaited", "nothing orders the access after")


def test_a_barrier_before_the_wait_carries_nothing() -> None:
    body = f"bar.sync 0; {ONE_WAITS}{READ} //!"
    assert_blamed(second(body), "dependent-launch-not-awaited", "`a` is read")


MBARRIER = """.shared .align 8 .b64 bar; .shared .align 16 .b8 buf[16]; mov.u32 %r20, bar; mov.u32 %r21, buf;
setp.eq.u32 %p1, %warp, 0; setp.eq.u32 %p2, %tx, 32;
@%p2 mbarrier.init.shared::cta.b64 [%r20], 1; @%p2 mbarrier.arrive.expect_tx.shared::cta.b64 %rd9, [%r20], 16;
bar.sync 0; @%p1 bra SLEEPER;
"""
LOADED = """SLEEPER: mbarrier.try_wait.parity.shared::cta.b64 %p4, [%r20], 0; @!%p4 bra SLEEPER;
"""


def copied(before: str) -> Kernel:
    """Warp 1 copies to shared memory, with or without waiting first; warp 0 waits for the copy and then reads `a`."""
    copy = "@%p2 cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r21], [%c], 16, [%r20];"
    return second(f"{MBARRIER}{before}{copy}\n{LOADED}@%p1 {READ} //!")


def test_a_copy_carries_the_wait_before_its_issue() -> None:
    """Only a kernel's load warp waits: a warp that has seen the copied data is ordered after that wait."""
    assert_clean(copied("griddepcontrol.wait; "), {})


def test_a_copy_without_a_wait_carries_none() -> None:
    assert_blamed(copied(""), "dependent-launch-not-awaited", "`a` is read")


def test_the_bulk_copy_of_what_it_wrote() -> None:
    copy = "@%p2 cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r21], [%a], 16, [%r20]; //!"
    kernel = second(f"{MBARRIER}{copy}\n{LOADED}")
    assert_blamed(kernel, "dependent-launch-not-awaited", "byte 0 of `a` is read")


CHAIN = (("first", False), ("middle", True), ("kernel", True))


def test_a_wait_covers_the_launches_before_if_the_middle_one_waits() -> None:
    assert_clean(second(f"{WAIT}\n{READ}", CHAIN, middle="griddepcontrol.wait; ret;"), {})


def test_a_middle_launch_that_never_waits_breaks_the_chain() -> None:
    kernel = second(f"{WAIT}\n{READ} //!", CHAIN)
    clauses = ("first, which wrote it", "and middle, launched after first, has ended without a griddepcontrol.wait")
    assert_blamed(kernel, "dependent-launch-not-awaited", *clauses)


def test_a_chain_of_launches_of_one_kernel() -> None:
    found, _ = collected(second(f"{WAIT}\n{READ}", (("first", False), ("first", True), ("kernel", True))))
    assert slugs(found) == ["dependent-launch-not-awaited"] * 2, f"found {list(map(str, found))}"
    assert "and first, launched after first, has ended without" in str(found[1]), f"{found[1]} names another launch"


def test_launches_further_back_count_too() -> None:
    kernel = second(f"{READ} //!", CHAIN, middle="griddepcontrol.wait; ret;")
    assert_blamed(kernel, "dependent-launch-not-awaited", "first, which wrote it", "nothing orders the access after")


@pytest.mark.parametrize("between", [MOST_OVERLAPPING - 1, MOST_OVERLAPPING])
def test_how_far_back_launches_count(between: int) -> None:
    chain = (("first", False), *[("middle", True)] * between, ("kernel", True))
    found, _ = collected(second(f"{WAIT}\n{READ}", chain))
    expected = ["dependent-launch-not-awaited"] * (between < MOST_OVERLAPPING)
    assert slugs(found) == expected, f"{between} launches later: {list(map(str, found))}"


def test_a_launch_without_the_attribute_ends_the_chain() -> None:
    chain = (("first", False), ("middle", True), ("middle", False), ("kernel", True))
    assert_clean(second(READ, chain), {})

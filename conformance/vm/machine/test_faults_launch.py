"""Launches that are refused: wrong parameters, sizes beyond a GPU's, entries and instructions that do not exist."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from backends.vm.faults import LaunchError, UnknownInstructionError
from backends.vm.load import load
from backends.vm.machine.machine import Machine
from conformance.vm.kernel import Kernel

PLAIN = Kernel("ret;", {"out": np.zeros(4, np.uint32)})

SIZES = {
    "threads": ({"block": (1025, 1, 1)}, "1024"),
    "block z": ({"block": (1, 1, 65)}, "65 in z, where at most 64"),
    "nothing": ({"grid": (0, 1, 1)}, "at least 1"),
    "grid y": ({"grid": (1, 65536, 1)}, "65536 in y, where at most 65535"),
    "cluster": ({"grid": (32, 1, 1), "cluster": (32, 1, 1)}, "32"),
    "parts of a cluster": ({"grid": (3, 1, 1), "cluster": (2, 1, 1)}, "not a multiple of the cluster"),
    "dynamic shared memory": ({"dynamic_smem": 232449}, "232449 bytes of dynamic shared memory.* 232448"),
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_beyond_a_gpu(name: str) -> None:
    options, sentence = SIZES[name]
    with pytest.raises(LaunchError, match=sentence):
        replace(PLAIN, **options).run()  # type: ignore[arg-type]


def test_static_shared_memory_counts_as_well() -> None:
    kernel = replace(
        PLAIN, body=".shared .align 16 .b8 big[1024]; st.shared.u32 [big], 0; ret;", dynamic_smem=232448 - 1023
    )
    with pytest.raises(LaunchError, match="1024 static ones exceed 232448"):
        kernel.run()
    replace(kernel, dynamic_smem=232448 - 1024).run()


def test_the_largest_cluster_runs() -> None:
    """16 CTAs of 1024 threads, copies included: more agents than a smaller stamp could name."""
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


def test_declared_block_sizes_are_kept() -> None:
    for directive in (".reqntid 64", ".maxntid 16"):
        text = PLAIN.ptx.replace(")\n{", f") {directive}\n{{")
        assert directive in text
        with pytest.raises(LaunchError, match=directive.split()[0].replace(".", r"\.")):
            Machine().launch(load(text).entry("kernel"), (1, 1, 1), (32, 1, 1), [bytes(8)])


def test_parameters_must_fit_the_entry() -> None:
    module = load(PLAIN.ptx)
    with pytest.raises(LaunchError, match="kernel takes 1 parameters, 2 were given"):
        Machine().launch(module.entry("kernel"), (1, 1, 1), (32, 1, 1), [bytes(8), bytes(8)])
    with pytest.raises(LaunchError, match="parameter `p_out` has 8 bytes, 4 were given"):
        Machine().launch(module.entry("kernel"), (1, 1, 1), (32, 1, 1), [bytes(4)])
    with pytest.raises(LaunchError, match="no entry 'kernl'; its entries are: kernel"):
        Machine().launch(module.entry("kernl"), (1, 1, 1), (32, 1, 1), [bytes(8)])


UNKNOWN = {
    "an opcode": ("frobnicate.b32 %r1, %r2;", "does not know the opcode `frobnicate`"),
    "a modifier": (
        "add.rx.f32 %f1, %f2, %f3;",
        r"no form of `add\.rx\.f32` is known; the nearest are `add.*PTX ISA 9\.",
    ),
    "a shape": ("tcgen05.ld.sync.aligned.32x64b.x2.b32 {%r1, %r2}, [%r3];", r"nearest are `tcgen05\.ld"),
    "a repetition": ("tcgen05.ld.sync.aligned.16x256b.x64.b32 {%r1}, [%r3];", "x64.*up to x32"),
    "too few registers": ("tcgen05.ld.sync.aligned.32x32b.x4.b32 {%r1, %r2}, [%r3];", "a vector of 2 where 4"),
    "an operand too many": ("add.u32 %r1, %r2, %r3, %r4;", "4 operands where this form takes 3"),
    "a register of another width": ("add.u32 %r1, %rd2, %r3;", "`%rd2` holds 64 bits where .*32"),
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

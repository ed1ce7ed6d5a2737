"""Atomics of 128 bits and of vectors of halves, asynchronous reductions into shared memory, st.bulk, and multimem."""

from __future__ import annotations

import numpy as np
import pytest

from backends.vm.faults import Fault
from conformance.vm.kernel import TWENTY, Kernel, assert_blamed, assert_clean, collected, slugs, wait


def test_128_bits_are_swapped_at_once() -> None:
    """Every lane gets the value that another left: nothing is lost or torn."""
    body = """.reg .b128 %q<2>; cvt.u64.u32 %rd1, %tx; not.b64 %rd2, %rd1; mov.b128 %q0, {%rd1, %rd2};
atom.global.exch.b128 %q1, [%x], %q0; mov.b128 {%rd3, %rd4}, %q1;
mul.wide.u32 %rd5, %tx, 16; add.u64 %out, %out, %rd5; st.global.v2.b64 [%out], {%rd3, %rd4}; ret;"""
    x = np.array([99, ~np.uint64(99)], np.uint64)
    found, _ = Kernel(body, {"x": x, "out": np.zeros(64, np.uint64)}).run()
    pairs = np.concatenate([found["out"], found["x"]]).reshape(-1, 2)
    assert np.array_equal(pairs[:, 0], ~pairs[:, 1]), "a value is torn"
    assert sorted(pairs[:, 0].tolist()) == [*range(32), 99], "a value is lost"


def test_128_bits_are_compared_whole() -> None:
    body = """.reg .b128 %q<4>; mov.b64 %rd1, 7; mov.b64 %rd2, 8; mov.b64 %rd3, 9; mov.b128 %q0, {%rd1, %rd2};
mov.b128 %q1, {%rd1, %rd3}; mov.b128 %q2, {%rd3, %rd3};
atom.relaxed.gpu.global.cas.b128 %q3, [%x], %q1, %q2; atom.relaxed.gpu.global.cas.b128 %q3, [%y], %q0, %q2; ret;"""
    both = np.array([7, 8], np.uint64)
    found, _ = Kernel(body, {"x": both, "y": both}, block=(1, 1, 1)).run()
    assert found["x"].tolist() == [7, 8], "the upper words differ, so nothing is stored"
    assert found["y"].tolist() == [9, 9]


@pytest.mark.parametrize("operation", ["add", "min", "max"])
def test_vectors_of_halves_are_combined_element_by_element(operation: str) -> None:
    values = np.arange(32 * 8).reshape(32, 8) % 13 - 6
    body = f"""mul.wide.u32 %rd1, %tx, 16; add.u64 %v, %v, %rd1; .reg .b16 %e<8>;
ld.global.v4.b16 {{%e0, %e1, %e2, %e3}}, [%v]; ld.global.v4.b16 {{%e4, %e5, %e6, %e7}}, [%v+8];
red.global.{operation}.noftz.v8.f16 [%x], {{%e0, %e1, %e2, %e3, %e4, %e5, %e6, %e7}}; ret;"""
    start = np.arange(8).astype(np.float16)
    found, _ = Kernel(body, {"v": values.astype(np.float16).reshape(-1), "x": start}).run()
    all_of = np.vstack([start.astype(int), values])
    assert np.array_equal(found["x"], {"add": all_of.sum(0), "min": all_of.min(0), "max": all_of.max(0)}[operation])


REMOTE = """.shared .align 16 .b8 s[64]; .shared .align 16 .b8 from[64]; .shared .align 8 .b64 mbar;
mov.u32 %r1, s; mov.u32 %r2, mbar; mov.u32 %r3, from; setp.ne.u32 %p1, %tx, 0;
@%p1 bra READY; st.shared.v2.b64 [%r1], {{{0}, {0}}}; st.shared.v2.b64 [%r1+16], {{{0}, {0}}};
mbarrier.init.shared::cta.b64 [mbar], 1; mbarrier.arrive.expect_tx.shared::cta.b64 _, [mbar], {1};
fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;
READY: barrier.cluster.arrive.release; barrier.cluster.wait.acquire;
"""


def read_back(bytes_: int) -> str:
    return f"""{wait("mbar", 0)}
mul.wide.u32 %rd2, %cta, 32; add.u64 %out, %out, %rd2; @%p1 bra END; ld.shared.v4.b32 {{%r10, %r11, %r12, %r13}}, [%r1];
st.global.v4.b32 [%out], {{%r10, %r11, %r12, %r13}};
END: barrier.cluster.arrive.release; barrier.cluster.wait.acquire; ret;"""


def test_lanes_of_two_ctas_add_to_one_word() -> None:
    """Each thread adds its number plus one to a word of the other CTA; the mbarrier counts the bytes."""
    body = (
        REMOTE.format(0, 4 * 32)
        + """xor.b32 %r5, %cta, 1; mapa.shared::cluster.u32 %r6, %r1, %r5; mapa.shared::cluster.u32 %r7, %r2, %r5;
add.u32 %r8, %tx, 1; red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32 [%r6], %r8, [%r7];
"""
        + read_back(4)
    )
    kernel = Kernel(body, {"out": np.zeros(16, np.uint32)}, grid=(2, 1, 1), cluster=(2, 1, 1))
    wanted = np.zeros(16, np.uint32)
    wanted[[0, 8]] = 32 * 33 // 2
    assert_clean(kernel, {"out": wanted}, schedules=TWENTY[:6])


def reduced_into(other: int) -> Kernel:
    """Each CTA of a pair adds 0 to 31 to a word of the CTA of rank `rank ^ other`."""
    body = (
        REMOTE.format(0, 4 * 32)
        + f"""xor.b32 %r5, %cta, {other};
mapa.shared::cluster.u32 %r6, %r1, %r5; mapa.shared::cluster.u32 %r7, %r2, %r5;
red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32 [%r6], %tx, [%r7];
"""
        + read_back(4)
    )
    return Kernel(body, {"out": np.zeros(16, np.uint32)}, grid=(2, 1, 1), cluster=(2, 1, 1))


def test_a_reduction_into_the_own_cta_is_done_all_the_same() -> None:
    """PTX ISA 9.7.13.7 defines one into another CTA of the cluster only."""
    for other, expected in ((1, []), (0, ["async-to-own-cta"])):
        found, data = collected(reduced_into(other))
        assert slugs(found) == expected, f"into the CTA of rank ^ {other}: {list(map(str, found))}"
        assert data["out"][[0, 8]].tolist() == [31 * 32 // 2] * 2, f"into the CTA of rank ^ {other}"


@pytest.mark.parametrize("instruction", ["st.async.shared::cluster", "red.async.relaxed.cluster.shared::cluster"])
def test_neither_st_async_nor_red_async_exists_without_clusters(instruction: str) -> None:
    """An H200 ends such a launch with an illegal instruction (facts.md 0.1)."""
    kind = "b32" if instruction.startswith("st") else "add.u32"
    body = (
        REMOTE.format(0, 4)
        + f"@%p1 ret;\n{instruction}.mbarrier::complete_tx::bytes.{kind} [%r1], %tx, [%r2]; //!\n{read_back(4)}"
    )
    assert_blamed(
        Kernel(body, {"out": np.zeros(16, np.uint32)}), "async-without-cluster", "in a launch without clusters"
    )


def test_a_run_of_words_is_combined_with_the_other_ctas() -> None:
    body = (
        REMOTE.format(0x0000_0005_0000_0005, 16)
        + """@%p1 bra DONE; add.u32 %r9, %cta, 3; st.shared.v4.b32 [%r3], {%r9, %r9, %r9, %r9};
fence.proxy.async.shared::cta; xor.b32 %r5, %cta, 1; mapa.shared::cluster.u32 %r6, %r1, %r5;
mapa.shared::cluster.u32 %r7, %r2, %r5;
cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.max.u32 [%r6], [%r3], 16, [%r7];
DONE:
"""
        + read_back(16)
    )
    body = body.replace("add.u32 %r9, %cta, 3", "mad.lo.u32 %r9, %cta, 4, 3")
    kernel = Kernel(body, {"out": np.zeros(16, np.uint32)}, grid=(2, 1, 1), cluster=(2, 1, 1))
    wanted = np.zeros(16, np.uint32)
    wanted[:4], wanted[8:12] = 7, 5
    assert_clean(kernel, {"out": wanted}, schedules=TWENTY[:6])


ZEROED = """.shared .align 16 .b8 s[256]; mov.u32 %r1, s; mov.b64 %rd1, SIZE; setp.ne.u32 %p1, %tx, 0;
@!%p1 st.bulk.weak.shared::cta [%r1], %rd1, 0; bar.warp.sync -1;
shl.b32 %r2, %tx, 3; add.u32 %r1, %r1, %r2; ld.shared.b64 %rd2, [%r1];
mul.wide.u32 %rd3, %tx, 8; add.u64 %out, %out, %rd3; st.global.b64 [%out], %rd2; ret;"""


def test_a_region_is_zeroed() -> None:
    found, _ = Kernel(ZEROED.replace("SIZE", "256"), {"out": np.ones(32, np.uint64)}).run()
    assert not found["out"].any()


def test_a_region_is_zeroed_no_further() -> None:
    with pytest.raises(Fault, match="uninitialised"):
        Kernel(ZEROED.replace("SIZE", "248"), {"out": np.ones(32, np.uint64)}).run()
    with pytest.raises(Fault, match=r"bulk-store.*multiple of 8"):
        Kernel(ZEROED.replace("SIZE", "252"), {"out": np.ones(32, np.uint64)}).run()


def test_one_memory_is_reduced_stored_and_read() -> None:
    """On one device a multimem access behaves like an ordinary one."""
    body = """setp.ne.u32 %p1, %tx, 0;
multimem.red.relaxed.gpu.global.add.u32 [%x], 2; bar.warp.sync -1; @%p1 bra END;
multimem.ld_reduce.relaxed.gpu.global.add.u32 %r1, [%x]; multimem.st.relaxed.gpu.global.u32 [%x+4], %r1;
multimem.ld_reduce.global.add.acc::f32.v4.bf16x2 {%r2, %r3, %r4, %r5}, [%v];
multimem.st.global.v4.bf16x2 [%out], {%r5, %r4, %r3, %r2};
END: ret;"""
    v = np.arange(4, dtype=np.uint32)
    found, _ = Kernel(body, {"x": np.array([5, 0], np.uint32), "v": v, "out": np.zeros(4, np.uint32)}).run()
    assert found["x"].tolist() == [69, 69]
    assert found["out"].tolist() == [3, 2, 1, 0]

"""Correct kernels: no schedule finds a fault in them, and all schedules give the same bits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from backends.vm.machine.engine import CopyGroups, Engine, Operation
from conformance.vm.kernel import ELECT, FENCE, SYNC, Kernel, Map, assert_clean, collected, fault_of, init, slugs, wait

TILES = 9
TILE = np.arange(64 * TILES, dtype=np.uint32).reshape(TILES, 64) * 7


def pipeline(stages: int, consumers: int) -> Kernel:
    """Warp 0 loads tiles into a ring; `consumers` warps add them up and free the slots; TMA stores the sums."""
    full = [f"full{stage}" for stage in range(stages)]
    names = "".join(f".shared .align 8 .b64 full{stage}; " for stage in range(stages))
    names += "".join(f".shared .align 8 .b64 empty{stage}; " for stage in range(stages))
    empties = "\n".join(f"@%p13 mbarrier.init.shared::cta.b64 [empty{stage}], {consumers};" for stage in range(stages))
    per_warp = 64 // consumers
    body = f"""{names} .shared .align 128 .b8 ring[{256 * stages}]; .shared .align 128 .b8 sums[256];
    setp.eq.u32 %p13, %tx, 0;
    {empties}
    {init(*full)}
    mov.u32 %r20, 0; mov.u32 %r21, 0; mov.u32 %r22, 0; mov.u32 %r30, 0; mov.u32 %r7, 0; mov.u32 %r8, 0;
    mov.u32 %r40, full0; mov.u32 %r41, empty0; mov.u32 %r42, ring;
    setp.ne.u32 %p1, %warp, 0; @%p1 bra CONSUME;
    {ELECT}
    @!%p15 ret;
    PRODUCE: xor.b32 %r23, %r22, 1; shl.b32 %r24, %r21, 3; add.u32 %r25, %r41, %r24; add.u32 %r26, %r40, %r24;
    {wait("%r25", "%r23")}
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r26], 256;
    shl.b32 %r27, %r21, 8; add.u32 %r27, %r27, %r42; shl.b32 %r28, %r20, 2;
    cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes
    [%r27], [%tiles, {{%r30, %r28}}], [%r26];
    add.u32 %r21, %r21, 1; setp.eq.u32 %p2, %r21, {stages}; @%p2 mov.u32 %r21, 0; @%p2 xor.b32 %r22, %r22, 1;
    add.u32 %r20, %r20, 1; setp.lt.u32 %p3, %r20, {TILES}; @%p3 bra PRODUCE;
    ret;
    CONSUME: sub.u32 %r29, %warp, 1; mul.lo.u32 %r29, %r29, {per_warp}; add.u32 %r29, %r29, %lane;
    shl.b32 %r29, %r29, 2;
    NEXT: shl.b32 %r24, %r21, 3; add.u32 %r25, %r41, %r24; add.u32 %r26, %r40, %r24;
    {wait("%r26", "%r22")}
    shl.b32 %r27, %r21, 8; add.u32 %r27, %r27, %r42; add.u32 %r27, %r27, %r29;
    ld.shared.u32 %r1, [%r27]; add.u32 %r7, %r7, %r1;
    {"ld.shared.u32 %r1, [%r27+128]; add.u32 %r8, %r8, %r1;" if per_warp == 64 else ""}
    bar.warp.sync 0xffffffff;
    {ELECT}
    @%p15 mbarrier.arrive.shared::cta.b64 _, [%r25];
    add.u32 %r21, %r21, 1; setp.eq.u32 %p2, %r21, {stages}; @%p2 mov.u32 %r21, 0; @%p2 xor.b32 %r22, %r22, 1;
    add.u32 %r20, %r20, 1; setp.lt.u32 %p3, %r20, {TILES}; @%p3 bra NEXT;
    mov.u32 %r2, sums; add.u32 %r2, %r2, %r29; st.shared.u32 [%r2], %r7;
    {"st.shared.u32 [%r2+128], %r8;" if per_warp == 64 else ""}
    {FENCE}
    bar.sync 3, {32 * consumers};
    setp.ne.u32 %p4, %tx, 32; @%p4 ret;
    cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%to, {{%r30, %r30}}], [sums];
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group.read 0;
    ret;"""
    maps = {"tiles": Map("x", "u32", (16, 4 * TILES), (64,), (16, 4)), "to": Map("out", "u32", (16, 4), (64,), (16, 4))}
    buffers = {"x": TILE.reshape(-1), "out": np.zeros(64, np.uint32)}
    return Kernel(body, buffers, maps, block=(32 + 32 * consumers, 1, 1), inputs=("x",))


@pytest.mark.parametrize("consumers", [1, 2])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_a_ring_of_tiles(stages: int, consumers: int) -> None:
    assert_clean(pipeline(stages, consumers), {"out": TILE.sum(axis=0, dtype=np.uint32)})


def test_a_ring_built_on_named_barriers() -> None:
    """Two buffers; producer and consumer synchronise on full (1, 2) and empty (3, 4) barriers with arrive and sync."""
    body = """.shared .align 16 .b8 ring[256];
    mov.u32 %r20, 0; mov.u32 %r7, 0; mov.u32 %r42, ring; shl.b32 %r43, %lane, 2;
    setp.ne.u32 %p1, %warp, 0; @%p1 bra CONSUME;
    PRODUCE: and.b32 %r21, %r20, 1; add.u32 %r22, %r21, 3; add.u32 %r23, %r21, 1;
    setp.ge.u32 %p2, %r20, 2;
    @%p2 barrier.sync.aligned %r22, 64;
    shl.b32 %r24, %r21, 7; add.u32 %r24, %r24, %r42; add.u32 %r24, %r24, %r43;
    mad.lo.u32 %r1, %r20, 100, %lane; st.shared.u32 [%r24], %r1;
    bar.arrive %r23, 64;
    add.u32 %r20, %r20, 1; setp.lt.u32 %p3, %r20, 7; @%p3 bra PRODUCE;
    ret;
    CONSUME: and.b32 %r21, %r20, 1; add.u32 %r22, %r21, 3; add.u32 %r23, %r21, 1;
    bar.sync %r23, 64;
    shl.b32 %r24, %r21, 7; add.u32 %r24, %r24, %r42; add.u32 %r24, %r24, %r43;
    ld.shared.u32 %r1, [%r24]; add.u32 %r7, %r7, %r1;
    setp.lt.u32 %p2, %r20, 5;
    @%p2 bar.arrive %r22, 64;
    add.u32 %r20, %r20, 1; setp.lt.u32 %p3, %r20, 7; @%p3 bra CONSUME;
    mul.wide.u32 %rd1, %lane, 4; add.u64 %rd1, %rd1, %out; st.global.u32 [%rd1], %r7;
    ret;"""
    kernel = Kernel(body, {"out": np.zeros(32, np.uint32)}, block=(64, 1, 1))
    assert_clean(kernel, {"out": 2100 + 7 * np.arange(32)})


def test_a_probe_that_may_fail_and_is_followed_by_a_loop() -> None:
    """One try_wait whose answer is used later, as CuTeDSL's pipelines do (facts.md 6.1)."""
    body = f""".shared .align 8 .b64 mbar; .shared .align 16 .b8 buf[128];
    {init("mbar")}
    @%p13 mbarrier.arrive.expect_tx.shared::cta.b64 _, [mbar], 128;
    @%p13 cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [buf], [%x], 128, [mbar];
    mbarrier.try_wait.parity.shared::cta.b64 %p1, [mbar], 0;
    shl.b32 %r1, %lane, 2; mov.u32 %r2, buf; add.u32 %r1, %r1, %r2;
    @%p1 bra READY;
    {wait("mbar", 0)}
    READY: ld.shared.u32 %r3, [%r1];
    mul.wide.u32 %rd1, %lane, 4; add.u64 %rd1, %rd1, %out; st.global.u32 [%rd1], %r3;
    ret;"""
    x = np.arange(32, dtype=np.uint32) + 5
    assert_clean(Kernel(body, {"x": x, "out": np.zeros(32, np.uint32)}, inputs=("x",)), {"out": x})


FLAG = """setp.ne.u32 %p2, %tx, 0;
setp.eq.u32 %p1, %cta, LAST; @%p1 bra SET;
@%p2 bra END;
SPIN: ld.acquire.gpu.global.u32 %r1, [%flag]; setp.eq.u32 %p3, %r1, 0; @%p3 bra SPIN;
mul.wide.u32 %rd1, %cta, 4; add.u64 %rd1, %rd1, %out; ld.global.u32 %r2, [%data]; st.global.u32 [%rd1], %r2;
bra END;
SET: @%p2 bra END; st.global.u32 [%data], 41; st.release.gpu.global.u32 [%flag], 1;
END: ret;"""


@pytest.mark.parametrize("ctas", [2, 3])
def test_ctas_that_spin_on_a_flag_which_the_last_one_sets(ctas: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one begins after so many turns, so it does not matter that these are shorter here."""
    monkeypatch.setattr("backends.vm.machine.scheduler.LONG_TURN", 8)
    buffers = {"out": np.zeros(ctas, np.uint32), "flag": np.zeros(1, np.uint32), "data": np.zeros(1, np.uint32)}
    kernel = Kernel(FLAG.replace("LAST", str(ctas - 1)), buffers, grid=(ctas, 1, 1))
    assert_clean(kernel, {"out": np.r_[np.full(ctas - 1, 41), 0]})


def test_atomics_of_many_ctas() -> None:
    body = """mul.lo.u32 %r1, %cta, 64; add.u32 %r1, %r1, %tx;
    red.global.add.u32 [%out], 1; red.global.max.u32 [%out+4], %r1; red.relaxed.gpu.global.or.b32 [%out+8], %tx;
    atom.global.add.u64 %rd1, [%out+16], 3; red.global.min.s32 [%out+24], -5;
    ret;"""
    kernel = Kernel(body, {"out": np.zeros(8, np.uint32)}, grid=(5, 1, 1), block=(64, 1, 1))
    assert_clean(kernel, {"out": np.array([320, 319, 63, 0, 960, 0, 2**32 - 5, 0], np.uint32)})


def test_a_spin_lock_in_shared_memory() -> None:
    body = f""".shared .align 4 .b32 lock; .shared .align 4 .b32 total;
    setp.eq.u32 %p1, %tx, 0; @%p1 st.shared.u32 [lock], 0; @%p1 st.shared.u32 [total], 0;
    {SYNC}
    setp.ne.u32 %p2, %lane, 0; @%p2 bra DONE;
    TAKE: atom.acquire.cta.shared.cas.b32 %r1, [lock], 0, 1; setp.ne.u32 %p3, %r1, 0; @%p3 bra TAKE;
    ld.shared.u32 %r2, [total]; add.u32 %r2, %r2, %warp; st.shared.u32 [total], %r2;
    atom.release.cta.shared.exch.b32 %r1, [lock], 0;
    DONE: {SYNC}
    ld.shared.u32 %r2, [total]; @%p1 st.global.u32 [%out], %r2;
    ret;"""
    assert_clean(Kernel(body, {"out": np.zeros(1, np.uint32)}, block=(128, 1, 1)), {"out": [6]})


def test_static_and_dynamic_shared_memory_together() -> None:
    body = f""".shared .align 4 .b32 fixed[8];
    setp.lt.u32 %p1, %tx, 8; shl.b32 %r1, %tx, 2; mov.u32 %r2, fixed; add.u32 %r2, %r2, %r1;
    @%p1 st.shared.u32 [%r2], %tx;
    mov.u32 %r3, dyn; add.u32 %r3, %r3, %r1; st.shared.u32 [%r3], 100;
    {SYNC}
    xor.b32 %r4, %r1, 124; mov.u32 %r3, dyn; add.u32 %r3, %r3, %r4; ld.shared.u32 %r5, [%r3];
    and.b32 %r6, %tx, 7; shl.b32 %r6, %r6, 2; mov.u32 %r2, fixed; add.u32 %r2, %r2, %r6; ld.shared.u32 %r7, [%r2];
    add.u32 %r5, %r5, %r7; mov.u32 %r8, dyn; and.b32 %r8, %r8, 1023; add.u32 %r5, %r5, %r8;
    mul.wide.u32 %rd1, %tx, 4; add.u64 %rd1, %rd1, %out; st.global.u32 [%rd1], %r5;
    ret;"""
    kernel = Kernel(
        body,
        {"out": np.zeros(64, np.uint32)},
        block=(64, 1, 1),
        dynamic_smem=256,
        module=".extern .shared .align 1024 .b8 dyn[];\n",
    )
    assert_clean(kernel, {"out": 100 + np.arange(64) % 8})


def test_launches_share_memory_in_their_order() -> None:
    body = """mul.wide.u32 %rd1, %tx, 4; add.u64 %rd1, %rd1, %out;
    ld.global.u32 %r1, [%rd1]; mad.lo.u32 %r1, %r1, 3, %tx; st.global.u32 [%rd1], %r1; ret;"""
    kernel = Kernel(body, {"out": np.ones(64, np.uint32)}, block=(64, 1, 1), launches=3)
    assert_clean(kernel, {"out": 27 + 13 * np.arange(64)})


def test_relaxed_arrivals_after_a_fence_release() -> None:
    """fence.mbarrier_init, then barrier.cluster.arrive.relaxed and wait: how CuTeDSL publishes its mbarriers."""
    body = """.shared .align 8 .b64 mbar;
    setp.eq.u32 %p1, %tx, 0; @%p1 mbarrier.init.shared::cta.b64 [mbar], 64;
    fence.mbarrier_init.release.cluster;
    barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.aligned;
    mov.u32 %r1, mbar; mov.u32 %r2, %cluster_ctarank; xor.b32 %r2, %r2, 1; mapa.shared::cluster.u32 %r3, %r1, %r2;
    mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r3];
    WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p2, [mbar], 0; @!%p2 bra WAIT;
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    @%p1 red.global.add.u32 [%out], 1; ret;"""
    kernel = Kernel(body, {"out": np.zeros(1, np.uint32)}, grid=(4, 1, 1), cluster=(2, 1, 1), block=(64, 1, 1))
    assert_clean(kernel, {"out": [4]})


def waits_once(read: str) -> Kernel:
    """Warp 0 waits once for a copy, and once for warp 1. `read`: what reads the results of the waits."""
    body = f""".shared .align 8 .b64 copied; .shared .align 8 .b64 stored;
    .shared .align 16 .b8 tile[128]; .shared .align 4 .b32 sum;
    {init("copied", "stored")}
    setp.eq.u32 %p1, %warp, 1; @%p1 bra STORE;
    @%p13 mbarrier.arrive.expect_tx.shared::cta.b64 _, [copied], 128;
    @%p13 cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [tile], [%x], 128, [copied];
    mbarrier.try_wait.parity.shared::cta.b64 %p2, [copied], 0; {read}
    ld.shared.u32 %r1, [tile];
    mbarrier.try_wait.parity.shared::cta.b64 %p2, [stored], 0; {read}
    ld.shared.u32 %r2, [sum]; add.u32 %r1, %r1, %r2;
    @%p13 st.global.u32 [%out], %r1;
    ret;
    STORE: setp.eq.u32 %p3, %lane, 0;
    @%p3 st.shared.u32 [sum], 7;
    @%p3 mbarrier.arrive.shared::cta.b64 _, [stored];
    ret;"""
    buffers = {"x": np.full(32, 35, np.uint32), "out": np.zeros(1, np.uint32)}
    return Kernel(body, buffers, block=(64, 1, 1), inputs=("x",))


@pytest.mark.parametrize(
    ("schedule", "rule"),
    [("eager", None), ("lazy", "copy-not-awaited"), ("late_warp:1", "race"), ("late_warp:0", None)],
)
def test_a_wait_that_is_not_repeated_gives_up(schedule: str, rule: str | None) -> None:
    """mbarrier.try_wait may give up (PTX ISA 9.7.13.15.16): before a copy ends, and before a late warp arrives."""
    fault = fault_of(waits_once("selp.b32 %r9, 1, 0, %p2;"), schedule)
    assert (fault and fault.rule) == rule, f"{schedule}: {fault}"


@pytest.mark.parametrize("schedule", ["eager", "lazy", "late_warp:1", "late_warp:0"])
def test_a_wait_whose_result_nobody_reads_orders_nothing(schedule: str) -> None:
    """Every schedule finds what it does not order, and names the wait. A look ahead of a loop is read."""
    found, _ = collected(waits_once(""), schedule)
    assert set(slugs(found)) >= {"copy-not-awaited", "race", "wait-result-unread"}, f"{schedule}: {found}"
    waits = [one for one in found if one.rule == "wait-result-unread"]
    assert len({one.line for one in waits}) == 2, f"{schedule}: two waits are unread: {waits}"
    ask = "mbarrier.try_wait.parity.shared::cta.b64 %p2, [@], 0;"
    loop = f"@%p2 bra MET_@; WAIT_@: {ask} @!%p2 bra WAIT_@; MET_@:"
    body = waits_once("READ").body
    for name in ("copied", "stored"):
        body = body.replace("READ", loop.replace("[@]", f"[{name}]").replace("_@", f"_{name}"), 1)
    peeked, _ = collected(replace(waits_once(""), body=body), schedule)
    assert not peeked, f"{schedule}: a look ahead of a wait is blamed: {list(map(str, peeked))}"


# By whether they do nothing but ask again.
LOOPS = {
    "ASK{n}: {ask} @!%p2 bra ASK{n};": True,
    "ASK{n}: {ask} @!%p2 bra.uni ASK{n};": True,
    "ASK{n}: {ask} @%p2 bra DONE{n}; bra ASK{n}; DONE{n}:": True,
    "ASK{n}: {ask} add.u32 %r1, %r1, 1; @!%p2 bra ASK{n};": False,
    "ASK{n}: add.u32 %r1, %r1, 1; {ask} @!%p2 bra ASK{n};": False,
    "ASK{n}: {ask} @%p1 bra DONE{n}; @!%p2 bra ASK{n}; DONE{n}:": False,
}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("schedule", ["lazy", "late_warp:1"])
def test_only_a_wait_whose_loop_does_more_gives_up(loop: str, schedule: str) -> None:
    """Giving up changes nothing in a loop that asks again at once. It would be done before each of many copies."""
    copied, stored = (
        loop.format(n=name, ask=f"mbarrier.try_wait.parity.shared::cta.b64 %p2, [{name}], 0;")
        for name in ("copied", "stored")
    )
    body = f""".shared .align 8 .b64 copied; .shared .align 8 .b64 stored; .shared .align 16 .b8 tile[128];
    {init("copied", "stored")}
    mov.u32 %r1, 0; setp.eq.u32 %p1, %warp, 1; @%p1 bra STORE;
    @%p13 mbarrier.arrive.expect_tx.shared::cta.b64 _, [copied], 128;
    @%p13 cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [tile], [%x], 128, [copied];
    {copied}
    {stored}
    ld.shared.u32 %r1, [tile]; @%p13 st.global.u32 [%out], %r1;
    ret;
    STORE: setp.eq.u32 %p4, %lane, 0;
    @%p4 mbarrier.arrive.shared::cta.b64 _, [stored];
    ret;"""
    buffers = {"x": np.full(32, 35, np.uint32), "out": np.zeros(1, np.uint32)}
    out, counters = Kernel(body, buffers, block=(64, 1, 1), inputs=("x",)).run(schedule)
    assert out["out"].tolist() == [35], f"{schedule}: {out}"
    stalls = counters["mbarrier_stalls"]
    assert (stalls == 1) == LOOPS[loop], f"warp 0 stalls {stalls} times under {schedule}, where one wait has to last"


def test_copies_end_last() -> None:
    """A copy that ended before a product which does not need it would hide a moved wait."""
    engine, tensor_core, loaded, queue = Engine(defers=True), object(), object(), CopyGroups()
    every = [("a copy", None, ()), ("cp.async", queue, ()), ("an awaited copy", None, (loaded,))]
    every += [("a product", tensor_core, ())]
    for what, of, signals in every:
        engine.submit(Operation(what, "kernel", 1, what, "warp 0", lambda: None, of, signals))
    ended = list[str]()
    while (one := engine.most_wanted([loaded])) is not None:
        engine.perform(one)
        ended.append(one.what)
    assert ended == ["a product", "an awaited copy", "a copy", "cp.async"]


@pytest.mark.parametrize("schedule", ["eager", "lazy", "late_warp:0", "late_warp:1", "random:0"])
def test_a_kernel_that_stores_while_it_polls_ends(schedule: str) -> None:
    """A wait that gave up after each event of its own loop would poll for ever."""
    body = f""".shared .align 8 .b64 copied; .shared .align 8 .b64 stored; .shared .align 16 .b8 tile[128];
    {init("copied", "stored")}
    setp.eq.u32 %p1, %warp, 1; @%p1 bra STORE;
    @%p13 mbarrier.arrive.expect_tx.shared::cta.b64 _, [copied], 128;
    @%p13 cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [tile], [%x], 128, [copied];
    POLL: mbarrier.try_wait.parity.shared::cta.b64 %p2, [copied], 0; @%p2 bra NEXT;
    red.global.add.u32 [%polls], 1; bra POLL;
    NEXT: mbarrier.try_wait.parity.shared::cta.b64 %p2, [stored], 0; @%p2 bra DONE;
    red.global.add.u32 [%polls], 1; bra NEXT;
    DONE: ld.shared.u32 %r1, [tile]; @%p13 st.global.u32 [%out], %r1;
    ret;
    STORE: setp.eq.u32 %p3, %lane, 0;
    @%p3 mbarrier.arrive.shared::cta.b64 _, [stored];
    ret;"""
    buffers = {"x": np.full(32, 35, np.uint32), "out": np.zeros(1, np.uint32), "polls": np.zeros(1, np.uint32)}
    kernel = Kernel(body, buffers, block=(64, 1, 1), inputs=("x",), step_budget=100_000)
    fault = fault_of(kernel, schedule)
    assert fault is None, f"{schedule}: {fault}"


@pytest.mark.parametrize("schedule", ["eager", "lazy", "late_cta:0"])
def test_a_warp_that_polls_is_not_run_for_long(schedule: str) -> None:
    """CTA 0 polls until CTA 1 has begun, which is when it is known to spin, and has counted to a thousand."""
    body = """setp.ne.u32 %p1, %cta, 0; @%p1 bra SET;
    POLL: ld.acquire.gpu.global.u32 %r1, [%out]; setp.eq.u32 %p2, %r1, 0; @%p2 bra POLL;
    ret;
    SET: mov.u32 %r2, 0;
    COUNT: add.u32 %r2, %r2, 1; setp.lt.u32 %p3, %r2, 1000; @%p3 bra COUNT;
    st.release.gpu.global.u32 [%out], 1; ret;"""
    _, counters = Kernel(body, {"out": np.zeros(1, np.uint32)}, grid=(2, 1, 1)).run(schedule)
    assert counters["instructions_memory"] < 500, "the polls take longer than what they wait for"


CHAIN = """setp.ne.u32 %p1, %tx, 0; @%p1 bra END;
mul.wide.u32 %rd1, %cta, 4; add.u64 %rd1, %rd1, %flags;
setp.eq.u32 %p2, %cta, 0; @%p2 bra SET;
POLL: ld.acquire.gpu.global.b32 %r2, [%rd1+-4]; setp.eq.u32 %p3, %r2, 0; @%p3 bra POLL;
SET: {store} [%rd1], 1;
END: ret;"""


@pytest.mark.parametrize("schedule", ["random:0", "random:1"])
def test_ctas_that_poll_in_vain_do_not_keep_others_from_moving(schedule: str) -> None:
    """Each CTA waits for the one before it, so that only one of them can move."""
    ctas = 96
    flags = {"flags": np.zeros(ctas, np.uint32)}
    kernel = Kernel(CHAIN.format(store="st.release.gpu.global.b32"), flags, grid=(ctas, 1, 1))
    data, counters = kernel.run(schedule)
    assert data["flags"].all()
    assert counters["instructions_memory"] < 100 * ctas


@pytest.mark.parametrize("schedule", ["random:0", "random:1"])
def test_a_warp_that_polls_in_vain_is_not_starved(schedule: str) -> None:
    """Warp 0 polls 300 times in vain. Warp 1 polls two words by turns, and so never twice the same."""
    body = """setp.ne.u32 %p1, %lane, 0; @%p1 bra END; mov.u32 %r1, 0; mov.u64 %rd1, %flag;
    setp.eq.u32 %p2, %warp, 1; @%p2 bra WAIT;
    TRY: ld.relaxed.gpu.global.b32 %r2, [%flag]; add.u32 %r1, %r1, 1; setp.lt.u32 %p3, %r1, 300; @%p3 bra TRY;
    st.relaxed.gpu.global.v2.b32 [%flag], {%r1, %r1}; bra END;
    WAIT: xor.b64 %rd1, %rd1, 4; ld.relaxed.gpu.global.b32 %r2, [%rd1]; setp.eq.u32 %p3, %r2, 0; @%p3 bra WAIT;
    END: ret;"""
    _, counters = Kernel(body, {"flag": np.zeros(4, np.uint32)}, block=(64, 1, 1)).run(schedule)
    assert counters["instructions_memory"] < 8 * 300, "the warp that counts its polls seldom had a turn"


@pytest.mark.parametrize("schedule", ["random:0", "random:1"])
def test_a_chain_with_a_gap_is_a_deadlock_still(schedule: str) -> None:
    skipped = "setp.ne.u32 %p4, %cta, 3; @%p4 st.release.gpu.global.b32"
    kernel = Kernel(CHAIN.format(store=skipped), {"flags": np.zeros(8, np.uint32)}, grid=(8, 1, 1))
    fault = fault_of(kernel, schedule)
    assert fault is not None
    assert fault.rule == "deadlock"


@pytest.mark.parametrize("schedule", ["random:0", "random:1", "random:2"])
def test_a_warp_that_polls_a_number_of_times_goes_on(schedule: str) -> None:
    """Warp 1 gives up after 1000 polls and tells warp 0, which polls in vain until then, as does warp 1."""
    body = """mov.u32 %r1, 0; setp.ne.u32 %p1, %lane, 0; @%p1 bra END; setp.eq.u32 %p2, %warp, 0; @%p2 bra WAIT;
    TRY: ld.relaxed.gpu.global.b32 %r2, [%never]; add.u32 %r1, %r1, 1; setp.lt.u32 %p3, %r1, 1000; @%p3 bra TRY;
    st.relaxed.gpu.global.b32 [%flag], 1; bra END;
    WAIT: ld.relaxed.gpu.global.b32 %r2, [%flag]; setp.eq.u32 %p3, %r2, 0; @%p3 bra WAIT;
    END: ret;"""
    flags = {"flag": np.zeros(1, np.uint32), "never": np.zeros(1, np.uint32)}
    assert_clean(Kernel(body, flags, block=(64, 1, 1)), {"flag": np.ones(1)}, [schedule])

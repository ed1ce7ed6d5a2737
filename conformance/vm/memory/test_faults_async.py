"""Planted faults of asynchronous copies: missing waits, missing proxy fences, bad operands, exits too early."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from backends.vm.faults import Fault
from conformance.vm.kernel import (
    EVERY_SCHEDULE,
    EXPECT,
    FENCE,
    LOAD,
    MAPS,
    STAGES,
    STORE,
    SYNC,
    Kernel,
    Map,
    X,
    assert_blamed,
    assert_clean,
    copy_kernel,
    init,
    wait,
)


def test_the_kernel_without_a_fault_is_clean() -> None:
    assert_clean(copy_kernel(), {"out": X + 1})


BULK = "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes"
MORE = ".shared .align 1024 .b8 more[256];"
OTHER = """cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [more], [%x], 256, [other];"""
EXPECT_OTHER = EXPECT.replace("mbar]", "other]")

PLANTED: dict[str, tuple[dict[str, str], str, tuple[str, ...]]] = {
    "a destination read without a wait": (
        {"wait": "@%p3 bra END;", "compute": "ld.shared.u32 %r1, [%r42]; //!"},
        "copy-not-awaited",
        ("read", "the copy of PTX line", "lane 0, address 0x400"),
    ),
    "a destination read after a wait for another copy": (
        {
            "declare": STAGES["declare"] + MORE,
            "load": f"{STAGES['load']}\n{EXPECT_OTHER}\n{OTHER}",
            "wait": wait("other", 0),
            "compute": "ld.shared.u32 %r1, [%r42]; //!",
        },
        "copy-not-awaited",
        ("the copy of PTX line",),
    ),
    "a destination overwritten before the wait": (
        {"wait": "@%p3 bra END;\nst.shared.u32 [%r42], %tx; //!"},
        "copy-not-awaited",
        ("overwritten", "the copy of PTX line"),
    ),
    "a second copy into the same place": (
        {"load": f"{STAGES['load']}\n{EXPECT_OTHER}\n{LOAD.replace('[mbar]', '[other]')} //!"},
        "copy-not-awaited",
        ("overwritten", "the copy of PTX line"),
    ),
    "a copy into what another warp still reads": (
        {
            "compute": f"ld.shared.u32 %r1, [%r42];\nsetp.lt.u32 %p4, %tx, 32; @%p4 bar.sync 1, 32;\n@%p3 bra END;\n"
            f"{STAGES['compute'].splitlines()[0]}\nSPIN: ld.relaxed.gpu.global.u32 %r2, [%flag]; "
            "setp.eq.u32 %p5, %r2, 0; @%p5 bra SPIN;\n"
            f"{EXPECT}\n{LOAD} //!",
            "wait": STAGES["wait"] + "\nld.shared.u32 %r1, [%r42];\nst.relaxed.gpu.global.u32 [%flag], 1;",
        },
        "race",
        ("overwritten", "warp 1 read it"),
    ),
    "a store without a fence": (
        {"publish": SYNC, "store": f"{STORE} //!"},
        "missing-proxy-fence",
        ("the tensor store reads what warp 0 wrote at PTX line", "fence.proxy.async"),
    ),
    "a fence by the issuer before the barrier": (
        {"publish": f"@!%p3 {FENCE}\n{SYNC}", "store": f"{STORE} //!"},
        "missing-proxy-fence",
        ("what warp 1 wrote at PTX line",),
    ),
    "a write after the fence": (
        {"publish": f"{FENCE}\nst.shared.u32 [%r42], %r1;\n{SYNC}", "store": f"{STORE} //!"},
        "missing-proxy-fence",
        ("what warp 0 wrote",),
    ),
    "a fence for global memory only": (
        {"publish": f"fence.proxy.async.global;\n{SYNC}", "store": f"{STORE} //!"},
        "missing-proxy-fence",
        ("what warp 0 wrote",),
    ),
    "a store with neither fence nor barrier": (
        {
            "publish": "",
            "compute": STAGES["compute"] + "\nst.relaxed.gpu.global.u32 [%flag], 1;",
            "before store": STAGES["before store"],
            "store": f"{STORE} //!",
        },
        "race",
        ("read by the tensor store", "warp 1 wrote it at PTX line"),
    ),
    "a load over unfenced writes": (
        {"load": f"st.shared.u32 [%r41], 1;\n{EXPECT}\n{LOAD} //!"},
        "missing-proxy-fence",
        ("overwrites what warp 0 wrote at PTX line",),
    ),
    "a source overwritten while it is stored": (
        {"drain": "st.shared.u32 [%r41+4], 5; //!"},
        "race",
        ("a copy read it", "lane 0, address 0x404"),
    ),
    "a source overwritten by a byte": (
        {"drain": "st.shared.u8 [%r41+5], 5; //!"},
        "race",
        ("a copy read it",),
    ),
    "a source overwritten after a wait that allows it to be pending": (
        {"drain": "cp.async.bulk.wait_group.read 1;\nst.shared.u32 [%r41], 5; //!"},
        "race",
        ("a copy read it",),
    ),
    "a source overwritten after a wait without a commit": (
        {"commit": "", "drain": STAGES["drain"] + "\nst.shared.u32 [%r41], 5; //!"},
        "race",
        ("a copy read it",),
    ),
    "a source overwritten by a load": (
        {"drain": f"{EXPECT}\n{LOAD} //!"},
        "race",
        ("a copy read it",),
    ),
    "an exit with a pending store": (
        {"drain": "", "store": f"{STORE} //!"},
        "exit-with-pending-store",
        ("without a cp.async.bulk.wait_group", "warp 0, lane 0"),
    ),
    "an exit without a commit": (
        {"commit": "", "store": f"{STORE} //!"},
        "exit-with-pending-store",
        ("wait_group",),
    ),
    "an exit with a load that nobody waits for": (
        {"load": f"{EXPECT}\n{LOAD} //!", "wait": "bra END;"},
        "exit-with-pending-operation",
        ("nobody has waited for it at mbarrier",),
    ),
    "a source that nobody wrote": (
        {"load": "", "wait": "", "compute": "", "store": f"{STORE} //!"},
        "uninitialised-shared",
        ("byte 0 of `out`", "is part of the result", "byte 0x400 of shared memory, which was not yet written"),
    ),
    "a destination askew": (
        {"load": f"add.u32 %r41, %r41, 64;\n{EXPECT}\n{LOAD} //!"},
        "misaligned",
        ("128",),
    ),
    "a destination beyond shared memory": (
        {"load": f"add.u32 %r41, %r41, 0x1000;\n{EXPECT}\n{LOAD} //!"},
        "out-of-bounds",
        ("outside of the CTA's shared memory",),
    ),
    "a tensor map askew": (
        {"load": f"add.u64 %from, %from, 32;\n{EXPECT}\n{LOAD} //!"},
        "misaligned",
        ("multiple of 64",),
    ),
    "the wrong number of dimensions": (
        {"load": f"{EXPECT}\n{LOAD.replace('2d', '3d').replace('%r30, %r30', '%r30, %r30, %r30')} //!"},
        "tensor-map",
        (".3d copy with a map of 2 dimensions",),
    ),
    "something that is no tensor map": (
        {"load": f"mov.b64 %from, %x;\n{EXPECT}\n{LOAD} //!"},
        "tensor-map",
        (),
    ),
    "a bulk copy of 24 bytes": (
        {"load": f"{EXPECT}\n{BULK} [%r41], [%x], 24, [mbar]; //!"},
        "bulk-copy",
        ("a bulk copy of 24 bytes", "a positive multiple of 16"),
    ),
    "a bulk copy from beyond a buffer": (
        {"load": f"{EXPECT}\n{BULK} [%r41], [%x+64], 256, [mbar]; //!"},
        "out-of-bounds",
        ("`x` (256 bytes)",),
    ),
    "a bulk copy into an input": (
        {"store": "cp.async.bulk.global.shared::cta.bulk_group [%x], [%r41], 256; //!"},
        "read-only",
        ("`x`",),
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted(name: str) -> None:
    changes, rule, clauses = PLANTED[name]
    schedules = EVERY_SCHEDULE
    if name == "a store with neither fence nor barrier":
        spin = "SPIN: ld.relaxed.gpu.global.u32 %r2, [%flag]; setp.eq.u32 %p5, %r2, 0; @%p5 bra SPIN;"
        changes = {
            **changes,
            "compute": changes["compute"].replace("st.relaxed", "@%p6 st.relaxed"),
            "before store": f"{STAGES['before store']}\n{spin}",
            "addresses": STAGES["addresses"] + " setp.eq.u32 %p6, %warp, 1;",
        }
    if name == "a copy into what another warp still reads":
        changes = {
            **changes,
            "wait": changes["wait"].replace("st.relaxed", "setp.eq.u32 %p6, %tx, 63;\n@%p6 st.relaxed"),
        }
    assert_blamed(copy_kernel(changes, {"flag": np.zeros(1, np.uint32)}), rule, *clauses, schedules=schedules)


def test_both_places_of_the_fence_are_right() -> None:
    assert_clean(copy_kernel({"publish": f"{FENCE}\n{SYNC}"}), {"out": X + 1})
    assert_clean(copy_kernel({"publish": f"{SYNC}\n@!%p3 {FENCE}"}), {"out": X + 1})


@pytest.mark.parametrize("clause", ["tensor copy", "too small"])
def test_a_map_that_is_larger_than_its_buffer(clause: str) -> None:
    maps = {**MAPS, "from": replace(MAPS["from"], dims=(16, 8), box=(16, 8))}
    kernel = copy_kernel(
        {"load": f"{EXPECT}\n{LOAD} //!", "declare": STAGES["declare"].replace("256", "512")}, maps=maps
    )
    if clause == "too small":
        kernel = replace(kernel, maps={**MAPS, "from": Map("x", "u32", (16, 4), (128,), (16, 4))})
    assert_blamed(kernel, "out-of-bounds", "tensor copy", "`x`")


@pytest.mark.parametrize(("bytes_", "clause"), [(128, "128 bytes more than expected"), (512, "256 transaction bytes")])
def test_a_wrong_number_of_expected_bytes_is_a_deadlock(bytes_: int, clause: str) -> None:
    kernel = copy_kernel({"load": f"{EXPECT.replace('256', str(bytes_))}\n{LOAD}"})
    for schedule in EVERY_SCHEDULE:
        with pytest.raises(Fault) as caught:
            kernel.run(schedule)
        said = str(caught.value)
        assert caught.value.rule == "deadlock", f"{schedule}: {said}"
        assert clause in said, f"{schedule}: {said}"
        assert re.search(r"phase of parity 0 of mbarrier 0x[0-9a-f]+ \(phase 0, ", said), f"{schedule}: {said}"


CP_ASYNC = f""".shared .align 16 .b8 buf[512];
mov.u32 %r41, buf; shl.b32 %r42, %lane, 4; add.u32 %r42, %r42, %r41;
mul.wide.u32 %rd1, %lane, 16; add.u64 %rd1, %rd1, %x;
cp.async.ca.shared.global [%r42], [%rd1], 16;
cp.async.commit_group;
WAITING
{FENCE}
bar.warp.sync 0xffffffff;
setp.ne.u32 %p1, %lane, 0;
@%p1 bra END;
STORING
cp.async.bulk.commit_group;
cp.async.bulk.wait_group 0;
END: ret;"""
BULK_STORE = "cp.async.bulk.global.shared::cta.bulk_group [%out], [buf], 512;"


def cp_async_kernel(waiting: str, storing: str = BULK_STORE, fence: str = FENCE) -> Kernel:
    body = CP_ASYNC.replace("WAITING", waiting).replace("STORING", storing).replace(FENCE, fence)
    x = np.arange(128, dtype=np.uint32)
    return Kernel(body, {"x": x, "out": np.zeros(128, np.uint32)}, inputs=("x",))


def test_cp_async_must_be_waited_for_and_fenced() -> None:
    wait_all = "cp.async.wait_group 0;"
    assert_clean(cp_async_kernel(wait_all), {"out": np.arange(128)})
    assert_blamed(
        cp_async_kernel("ld.shared.u32 %r1, [%r42]; //!"), "copy-not-awaited", "lane 0", "the copy of PTX line"
    )
    assert_blamed(cp_async_kernel("cp.async.wait_group 1;\nld.shared.u32 %r1, [%r42]; //!"), "copy-not-awaited")
    assert_blamed(cp_async_kernel(wait_all, f"{BULK_STORE} //!", fence=""), "missing-proxy-fence", "a copy wrote")
    body = CP_ASYNC.split("WAITING")[0].replace("16;\ncp", "16; //!\ncp") + "ret;"
    kernel = Kernel(body, {"x": np.arange(128, dtype=np.uint32)})
    assert_blamed(kernel, "exit-with-pending-operation", "without a cp.async.wait_group")


def test_an_mbarrier_does_not_cover_copies_that_are_signalled_elsewhere() -> None:
    """The smallest kernel that an epoch shared by all copies would accept: wait for the second copy, read the first."""
    body = f""".shared .align 16 .b8 first[16]; .shared .align 16 .b8 second[16];
    .shared .align 8 .b64 one; .shared .align 8 .b64 two;
    {init("one", "two")}
    @!%p13 bra ISSUED;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [one], 16;
    cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [first], [%x], 16, [one];
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [two], 16;
    cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [second], [%x], 16, [two];
    ISSUED: {wait("two", 0)}
    ld.shared.u32 %r1, [second];
    ld.shared.u32 %r1, [first]; //!
    ret;"""
    assert_blamed(Kernel(body, {"x": X}), "copy-not-awaited", "lane 0, address 0x400")

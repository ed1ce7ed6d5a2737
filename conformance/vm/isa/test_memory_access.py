"""Loads, stores, atomics, cp.async and cluster shared memory, against the ISA and an H200's addresses."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from conformance.vm.kernel import EVERY_SCHEDULE, SYNC, Kernel, assert_blamed, assert_clean

BYTES = np.arange(256, dtype=np.uint8) ^ 0x5A

LOADS = {
    ("u8", "%r1"): lambda raw: int(raw[0]),
    ("s8", "%r1"): lambda raw: int(raw[:1].view(np.int8)[0]),
    ("b16", "%r1"): lambda raw: int(raw[:2].view(np.uint16)[0]),
    ("s16", "%r1"): lambda raw: int(raw[:2].view(np.int16)[0]),
    ("b32", "%r1"): lambda raw: int(raw[:4].view(np.uint32)[0]),
}


@pytest.mark.parametrize("space", ["global", "shared", "local", ""])
@pytest.mark.parametrize("kind", ["u8", "s8", "b16", "s16", "b32"])
def test_loads_narrower_than_their_register_are_extended(kind: str, space: str) -> None:
    """PTX ISA 9.4.1: zero- or sign-extended to the width of the destination."""
    size = int(kind[1:]) // 8
    put = "" if space in ("global", "") else f"ld.global.b32 %r2, [%x]; st.{space}.b32 [buf], %r2;"
    place = "%x" if space in ("global", "") else "buf"
    declare = f".{space} .align 16 .b8 buf[16];" if put else ""
    dot = f".{space}" if space else ""
    body = f"{declare}\n{put}\nld{dot}.{kind} %r1, [{place}];\nst.global.b32 [%out], %r1;\nret;"
    raw = np.array([0x9C, 0xF1, 0x83, 0xE7], np.uint8)
    expected = LOADS[kind, "%r1"](raw) & 0xFFFFFFFF
    kernel = Kernel(body, {"x": raw, "out": np.zeros(1, np.uint32)}, block=(1, 1, 1), inputs=("x",))
    assert_clean(kernel, {"out": [expected]}, schedules=("eager",))
    assert size <= 4


@pytest.mark.parametrize("vector", ["v2.b8", "v4.b16", "v2.b32", "v4.b32", "v8.b32", "v2.b64", "v4.b64"])
def test_vectors_keep_the_order_of_memory(vector: str) -> None:
    count, bits = int(vector[1]), int(vector.split("b")[1])
    prefix = {8: "%h", 16: "%h", 32: "%r", 64: "%rd"}[bits]
    names = ", ".join(f"{prefix}{index}" for index in range(count))
    size = count * bits // 8
    body = f"""mul.wide.u32 %rd20, %tx, {size}; add.u64 %rd21, %rd20, %x; add.u64 %rd22, %rd20, %out;
    ld.global.{vector} {{{names}}}, [%rd21]; st.global.{vector} [%rd22], {{{names}}}; ret;"""
    count_of_threads = 256 // size
    kernel = Kernel(body, {"x": BYTES, "out": np.zeros(256, np.uint8)}, block=(count_of_threads, 1, 1), inputs=("x",))
    assert_clean(kernel, {"out": BYTES}, schedules=("eager",))


WRAPPED = {
    "ld.shared": "st.shared.b32 [s], 5; ld.shared.b32 %r3, [%r1+4294966784];",
    "ld.shared behind a register below 0": "st.shared.b32 [s], 5; ld.shared.b32 %r3, [%r2+2048];",
    "st.shared": "st.shared.b32 [%r2+2048], 5; ld.shared.b32 %r3, [s];",
    "atom.shared": "st.shared.b32 [s], 5; atom.shared.add.u32 %r3, [%r2+2048], 1;",
    "red.shared": "st.shared.b32 [s], 4; red.shared.add.u32 [%r2+2048], 1; ld.shared.b32 %r3, [s];",
    "cp.async": "cp.async.ca.shared.global [%r2+2048], [%x], 4; cp.async.wait_all; ld.shared.b32 %r3, [s];",
    "st.local and ld.local": "st.local.b32 [%r5+2048], 5; ld.local.b32 %r3, [%r5+2048];",
    "mbarrier.init": "mbarrier.init.shared.b64 [%r2+2048], 5; mbarrier.pending_count.b64 %r3, %rd1;",
}


@pytest.mark.parametrize("name", WRAPPED)
def test_addresses_of_32_bits_wrap(name: str) -> None:
    """nvcc makes a register below 0 and an offset of `s[i % 3]`; conformance/silicon/whole/movement.py asks an
    H200."""
    access = WRAPPED[name]
    if name == "mbarrier.init":
        access = access.replace("mbarrier.pending", "mbarrier.arrive.shared.b64 %rd1, [s]; mbarrier.pending")
    body = f""".shared .align 16 .b8 s[16]; .local .align 8 .b8 l[16];
mov.u32 %r0, s; add.u32 %r1, %r0, 512; sub.u32 %r2, %r0, 2048; mov.u32 %r4, l; sub.u32 %r5, %r4, 2048;
{access} st.global.b32 [%out], %r3; ret;"""
    kernel = Kernel(body, {"x": np.full(4, 5, np.uint32), "out": np.zeros(1, np.uint32)}, block=(1, 1, 1))
    assert_clean(kernel, {"out": [5]}, schedules=("eager",))


def test_an_address_that_wraps_into_nothing_is_out_of_bounds() -> None:
    body = ".shared .align 16 .b8 s[16]; mov.u32 %r1, 0; ld.shared.b32 %r3, [%r1+-16]; //!\nret;"
    assert_blamed(Kernel(body), "out-of-bounds", "an address of CTA rank 255", schedules=("eager",))


ATOMICS = {
    "add.u32": lambda old, x: (old + x) & 0xFFFFFFFF,
    "min.u32": min,
    "max.u32": max,
    "and.b32": lambda old, x: old & x,
    "or.b32": lambda old, x: old | x,
    "xor.b32": lambda old, x: old ^ x,
    "exch.b32": lambda old, x: x,
    "inc.u32": lambda old, x: 0 if old >= x else old + 1,
    "dec.u32": lambda old, x: x if old == 0 or old > x else old - 1,
}


@pytest.mark.parametrize("space", ["global", "shared"])
@pytest.mark.parametrize("name", ATOMICS)
def test_atomics_return_the_old_value(name: str, space: str) -> None:
    """Each lane has its own word, so the order of the lanes does not matter (PTX ISA 9.7.13.5)."""
    put = "ld.global.b32 %r3, [%rd2]; st.shared.b32 [%r2], %r3;" if space == "shared" else ""
    get = "ld.shared.b32 %r3, [%r2]; st.global.b32 [%rd2], %r3;" if space == "shared" else ""
    place = "%r2" if space == "shared" else "%rd2"
    body = f""".shared .align 4 .b8 buf[128];
    mul.wide.u32 %rd1, %tx, 4; add.u64 %rd2, %rd1, %word; add.u64 %rd3, %rd1, %x; add.u64 %rd4, %rd1, %out;
    mov.u32 %r2, buf; shl.b32 %r4, %tx, 2; add.u32 %r2, %r2, %r4;
    ld.global.b32 %r1, [%rd3]; {put}
    atom.{space}.{name} %r5, [{place}], %r1; {get}
    st.global.b32 [%rd4], %r5; ret;"""
    generator = np.random.default_rng(7)
    word, x = (generator.integers(0, 2**32, 32, dtype=np.uint32) for _ in range(2))
    word[:4], x[:4] = [0, 5, 2**32 - 1, 7], [9, 5, 1, 0]
    expected = [ATOMICS[name](int(old), int(value)) for old, value in zip(word, x, strict=True)]
    kernel = Kernel(body, {"word": word, "x": x, "out": np.zeros(32, np.uint32)}, inputs=("x",))
    assert_clean(kernel, {"out": word, "word": np.array(expected, np.uint32)}, schedules=("eager",))


@pytest.mark.parametrize("space", ["shared", "global"])
def test_an_atomic_sum_returns_a_signalling_nan_as_it_is(space: str) -> None:
    """Drawn programs 1794 and 2538 on an H200. The sum is the canonical NaN."""
    place, buf = ("buf", ".shared .b32 buf;") if space == "shared" else ("%word", "")
    put, get = (
        ("st.shared.b32 [buf], %r1;", "ld.shared.b32 %r3, [buf];") if buf else ("", "ld.global.b32 %r3, [%word];")
    )
    body = f"""{buf} ld.global.b32 %r1, [%word]; {put} mov.f32 %f1, 0f3F800000;
    atom.{space}.add.f32 %f2, [{place}], %f1; {get}
    st.global.f32 [%out], %f2; st.global.b32 [%out+4], %r3; ret;"""
    buffers = {"word": np.array([0xFFA80001], np.uint32), "out": np.zeros(2, np.uint32)}
    found = Kernel(body, buffers, block=(1, 1, 1)).run()[0]["out"].tolist()
    assert found == [0xFFA80001, 0x7FFFFFFF], f"the old word and the sum are {[hex(one) for one in found]}"


def test_compare_and_swap_lets_one_lane_win() -> None:
    body = """add.u32 %r1, %tx, 1; atom.global.cas.b32 %r2, [%out], 0, %r1;
    setp.eq.u32 %p1, %r2, 0; @%p1 red.global.add.u32 [%out+4], 1; ret;"""
    found = Kernel(body, {"out": np.zeros(2, np.uint32)}).run()[0]["out"].tolist()
    assert found[1] == 1, f"{found[1]} lanes took a word that was free once"
    assert 1 <= found[0] <= 32


@pytest.mark.parametrize("size", [4, 8, 16])
def test_cp_async_writes_zeros_beyond_src_size(size: int) -> None:
    body = f""".shared .align 16 .b8 buf[512];
    mul.lo.u32 %r1, %lane, {size}; mov.u32 %r2, buf; add.u32 %r2, %r2, %r1; cvt.u64.u32 %rd1, %r1;
    add.u64 %rd2, %rd1, %x;
    rem.u32 %r3, %lane, {size + 1};
    cp.async.ca.shared.global [%r2], [%rd2], {size}, %r3;
    cp.async.wait_all;
    add.u64 %rd3, %rd1, %out;
    {"".join(f"ld.shared.b32 %r4, [%r2+{o}]; st.global.b32 [%rd3+{o}], %r4; " for o in range(0, size, 4))}
    ret;"""
    x = np.arange(32 * size, dtype=np.uint8) | 0x80
    expected = x.reshape(32, size) * (np.arange(size) < (np.arange(32) % (size + 1))[:, None])
    kernel = Kernel(body, {"x": x, "out": np.zeros(32 * size, np.uint8)}, inputs=("x",))
    assert_clean(kernel, {"out": expected.reshape(-1)}, schedules=EVERY_SCHEDULE)


def test_cp_async_with_src_size_zero_reads_no_source() -> None:
    body = """.shared .align 16 .b8 buf[16]; add.u64 %rd1, %x, 0x8000; setp.eq.u32 %p1, 0, 0; mov.u32 %r1, 0;
    cp.async.cg.shared.global [buf], [%rd1], 16, %r1;
    cp.async.wait_all; ld.shared.v2.b32 {%r2, %r3}, [buf+8]; st.global.v2.b32 [%out], {%r2, %r3}; ret;"""
    kernel = Kernel(body, {"x": BYTES, "out": np.full(2, 9, np.uint32)}, block=(1, 1, 1))
    assert_clean(kernel, {"out": [0, 0]}, schedules=EVERY_SCHEDULE)
    outside = Kernel(body.replace("mov.u32 %r1, 0;", "mov.u32 %r1, 4;"), {"x": BYTES, "out": np.zeros(2, np.uint32)})
    with pytest.raises(Exception, match=r"out-of-bounds.*cp\.async of 4 bytes"):
        outside.run()


CLUSTER = """.shared .align 4 .b32 x[4];
mov.u32 %r1, %cluster_ctarank; mov.u32 %r2, x; mov.u32 %r3, dyn; mul.wide.u32 %rd1, %cta, 64; add.u64 %rd1, %rd1, %out;
setp.eq.u32 %p1, %tx, 0; add.u32 %r4, %r1, 100; @%p1 st.shared.u32 [x], %r4;
mapa.shared::cluster.u32 %r5, %r2, 0; mapa.shared::cluster.u32 %r6, %r2, 3;
cvt.u64.u32 %rd2, %r2; cvta.shared.u64 %rd2, %rd2; mapa.u64 %rd3, %rd2, 1; cvt.u32.u64 %r7, %rd3;
getctarank.shared::cluster.u32 %r8, %r6; getctarank.shared::cluster.u32 %r9, %r2; getctarank.u64 %r10, %rd3;
barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
ld.shared::cluster.u32 %r11, [%r6];
and.b32 %r12, %r2, 0xfeffffff; ld.shared::cluster.u32 %r12, [%r12];
and.b32 %r13, %r2, 0x00ffffff; ld.shared::cluster.u32 %r13, [%r13];
ld.u32 %r14, [%rd3];
barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
@!%p1 ret;
st.global.v4.u32 [%rd1], {%r1, %r2, %r3, %r5}; st.global.v4.u32 [%rd1+16], {%r6, %r7, %r8, %r9};
st.global.v4.u32 [%rd1+32], {%r10, %r11, %r12, %r13}; st.global.u32 [%rd1+48], %r14; ret;"""


def test_addresses_in_a_cluster_are_those_of_an_h200() -> None:
    """Ranks in bits 31..24, static objects from 0x400, a 1024-aligned dynamic array at 0x800 (facts.md 0.1)."""
    rows = []
    for rank in range(4):
        own = rank << 24 | 0x400
        rows.append(
            [
                rank,
                own,
                rank << 24 | 0x800,
                0x400,
                0x03000400,
                0x01000400,
                3,
                rank,
                1,
                103,
                100 + (rank & ~1),
                100,
                101,
                0,
                0,
                0,
            ]
        )
    kernel = Kernel(
        CLUSTER,
        {"out": np.zeros((4, 16), np.uint32)},
        grid=(4, 1, 1),
        cluster=(4, 1, 1),
        dynamic_smem=2048,
        module=".extern .shared .align 1024 .b8 dyn[];\n",
    )
    assert_clean(kernel, {"out": np.array(rows)}, schedules=EVERY_SCHEDULE)


ST_ASYNC = """.shared .align 8 .b64 mbar; .shared .align 16 .b8 box[512];
setp.eq.u32 %p1, %tx, 0; @%p1 mbarrier.init.shared::cta.b64 [mbar], 1;
@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [mbar], 512;
barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
mov.u32 %r1, %cluster_ctarank; xor.b32 %r2, %r1, 1; mov.u32 %r3, box; shl.b32 %r4, %lane, 4; add.u32 %r3, %r3, %r4;
mov.u32 %r5, mbar; mapa.shared::cluster.u32 %r6, %r3, %r2; mapa.shared::cluster.u32 %r7, %r5, %r2;
mul.lo.u32 %r8, %r1, 1000; add.u32 %r8, %r8, %lane;
st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%r6], {%r8, %r1, %r8, %lane}, [%r7];
WAIT
ld.shared.v4.u32 {%r9, %r10, %r11, %r12}, [%r3];
mul.wide.u32 %rd1, %cta, 128; add.u64 %rd1, %rd1, %out; mul.wide.u32 %rd2, %lane, 4; add.u64 %rd1, %rd1, %rd2;
st.global.u32 [%rd1], %r9;
barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned; ret;"""


def test_st_async_into_the_other_cta() -> None:
    loop = "AGAIN: mbarrier.try_wait.parity.shared::cta.b64 %p2, [mbar], 0; @!%p2 bra AGAIN;"
    options = {"buffers": {"out": np.zeros((2, 32), np.uint32)}, "grid": (2, 1, 1), "cluster": (2, 1, 1)}
    expected = np.stack([1000 + np.arange(32), np.arange(32)])
    assert_clean(Kernel(ST_ASYNC.replace("WAIT", loop, 1), **options), {"out": expected})  # type: ignore[arg-type]
    hasty = ST_ASYNC.replace("WAIT\n", "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;\n", 1)
    hasty = hasty.replace("[%r3];\nmul", "[%r3]; //!\nmul")
    assert_blamed(Kernel(hasty, **options), "copy-not-awaited", "the st.async of PTX line")  # type: ignore[arg-type]
    assert SYNC not in hasty


@pytest.mark.parametrize("count", [2, 4])
def test_vector_atomics_add_each_element(count: int) -> None:
    """Two CTAs of 32 lanes add to 8 vectors. An atom returns the sum before it: the largest lacks one addend."""
    values = ", ".join(f"%f{i}" for i in range(count))
    olds = ", ".join(f"%f{i + 8}" for i in range(count))
    body = f"""and.b32 %r1, %lane, 7; mul.wide.u32 %rd1, %r1, {4 * count}; add.u64 %rd1, %rd1, %out;
    {" ".join(f"mov.f32 %f{i}, 0f{np.float32(i + 1).view(np.uint32):08x};" for i in range(count))}
    red.relaxed.gpu.global.add.v{count}.f32 [%rd1], {{{values}}};
    atom.global.add.v{count}.f32 {{{olds}}}, [%rd1], {{{values}}};
    setp.ge.f32 %p1, %f{count + 7}, 0f{np.float32(15 * count).view(np.uint32):08x};
    @%p1 red.global.add.u32 [%seen], 1; ret;"""
    buffers = {"out": np.zeros(8 * count, np.float32), "seen": np.zeros(1, np.uint32)}
    out = np.tile(np.arange(1, count + 1, dtype=np.float32) * 16, 8)
    assert_clean(Kernel(body, buffers, grid=(2, 1, 1)), {"out": out, "seen": np.array([8], np.uint32)})


def test_a_vector_atomic_is_aligned_to_all_of_it() -> None:
    body = (
        "add.u64 %rd1, %out, 8; mov.f32 %f0, 0f00000000;\nred.global.add.v4.f32 [%rd1], {%f0, %f0, %f0, %f0}; //!\nret;"
    )
    assert_blamed(Kernel(body, {"out": np.zeros(16, np.float32)}), "misaligned", "vector atomic of 16 bytes")


@pytest.mark.parametrize("opcode", ["atom", "red"])
@pytest.mark.parametrize(("kind", "dtype"), [("f16", np.float16), ("bf16", ml_dtypes.bfloat16)])
def test_halves_are_added_one_by_one(opcode: str, kind: str, dtype: Any) -> None:
    """32 lanes add 0.25 and lane + 1; bf16 rounds to nearest even after each addition."""
    old = "%r3, " if opcode == "atom" else ""
    body = f"""cvt.rn.f32.u32 %f1, %lane; add.f32 %f1, %f1, 0f3F800000; mov.f32 %f2, 0f3E800000;
    cvt.rn.{kind}x2.f32 %r1, %f1, %f2;
    {opcode}.global.add.noftz.{kind}x2 {old}[%out], %r1; ret;"""
    found, _ = Kernel(body, {"out": np.zeros(1, np.uint32)}).run()
    expected = np.zeros(2, dtype)
    for lane in range(32):
        expected = (expected.astype(np.float32) + np.array([0.25, lane + 1], np.float32)).astype(dtype)
    assert found["out"].view(dtype).tolist() == expected.tolist()

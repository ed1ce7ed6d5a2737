"""cp.async.bulk and cp.async.bulk.tensor as instructions: dumps of an H200, reductions, groups, multicast."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
import pytest

from backends.vm.faults import Fault, UnknownInstructionError
from backends.vm.memory.global_memory import GAP
from backends.vm.tensor.tensor_map import ELEMENT_TYPES, Im2col
from conformance.vm.kernel import (
    EXPECT,
    FENCE,
    LOAD,
    MAPS,
    STORE,
    SYNC,
    Array,
    Kernel,
    Map,
    X,
    assert_blamed,
    assert_clean,
    copy_kernel,
    init,
    wait,
)
from conformance.vm.tensor.test_tma_box import (
    COUNTING,
    GOLDEN,
    LOADS,
    MEASURED_LOADS,
    MEASURED_STORES,
    STORES,
    matrix,
)

DYNAMIC = ".extern .shared .align 1024 .b8 dyn[];\n"
IMAGE = 65536
SETUP = f"""setp.eq.u32 %p1, %tx, 0; mov.u32 %r1, dyn; add.u32 %r2, %r1, {IMAGE}; shl.b32 %r3, %tx, 4;
@%p1 mbarrier.init.shared::cta.b64 [%r2], 1;
cvt.u64.u32 %rd1, %r3; add.u32 %r4, %r1, %r3; mov.u32 %r5, 0;"""
EACH = f"add.u32 %r5, %r5, 2048; setp.lt.u32 %p2, %r5, {IMAGE};"


def box_bytes(box: tuple[int, ...], steps: tuple[int, ...], element: int) -> int:
    counts = [box[0], *(-(-size // step) for size, step in zip(box[1:], steps[1:], strict=True))]
    return int(np.prod(counts)) * element


LOADED = [
    "sw3_in16",
    "sw3_soff384",
    "sw2_in32",
    "sw1_soff",
    "oob_dt6_f1",
    "neg_dt9_f1",
    "oob_dt1_f0",
    "es3",
    "r1",
    "r3",
    "r5",
    "u8_256",
    "f64",
    "f32_dt7_f0",
    "f32_dt11_f1",
]


@pytest.mark.parametrize("name", LOADED)
def test_a_tensor_load_instruction_leaves_an_h200s_bytes(name: str) -> None:
    dtype, dims, strides, box, at, offset, swizzle, steps, fill = MEASURED_LOADS[name]
    coordinates = ", ".join(str(value) for value in at)
    source = GOLDEN["tma_f32src"].view(np.uint8) if name.startswith("f32") else COUNTING
    element = {"u8": 1, "f64": 8}.get(dtype, 4 if dtype.startswith(("f32", "tf32")) else 2)
    expected = LOADS[name].view(np.uint8)
    body = f"""{SETUP} mov.b32 %r6, 0xeeeeeeee;
    FILL: add.u32 %r7, %r4, %r5; st.shared.v4.b32 [%r7], {{%r6, %r6, %r6, %r6}}; {EACH} @%p2 bra FILL;
    {FENCE} {SYNC}
    @!%p1 bra LOADED;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], {box_bytes(box, steps, element)};
    add.u32 %r8, %r1, {offset};
    cp.async.bulk.tensor.{len(dims)}d.shared::cta.global.tile.mbarrier::complete_tx::bytes
    [%r8], [%map, {{{coordinates}}}], [%r2];
    LOADED: {wait("%r2", 0)}
    mov.u32 %r5, 0;
    COPY: add.u32 %r7, %r4, %r5; cvt.u64.u32 %rd2, %r5; add.u64 %rd2, %rd2, %rd1; add.u64 %rd2, %rd2, %out;
    ld.shared.v4.b32 {{%r10, %r11, %r12, %r13}}, [%r7]; st.global.v4.b32 [%rd2], {{%r10, %r11, %r12, %r13}};
    {EACH} @%p2 bra COPY;
    ret;"""
    maps = {"map": Map("x", dtype, dims, strides, box, swizzle, element_strides=steps, fill=fill)}
    kernel = Kernel(
        body,
        {"x": source, "out": np.zeros(IMAGE, np.uint8)},
        maps,
        block=(128, 1, 1),
        module=DYNAMIC,
        dynamic_smem=IMAGE + 8,
        inputs=("x",),
    )
    assert_clean(kernel, {"out": expected}, schedules=("eager", "lazy"))


def store_kernel(instruction: str, image: Array, out: Array, store_map: Map) -> Kernel:
    """Copies `image` to shared memory; then thread 0 issues `instruction`, with its source at %r8."""
    body = f"""{SETUP}
    FILL: add.u32 %r7, %r4, %r5; cvt.u64.u32 %rd2, %r5; add.u64 %rd2, %rd2, %rd1; add.u64 %rd2, %rd2, %image;
    ld.global.v4.b32 {{%r10, %r11, %r12, %r13}}, [%rd2]; st.shared.v4.b32 [%r7], {{%r10, %r11, %r12, %r13}};
    {EACH} @%p2 bra FILL;
    {FENCE} {SYNC}
    @!%p1 ret;
    {instruction}
    cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; ret;"""
    return Kernel(
        body,
        {"image": image.view(np.uint8), "out": out},
        {"map": store_map},
        block=(128, 1, 1),
        module=DYNAMIC,
        dynamic_smem=IMAGE + 8,
        inputs=("image",),
    )


@pytest.mark.parametrize("name", MEASURED_STORES)
def test_a_tensor_store_instruction_leaves_an_h200s_bytes(name: str) -> None:
    box, at, swizzle, offset, steps = MEASURED_STORES[name]
    dtype, dims, strides, *_ = matrix(box, at)
    store = "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group"
    instruction = f"add.u32 %r8, %r1, {offset}; {store} [%map, {{{at[0]}, {at[1]}}}], [%r8];"
    out = np.full(20000, 0x11111111, np.uint32)
    kernel = store_kernel(
        instruction, GOLDEN["tma_stimg"], out, Map("out", dtype, dims, strides, box, swizzle, element_strides=steps)
    )
    assert_clean(kernel, {"out": STORES[name]}, schedules=("eager", "lazy"))


@pytest.mark.parametrize(
    ("name", "dtype", "element"),
    [("red_dt6", "f16", 2), ("red_dt9", "bf16", 2), ("red_dt7", "f32", 4), ("red_dt2", "u32", 4)],
)
def test_a_tensor_reduction_adds_where_an_h200_added(name: str, dtype: str, element: int) -> None:
    """100 x 100 zeros in rows of 400 bytes; the box of 16 x 8 at (8, 95) is clipped to 5 rows.

    The image is taken from the H200's dump, which is the sum. A second addition must double it.
    """
    measured = STORES[name]
    image = np.zeros(IMAGE // 4, np.uint32)
    row = 16 * element // 4
    for y in range(5):
        first = (95 + y) * 100 + 8 * element // 4
        image[y * row : (y + 1) * row] = measured[first : first + row]
    add = "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%map, {8, 95}], [%r8];"
    kernel = store_kernel(
        f"mov.u32 %r8, %r1; {add}", image, np.zeros(20000, np.uint32), Map("out", dtype, (100, 100), (400,), (16, 8))
    )
    assert_clean(kernel, {"out": measured}, schedules=("eager", "lazy"))
    numbers = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32, "u32": np.uint32}[dtype]
    doubled = (measured.view(numbers) + measured.view(numbers)).astype(numbers).view(np.uint32)
    twice = replace(kernel, body=kernel.body.replace(add, add + add))
    assert_clean(twice, {"out": doubled}, schedules=("eager", "lazy"))


def reduction_values(dtype: type, seed: int) -> Array:
    generator = np.random.default_rng(seed)
    if np.dtype(dtype).kind in "ui":
        return generator.integers(0, 2**31, 64).astype(dtype)
    return generator.normal(0, 100, 64).astype(dtype)


WRAP = {
    "inc": lambda old, x: np.where(old >= x, 0, old + 1),
    "dec": lambda old, x: np.where((old == 0) | (old > x), x, old - 1),
}
REDUCTIONS: list[tuple[str, type]] = [
    ("add.u32", np.uint32),
    ("add.s32", np.int32),
    ("add.u64", np.uint64),
    ("add.f32", np.float32),
    ("add.f64", np.float64),
    ("add.noftz.f16", np.float16),
    ("add.noftz.bf16", ml_dtypes.bfloat16),
    ("min.u32", np.uint32),
    ("max.s32", np.int32),
    ("min.f16", np.float16),
    ("max.bf16", ml_dtypes.bfloat16),
    ("and.b32", np.uint32),
    ("or.b64", np.uint64),
    ("xor.b32", np.uint32),
    ("inc.u32", np.uint32),
    ("dec.u32", np.uint32),
    ("min.s64", np.int64),
]


@pytest.mark.parametrize(("spelling", "dtype"), REDUCTIONS)
def test_a_linear_reduction(spelling: str, dtype: type) -> None:
    """PTX ISA 9.7.9.25.4.2; an addition rounds to nearest even."""
    old, new = reduction_values(dtype, 1), reduction_values(dtype, 2)
    if "nc" in spelling or "dec" in spelling:
        old[:8] = 0
    operation = spelling.split(".")[0]
    wide = np.float64 if np.dtype(dtype).kind not in "ui" and np.dtype(dtype).itemsize < 8 else dtype
    combine = {
        "add": np.add,
        "min": np.minimum,
        "max": np.maximum,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
        **WRAP,
    }[operation]
    expected = combine(old.astype(wide), new.astype(wide)).astype(dtype)
    image = np.zeros(IMAGE, np.uint8)
    image[: new.nbytes] = new.view(np.uint8)
    instruction = f"cp.reduce.async.bulk.global.shared::cta.bulk_group.{spelling} [%out], [%r1], {new.nbytes};"
    kernel = store_kernel(instruction, image, old.view(np.uint8), Map("out", "u8", (16,), (), (16,)))
    assert_clean(kernel, {"out": expected.view(np.uint8)}, schedules=("eager", "lazy"))


INTEGERS = frozenset({"u32", "s32", "u64", "s64"})
THROUGH_MAPS = {
    "add": frozenset({"u32", "s32", "u64", "f16", "bf16", "f32", "f32_ftz", "f64"}),
    **dict.fromkeys(("min", "max"), INTEGERS | {"f16", "bf16"}),
    **dict.fromkeys(("and", "or", "xor"), INTEGERS),
    **dict.fromkeys(("inc", "dec"), frozenset({"u32"})),
}
"""The element types of maps that a reduction accepts (PTX ISA 9.7.9.27.1.3), written down independently."""


def tensor_reduction(operation: str, dtype: str, accumulate: str = "fast") -> dict[str, Array]:
    """The buffers after 128 elements of ones are combined with 128 of twos."""
    element = ELEMENT_TYPES[dtype]
    size = 128 * element.bits // 8
    instruction = f"cp.reduce.async.bulk.tensor.1d.global.shared::cta.{operation}.bulk_group [%map, {{0}}], [%r1];"
    out, image = np.full(size, 2, np.uint8), np.ones(IMAGE, np.uint8)
    kernel = store_kernel(instruction, image, out, Map("out", dtype, (128,), (), (128,)))
    return kernel.run(accumulate=accumulate)[0]


@pytest.mark.parametrize("dtype", ELEMENT_TYPES)
def test_each_operation_takes_the_elements_that_it_has(dtype: str) -> None:
    for operation, takes in THROUGH_MAPS.items():
        if dtype in takes:
            out = tensor_reduction(operation, dtype)["out"]
            expected = {"and": 1 & 2, "or": 1 | 2, "xor": 1 ^ 2}.get(operation)
            assert expected is None or (out == expected).all(), f".{operation} of {dtype}"
            continue
        with pytest.raises(
            Fault, match=rf"\.{operation} is for elements of .*those of the tensor map are {dtype}"
        ) as said:
            tensor_reduction(operation, dtype)
        assert said.value.rule == "bulk-copy", f".{operation} of {dtype}"


def test_in_the_ring_no_copy_computes_with_floats() -> None:
    assert (tensor_reduction("add", "u32", "ring")["out"] == 3).all(), "integers are what they always are"
    for dtype in ("f32", "bf16"):
        with pytest.raises(UnknownInstructionError, match="no counterpart in the ring"):
            tensor_reduction("add", dtype, "ring")
    add = "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.{} [%out], [%r1], 16;"
    plain, image = Map("out", "u8", (16,), (), (16,)), np.zeros(IMAGE, np.uint8)
    assert not store_kernel(add.format("s32"), image, image[:16], plain).run(accumulate="ring")[0]["out"].any()
    with pytest.raises(UnknownInstructionError, match="no counterpart in the ring"):
        store_kernel(add.format("f32"), image, image[:16], plain).run(accumulate="ring")
    load = f"""mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 16;
    cp.async.bulk.tensor.1d.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%map, {{0}}], [%r2];
    {wait("%r2", 0)}"""
    moved, rounded = (
        store_kernel(load, image, image[:16], Map("out", kind, (4,), (), (4,))) for kind in ("f32", "tf32")
    )
    moved.run(accumulate="ring")
    with pytest.raises(UnknownInstructionError, match="no counterpart in the ring"):
        rounded.run(accumulate="ring")


@pytest.mark.parametrize("size", [232464, 0x80000000, 0xFFFFFFF0])
@pytest.mark.parametrize(
    "copy",
    [
        "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%out], %r3, [%r2];",
        "cp.async.bulk.global.shared::cta.bulk_group [%out], [%r1], %r3;",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%out], [%r1], %r3;",
    ],
)
def test_a_copy_of_more_than_shared_memory_is_refused_before_its_bytes_are_listed(copy: str, size: int) -> None:
    plain, image = Map("out", "u8", (16,), (), (16,)), np.zeros(IMAGE, np.uint8)
    kernel = store_kernel(f"mov.u32 %r3, {size}; {copy}", image, image[:16], plain)
    with pytest.raises(Fault, match=f"a bulk copy of {size} bytes; the shared memory of a CTA has at most 232448"):
        kernel.run()


@pytest.mark.parametrize(
    "copy",
    [
        "cp.async.bulk.tensor.5d.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%map, {0,0,0,0,0}], [%r2];",
        "cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [%map, {0,0,0,0,0}], [%r1];",
    ],
)
def test_a_box_of_more_than_shared_memory_is_refused_before_its_rows_are_listed(copy: str) -> None:
    box, image = (16, 256, 256, 256, 256), np.zeros(IMAGE, np.uint8)
    kernel = store_kernel(copy, image, image[:4096], Map("out", "u8", (16,) * 5, (16, 256, 256, 256), box))
    with pytest.raises(Fault, match=f"the box of a tensor copy has {256**4} rows"):
        kernel.run()


LINEAR = f""".shared .align 16 .b8 buf[512]; .shared .align 8 .b64 mbar;
{init("mbar")}
@!%p13 bra ISSUED;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [mbar], 512;
cp.async.bulk.DST.global.mbarrier::complete_tx::bytes [buf], [%x], 256, [mbar];
cp.async.bulk.DST.global.mbarrier::complete_tx::bytes.L2::cache_hint [buf+256], [%x+512], 256, [mbar], %rd9;
ISSUED: {wait("mbar", 0)}
@!%p13 ret;
cp.async.bulk.global.shared::cta.bulk_group [%out], [buf+128], 128;
cp.async.bulk.commit_group;
cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%out+256], [buf+256], 256, %rd9;
cp.async.bulk.commit_group;
cp.async.bulk.wait_group.read 1;
cp.async.bulk.wait_group 0; ret;"""


@pytest.mark.parametrize("destination", ["shared::cta", "shared::cluster"])
def test_linear_copies_both_ways(destination: str) -> None:
    x = np.random.default_rng(5).integers(0, 256, 1024, dtype=np.uint8)
    expected = np.zeros(512, np.uint8)
    expected[:128], expected[256:] = x[128:256], x[512:768]
    body = "mov.u64 %rd9, 0;\n" + LINEAR.replace("DST", destination)
    assert_clean(Kernel(body, {"x": x, "out": np.zeros(512, np.uint8)}, inputs=("x",)), {"out": expected})


CLUSTER = f""".shared .align 128 .b8 buf[512]; .shared .align 8 .b64 mbar;
setp.eq.u32 %p13, %tx, 0; @%p13 mbarrier.init.shared::cta.b64 [mbar], 1;
@%p13 mbarrier.arrive.expect_tx.shared::cta.b64 _, [mbar], 512;
barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
mov.u32 %r1, %cluster_ctarank; mov.u32 %r2, buf; shl.b32 %r3, %r1, 8; add.u32 %r2, %r2, %r3; mov.u16 %h1, 3;
mov.u32 %r4, 0;
shl.b32 %r5, %r1, 2; cvt.u64.u32 %rd3, %r3;
@%p13 MULTICAST
{wait("mbar", 0)}
mul.wide.u32 %rd1, %cta, 512; add.u64 %rd1, %rd1, %out; shl.b32 %r6, %tx, 4; cvt.u64.u32 %rd2, %r6;
add.u64 %rd1, %rd1, %rd2;
mov.u32 %r7, buf; add.u32 %r7, %r7, %r6; ld.shared.v4.b32 {{%r8, %r9, %r10, %r11}}, [%r7];
st.global.v4.b32 [%rd1], {{%r8, %r9, %r10, %r11}};
barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned; ret;"""
MULTICASTS = {
    "tensor": "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
    "[%r2], "
    "[%map, {%r4, %r5}], [mbar], %h1;",
    "linear": "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
    "[%r2], [%rd4], 256, "
    "[mbar], %h1;",
}


@pytest.mark.parametrize("name", MULTICASTS)
def test_each_cta_loads_half_and_multicasts_it_to_both(name: str) -> None:
    """Data and signal arrive at the same offset in every CTA of the mask (PTX ISA 9.7.9.27.1.2)."""
    x = np.arange(128, dtype=np.uint32) * 5
    body = CLUSTER.replace("@%p13 MULTICAST", f"add.u64 %rd4, %x, %rd3;\n@%p13 {MULTICASTS[name]}")
    kernel = Kernel(
        body,
        {"x": x, "out": np.zeros(256, np.uint32)},
        {"map": Map("x", "u32", (16, 8), (64,), (16, 4))},
        grid=(2, 1, 1),
        cluster=(2, 1, 1),
        inputs=("x",),
    )
    assert_clean(kernel, {"out": np.r_[x, x]})


def test_a_copy_from_shared_memory_into_another_cta() -> None:
    copy = f"""mov.u32 %r12, buf; xor.b32 %r13, %r1, 1; mapa.shared::cluster.u32 %r14, %r12, %r13; mov.u32 %r15, mbar;
    mapa.shared::cluster.u32 %r15, %r15, %r13; mov.u32 %r16, own; shl.b32 %r17, %tx, 4; add.u32 %r18, %r16, %r17;
    mad.lo.u32 %r19, %r1, 1000, %tx; st.shared.v4.b32 [%r18], {{%r19, %r19, %r19, %r19}}; {FENCE} {SYNC}
    @%p13 cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r14], [own], 512, [%r15];"""
    body = ".shared .align 16 .b8 own[512];\n" + CLUSTER.replace("@%p13 MULTICAST", copy)
    kernel = Kernel(body, {"out": np.zeros((2, 32, 4), np.uint32)}, grid=(2, 1, 1), cluster=(2, 1, 1))
    rows = np.repeat(np.arange(32)[:, None], 4, axis=1)
    assert_clean(kernel, {"out": np.stack([rows + 1000, rows])})


@pytest.mark.parametrize("size", ["16", "%r9"])
def test_lanes_that_issue_the_same_reduction_do_it_each(size: str) -> None:
    """ptxas loops over the lanes. A store by all of them, with the same operands, is one operation of the warp."""
    body = f""".shared .align 16 .b8 buf[512];
    shl.b32 %r1, %lane, 4; mov.u32 %r2, buf; add.u32 %r3, %r1, %r2; mov.u32 %r4, 3; mov.u32 %r9, 16;
    st.shared.v4.u32 [%r3], {{%r4, %r4, %r4, %r4}};
    {FENCE}
    bar.warp.sync 0xffffffff; setp.lt.u32 %p1, %lane, 5;
    cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%out], [%r2], {size};
    @%p1 cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%some], [%r2], {size};
    cp.async.bulk.global.shared::cta.bulk_group [%once], [%r2], {size};
    cvt.u64.u32 %rd1, %r1; add.u64 %rd1, %rd1, %own;
    cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%rd1], [%r3], {size};
    cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; ret;"""
    ones = {name: np.ones(4, np.uint32) for name in ("out", "some", "once")}
    kernel = Kernel(body, {**ones, "own": np.ones(128, np.uint32)})
    sums = {"out": 1 + 32 * 3, "some": 1 + 5 * 3, "once": 3}
    wanted = {name: np.full(4, value, np.uint32) for name, value in sums.items()}
    assert_clean(kernel, {**wanted, "own": np.full(128, 4, np.uint32)})


def test_a_load_that_nobody_was_elected_for() -> None:
    """Each lane's copy writes the same bytes, but the mbarrier counts the bytes of all of them."""
    body = f""".shared .align 16 .b8 buf[512]; .shared .b64 bar;
    mov.u32 %r2, buf; mov.u32 %r3, bar; setp.eq.u32 %p1, %lane, 0;
    @%p1 mbarrier.init.shared.b64 [%r3], 1; {FENCE} bar.warp.sync 0xffffffff;
    @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r3], 16; bar.warp.sync 0xffffffff;
    cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r2], [%out], 16, [%r3]; ret;"""
    kernel = Kernel(body, {"out": np.ones(4, np.uint32)})
    with pytest.raises(Fault) as caught:
        kernel.run()
    assert caught.value.rule == "copy-not-awaited", f"found {caught.value}"


CHANNELS = 16


@dataclass(frozen=True)
class Columns:
    """One im2col copy of f16: the images [n, .., w, c], the bounding box, the first position (width first)."""

    shape: tuple[int, ...]
    lower: tuple[int, ...]
    upper: tuple[int, ...]
    pixels: int
    first: tuple[int, ...]
    offsets: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()
    swizzle: str = "none"
    channel: int = 0
    fill: str = "zero"

    @property
    def images(self) -> Array:
        return (np.arange(1, int(np.prod(self.shape)) + 1) % 2039).astype(np.float16).reshape(self.shape)

    def map(self) -> Map:
        dims, spatial = self.shape[::-1], len(self.shape) - 2
        strides = [2 * int(np.prod(dims[: axis + 1])) for axis in range(len(dims) - 1)]
        return Map("x", "f16", dims, strides, (CHANNELS,), self.swizzle, fill=self.fill,
                   element_strides=(1, *(self.steps or (1,) * spatial), 1),
                   im2col=Im2col(self.lower, self.upper, self.pixels))  # fmt: skip

    def places(self) -> list[tuple[int, ...]]:
        """The pixels (n, .., w) in the order that the convolution reads them: images, then filter positions."""
        spatial = self.shape[1:-1][::-1]
        steps = self.steps or (1,) * len(spatial)
        axes = [range(low, size + high, step)
                for low, high, size, step in zip(self.lower, self.upper, spatial, steps, strict=True)]  # fmt: skip
        every = [(n, *reversed(at)) for n in range(self.shape[0] + 2)
                 for at in (tuple(reversed(one)) for one in itertools.product(*reversed(axes)))]  # fmt: skip
        start = every.index((self.first[-1], *reversed(self.first[:-1])))
        shift = (0, *reversed(self.offsets or (0,) * len(spatial)))
        return [tuple(a + b for a, b in zip(one, shift, strict=True)) for one in every[start : start + self.pixels]]

    def inside(self, place: tuple[int, ...]) -> bool:
        return all(0 <= at < size for at, size in zip(place, self.shape[:-1], strict=True))

    def loaded(self) -> Array:
        fill = (
            np.zeros(CHANNELS, np.float16) if self.fill == "zero" else np.full(CHANNELS, 0x7FF7, np.uint16).view("f2")
        )
        channels = slice(self.channel, self.channel + CHANNELS)
        return np.stack([self.images[place][channels] if self.inside(place) else fill for place in self.places()])


COLUMNS = {
    "the first example of the ISA": Columns((16, 14, 9, 64), (-1, -1), (-1, -1), 64, (4, 7, 7)),
    "the second, with offsets": Columns((16, 14, 9, 64), (0, 0), (-2, -2), 64, (4, 7, 7), (2, 2)),
    "the third, with strides": Columns((16, 14, 8, 64), (-1, -1), (-1, -1), 32, (5, 7, 7), (1, 1), (2, 2)),
    "one dimension": Columns((3, 11, 32), (-2,), (1,), 20, (3, 1), (3,), channel=16),
    "three dimensions": Columns((2, 3, 4, 5, 16), (-1, -1, -1), (1, 0, 1), 100, (-1, -1, -1, 0), (0, 1, 2)),
    "a swizzle": Columns((2, 6, 6, 16), (0, 0), (0, 0), 48, (0, 0, 0), swizzle="32B"),
    "beyond the last image": Columns((2, 3, 3, 16), (0, 0), (0, 0), 16, (1, 1, 1)),
    "filled with NaN": Columns((2, 3, 3, 16), (-1, -1), (-1, -1), 16, (-1, -1, 0), fill="nan"),
}
COLUMN_LOAD = """.shared .align 1024 .b8 tile[8192]; .shared .align 8 .b64 mbar;
INIT
setp.ne.u32 %p3, %tx, 0; mov.b32 %r30, tile; OFFSETS
@%p3 bra LOADED;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [mbar], BYTES;
cp.async.bulk.tensor.DIMd.shared::cta.global.im2col.mbarrier::complete_tx::bytes [%r30], [%m, {AT}], [mbar], {OFF};
LOADED: WAIT
mov.u32 %r1, %tx;
COPYING: mad.lo.u32 %r2, %r1, 2, %r30; ld.shared.b16 %h0, [%r2]; mul.wide.u32 %rd1, %r1, 2; add.u64 %rd1, %rd1, %out;
st.global.b16 [%rd1], %h0; add.u32 %r1, %r1, 32; setp.lt.u32 %p4, %r1, COUNT; @%p4 bra COPYING;
ret;"""


def column_kernel(item: Columns) -> Kernel:
    count, rank = item.pixels * CHANNELS, len(item.shape)
    offsets = item.offsets or (0,) * (rank - 2)
    names = [f"%h{i + 1}" for i in range(rank - 2)]
    text = {
        "INIT": init("mbar"), "WAIT": wait("mbar", 0), "BYTES": str(2 * count), "COUNT": str(count), "DIM": str(rank),
        "AT": ", ".join(map(str, (item.channel, *item.first))), "OFFSETS": "".join(
            f"mov.b16 {name}, {value};" for name, value in zip(names, offsets, strict=True)),
        "OFF}": ", ".join(names) + "}",
    }  # fmt: skip
    body = COLUMN_LOAD
    for name, value in text.items():
        body = body.replace(name, value)
    return Kernel(body, {"x": item.images, "out": np.zeros(count, np.float16)}, {"m": item.map()}, inputs=("x",))


@pytest.mark.parametrize("name", COLUMNS)
def test_an_im2col_load_takes_the_pixels_of_a_convolution(name: str) -> None:
    item = COLUMNS[name]
    found, _ = column_kernel(item).run()
    wanted = item.loaded()
    if item.swizzle == "32B":
        # The swizzle XORs bit 4 of the address with bit 7: in every other group of four 32-byte rows the halves are
        # swapped.
        rows = np.arange(item.pixels)
        wanted = np.where((rows // 4 % 2 == 1)[:, None], np.roll(wanted, 8, axis=1), wanted)
    got = found["out"].reshape(wanted.shape)
    assert np.array_equal(got.view(np.uint16), wanted.view(np.uint16)), f"first at {np.argwhere(got != wanted)[:1]}"


REFUSED_COLUMNS = {
    "outside of the bounding box": ({"first": (9, 7, 7)}, "tensor-coordinates", "goes from -1 to 7"),
    "between two steps": ({"steps": (2, 1), "first": (4, 7, 7)}, "tensor-coordinates", "steps of 2"),
    "an offset too far": ({"offsets": (256, 0)}, "tensor-coordinates", "0 to 255"),
}


@pytest.mark.parametrize("name", REFUSED_COLUMNS)
def test_im2col_copies_that_mean_nothing(name: str) -> None:
    changes, rule, sentence = REFUSED_COLUMNS[name]
    item = replace(COLUMNS["the first example of the ISA"], **changes)
    with pytest.raises(Fault, match=sentence) as fault:
        column_kernel(item).run()
    assert fault.value.rule == rule


def test_a_map_and_its_copy_are_of_one_mode() -> None:
    kernel = column_kernel(COLUMNS["one dimension"])
    tiled = replace(kernel.maps["m"], im2col=None, box=(CHANNELS, 1, 1))
    with pytest.raises(Fault, match="a map that is a tiled one"):
        replace(kernel, maps={"m": tiled}).run()
    tile = kernel.body.replace(".global.im2col.", ".global.tile.").replace("[mbar], {%h1};", "[mbar];")
    with pytest.raises(Fault, match="a copy of a tile with an im2col map"):
        replace(kernel, body=tile).run()


def test_an_im2col_store_puts_them_back() -> None:
    """Pixels outside the images are not written (PTX ISA 5.5.4.3), and no offsets are given."""
    item = Columns((2, 3, 4, 16), (-1, -1), (0, 0), 20, (-1, 0, 0))
    body = f""".shared .align 1024 .b8 tile[8192];
mov.b32 %r30, tile; mov.u32 %r1, %tx;
FILLING: mad.lo.u32 %r2, %r1, 2, %r30; cvt.u16.u32 %h0, %r1; st.shared.b16 [%r2], %h0; add.u32 %r1, %r1, 32;
setp.lt.u32 %p4, %r1, {item.pixels * CHANNELS}; @%p4 bra FILLING;
{FENCE} {SYNC}
setp.ne.u32 %p3, %tx, 0; @%p3 bra END;
cp.async.bulk.tensor.4d.global.shared::cta.im2col_no_offs.bulk_group [%m, {{0, -1, 0, 0}}], [%r30];
cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
END: ret;"""
    found, _ = Kernel(body, {"x": np.zeros(item.shape, np.uint16)}, {"m": item.map()}).run()
    wanted = np.zeros(item.shape, np.uint16)
    for i, place in enumerate(item.places()):
        if item.inside(place):
            wanted[place] = np.arange(CHANNELS) + CHANNELS * i
    assert np.array_equal(found["x"], wanted)
    assert wanted.any(), "the test writes something"


# The start of a map. `x` is u32 [4, 16]. BELOW is a map of it that begins four rows below it; the boxes have four rows.
# An H200 faults if a box begins outside and the map below memory: h200-tma-out-of-bounds.json.
BELOW = Map("x", "u32", (16, 4, 8), (64, 64), (16, 4, 1), offset=-4 * 64)


def below(at: tuple[int, int, int], m: Map = BELOW, mark: str = " //!") -> Kernel:
    """Copies four rows of the map `m` at `at` to `out` unchanged."""
    load = (
        f"{EXPECT}\n{LOAD.replace('.2d.', '.3d.').replace('{%r30, %r30}', '{' + ', '.join(map(str, at)) + '}')}{mark}"
    )
    return copy_kernel({"load": load, "compute": ""}, maps={**MAPS, "from": m}, target="sm_90a")


STRAY = {"behind": (0, 4, 0), "behind, elsewhere": (0, 4, 6), "before": (0, -4, 4), "half before": (0, -2, 4),
         "in the last mode": (0, 0, 8), "in the columns": (16, 0, 4)}  # fmt: skip


@pytest.mark.parametrize("name", STRAY)
def test_a_box_that_begins_outside_reads_where_its_map_begins(name: str) -> None:
    kernel = below(STRAY[name])
    assert_blamed(kernel, "tensor-base", "begins in no buffer; the nearest is `x`", "256 bytes before the start")
    there = replace(BELOW, offset=0, dims=(16, 4, 1))
    outside = below(STRAY[name], there, "")
    found, _ = outside.run()
    rows = np.arange(4) + STRAY[name][1]
    inside = (rows >= 0) & (rows < 4) & (STRAY[name][0] == 0) & (STRAY[name][2] == 0)
    assert np.array_equal(found["out"].reshape(4, 16), np.where(inside[:, None], X.reshape(4, 16)[rows % 4], 0))


def test_a_box_that_begins_inside_reads_what_it_has_alone() -> None:
    """Rows `first` to `first + valid - 1`, then zeros, through a map that begins below the tensor."""
    for first, valid in ((0, 1), (0, 4), (1, 3), (3, 1)):
        wanted = np.zeros((4, 16), np.uint32)
        wanted[:valid] = X.reshape(4, 16)[first : first + valid]
        assert_clean(below((0, 4 - valid, first + valid), mark=""), {"out": wanted.reshape(-1)}, ("eager", "lazy"))


def test_a_map_may_not_begin_in_another_buffer_than_its_tensor() -> None:
    """The two buffers are adjacent only by chance. A box that begins inside has shown which tensor the map is for."""
    rows = 2 * GAP // 64
    begins_in_before = Map("x", "u32", (16, rows + 4), (64,), (16, 4), offset=-2 * GAP)
    inside, outside = (LOAD.replace("{%r30, %r30}", f"{{0, {row}}}") for row in (rows, rows + 4))
    other = [text.replace("[mbar]", "[other]") for text in (EXPECT, inside)]
    load = "\n".join([*other, wait("other", 0), EXPECT, f"{outside} //!"])
    buffers = {"before": np.zeros(64, np.uint32), "x": X}
    kernel = copy_kernel({"load": load}, maps={**MAPS, "from": begins_in_before})
    assert_blamed(replace(kernel, buffers={**buffers, **kernel.buffers}), "tensor-base", "outside of `x`",
                  "begins in `before`", schedules=("eager", "lazy"))  # fmt: skip


def test_addresses_wrap_around() -> None:
    """Such maps are used by Triton's ragged descriptors and by our attention over sequences of different lengths."""
    end = 1 << 30
    wrapping = Map("x", "u32", (16, end, 5, end + 1), (64, 64, (1 << 34) - 64), (16, 4, 1, 1))
    for first, valid in ((0, 1), (0, 4), (1, 3), (3, 1), (0, 0), (4, 0)):
        wanted = np.zeros((4, 16), np.uint32)
        wanted[:valid] = X.reshape(4, 16)[first : first + valid]
        at = f"{{0, {end - valid}, {first + valid}, {end}}}"
        load = f"{EXPECT}\n{LOAD.replace('.2d.', '.4d.').replace('{%r30, %r30}', at)}"
        kernel = copy_kernel({"load": load, "compute": ""}, maps={**MAPS, "from": wrapping})
        assert_clean(kernel, {"out": wanted.reshape(-1)}, ("eager", "lazy"))


@pytest.mark.parametrize("operation", ["store", "reduction", "prefetch"])
def test_only_loads_read_where_their_map_begins(operation: str) -> None:
    reduction = STORE.replace("cp.async.", "cp.reduce.async.").replace("cta.tile", "cta.add.tile")
    said = {"store": STORE, "reduction": reduction,
            "prefetch": "cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%to, {%r30, %r30}];"}[operation]  # fmt: skip
    instruction = said.replace(".2d.", ".3d.").replace("{%r30, %r30}", "{0, 4, 0}")
    kernel = copy_kernel({"store": instruction}, maps={**MAPS, "to": replace(BELOW, buffer="out")})
    assert_clean(kernel, {"out": np.zeros(64)}, ("eager", "lazy"))

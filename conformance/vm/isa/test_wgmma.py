"""wgmma against registers and results of an H200, and the waits and fences that a kernel needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from backends.vm.bind import lanes
from backends.vm.faults import Fault, UnknownInstructionError
from backends.vm.machine import code
from backends.vm.numerics import ring
from backends.vm.tensor.fragments import to_matrix, to_registers, wgmma_accumulator, wgmma_operand_a
from conformance import SILICON
from conformance.vm.kernel import Kernel
from conformance.vm.tensor_kernel import BASE, core_matrices

GOLDEN = np.load(SILICON / "movement" / "wgmma.npz")
NUMERICS = np.load(SILICON / "numerics" / "wgmma.npz")
SCHEDULES = ("eager", "lazy", "random:3")

HEAD = """.reg .b32 %x, %bar, %d<64>, %a<4>, %index;
.reg .b64 %p, %da, %db, %mine, %token;
.reg .pred %one, %on, %done;
setp.eq.s32 %one, %tx, 0; setp.eq.s32 %on, 0, 0;
mov.u32 %x, smem; add.s32 %bar, %x, BYTES;
@%one mbarrier.init.shared.b64 [%bar], 1;
bar.sync 0;
@%one mbarrier.arrive.expect_tx.shared.b64 %token, [%bar], BYTES;
@%one cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%x], [%image], BYTES, [%bar];
LOADING: mbarrier.try_wait.parity.shared.b64 %done, [%bar], 0; @!%done bra LOADING;
mul.wide.u32 %mine, %cta, 16; add.s64 %p, %desc, %mine;
ld.global.b64 %da, [%p]; ld.global.b64 %db, [%p+8];
mad.lo.s32 %index, %cta, 128, %tx;
"""

ALL = "wgmma.fence.sync.aligned; MMA wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"


def vector(name: str, count: int) -> str:
    return "{" + ", ".join(f"%{name}{i}" for i in range(count)) + "}"


def moved(direction: str, buffer: str, name: str, count: int) -> str:
    """Loads or stores of `count` registers per thread, with each thread's words contiguous."""
    lines = [f"mul.wide.u32 %mine, %index, {4 * count}; add.s64 %p, %{buffer}, %mine;"]
    for i in range(count):
        pair = f"%{name}{i}, [%p+{4 * i}]" if direction == "ld" else f"[%p+{4 * i}], %{name}{i}"
        lines.append(f"{direction}.global.b32 {pair};")
    return "\n".join(lines)


def run(
    mma: str,
    image: npt.NDArray[np.uint8],
    descriptors: npt.NDArray[np.uint64],
    registers: int,
    *,
    cin: npt.NDArray[np.uint32] | None = None,
    areg: npt.NDArray[np.uint32] | None = None,
    body: str = ALL,
    more: Mapping[str, npt.NDArray[np.uint32]] | None = None,
    accumulate: str = "hopper",
    schedule: str = "eager",
) -> npt.NDArray[np.uint32]:
    """Accumulators after `body` with MMA replaced by `mma`, one CTA per case: uint32 [cases, 128, registers]."""
    cases = len(descriptors)
    buffers = {"image": image, "desc": descriptors, "out": np.zeros((cases, 128, registers), np.uint32), **(more or {})}
    before = ""
    if cin is not None:
        buffers["cin"], before = cin, moved("ld", "cin", "d", registers)
    if areg is not None:
        buffers["areg"], before = areg, before + moved("ld", "areg", "a", 4)
    kernel = Kernel(
        HEAD.replace("BYTES", str(image.size))
        + before
        + body.replace("MMA", mma)
        + moved("st", "out", "d", registers)
        + "ret;",
        buffers,
        grid=(cases, 1, 1),
        block=(128, 1, 1),
        dynamic_smem=image.size + 64,
        module=".extern .shared .align 1024 .b8 smem[];",
        target="sm_90a",
    )
    return kernel.run(schedule, accumulate)[0]["out"]


def spelled(shape: str, types: str, registers: int, tail: str, *, a: str = "%da") -> str:
    return f"wgmma.mma_async.sync.aligned.{shape}.{types} {vector('d', registers)}, {a}, %db, {tail};"


FROM_SMEM = [
    ("wf16_00", "f16", "m64n64k16", "f32.f16.f16", 32, "0, 1, 1, 0, 0"),
    ("wf16_01", "f16", "m64n64k16", "f32.f16.f16", 32, "0, 1, 1, 0, 1"),
    ("wf16_10", "f16", "m64n64k16", "f32.f16.f16", 32, "0, 1, 1, 1, 0"),
    ("wf16_11", "f16", "m64n64k16", "f32.f16.f16", 32, "0, 1, 1, 1, 1"),
    ("wbf16", "bf16", "m64n64k16", "f32.bf16.bf16", 32, "0, 1, 1, 0, 0"),
    ("wtf32", "tf32", "m64n64k8", "f32.tf32.tf32", 32, "0, 1, 1"),
    ("we4m3", "e4m3", "m64n64k32", "f32.e4m3.e4m3", 32, "0, 1, 1"),
    ("ws8", "s8", "m64n64k32", "s32.s8.s8", 32, "0"),
    ("wf16d16", "f16", "m64n64k16", "f16.f16.f16", 16, "0, 1, 1, 0, 0"),
    ("wf16n8", "f16", "m64n8k16", "f32.f16.f16", 4, "0, 1, 1, 0, 0"),
]
MAX_CASES = 8


@pytest.mark.parametrize(("case", "image", "shape", "types", "registers", "tail"), FROM_SMEM, ids=lambda v: str(v))
def test_random_descriptors_give_an_h200s_accumulators(
    case: str, image: str, shape: str, types: str, registers: int, tail: str
) -> None:
    raw = GOLDEN[f"{case}_desc"][:MAX_CASES]
    found = run(spelled(shape, types, registers, tail), GOLDEN[f"img_{image}"], raw, registers)
    for number, expected in enumerate(GOLDEN[f"{case}_out"][:MAX_CASES]):
        assert np.array_equal(found[number], expected), f"{case} number {number}: other accumulators than an H200's"


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("case", "image", "shape", "types", "tail"),
    [
        ("wf16_rs", "f16", "m64n64k16", "f32.f16.f16", "0, 1, 1, 0"),
        ("we4m3_rs", "e4m3", "m64n64k32", "f32.e4m3.e4m3", "0, 1, 1"),
        ("wtf32_rs", "tf32", "m64n64k8", "f32.tf32.tf32", "0, 1, 1"),
    ],
)
def test_a_in_registers(case: str, image: str, shape: str, types: str, tail: str, schedule: str) -> None:
    mma = spelled(shape, types, 32, tail, a=vector("a", 4))
    found = run(mma, GOLDEN[f"img_{image}"], GOLDEN[f"{case}_desc"][:3], 32, areg=GOLDEN[f"{case}_areg"][:3],
                schedule=schedule)  # fmt: skip
    assert np.array_equal(found, GOLDEN[f"{case}_out"][:3]), f"{case} under {schedule}: other than an H200's"


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_accumulators_are_added_to(schedule: str) -> None:
    mma = spelled("m64n64k16", "f32.f16.f16", 32, "%on, 1, 1, 0, 0")
    found = run(mma, GOLDEN["img_f16"], GOLDEN["wf16_c_desc"], 32, cin=GOLDEN["wf16_c_cin"], schedule=schedule)
    assert np.array_equal(found, GOLDEN["wf16_c_out"]), (
        "accumulators before the instruction were not added as on an H200"
    )


def packed(matrix: npt.NDArray[np.generic]) -> npt.NDArray[np.uint8]:
    """A K-major operand without swizzle."""
    return core_matrices(np.ascontiguousarray(matrix).view(np.uint8))


def unswizzled(offset: int) -> int:
    """The descriptor of an unswizzled operand with 32-byte rows, at `offset` in dynamic shared memory."""
    return (BASE + offset) >> 4 | (128 >> 4) << 16 | (256 >> 4) << 32


@pytest.mark.parametrize("tag", ["overwrite", "add"])
@pytest.mark.parametrize(
    ("kind", "k", "tail"),
    [("f16", 16, ", 1, 1, 0, 0"), ("bf16", 16, ", 1, 1, 0, 0"), ("tf32", 8, ", 1, 1"), ("e4m3", 32, ", 1, 1")],
)
def test_rounding_is_that_of_an_h200(kind: str, k: int, tail: str, tag: str) -> None:
    a, b, d = (NUMERICS[f"{kind}.{tag}.{name}"][0] for name in "abd")
    image = np.concatenate([packed(a), packed(b)])
    raw = np.array([[unswizzled(0), unswizzled(packed(a).size)]], np.uint64)
    n = b.shape[0]
    thread, register = np.arange(128)[:, None], np.arange(n // 2)[None, :]
    rows = 16 * (thread // 32) + thread % 32 // 4 + 8 * (register // 2 % 2)
    columns = 8 * (register // 4) + 2 * (thread % 4) + register % 2
    cin = NUMERICS[f"{kind}.add.c"][0].view(np.uint32)[rows, columns][None] if tag == "add" else None
    mma = spelled(f"m64n{n}k{k}", f"f32.{kind}.{kind}", n // 2, ("%on" if tag == "add" else "0") + tail)
    found = run(mma, image, raw, n // 2, cin=cin)
    wrong = int((found[0] != d.view(np.uint32)[rows, columns]).sum())
    assert wrong == 0, f"{kind}, {tag}: {wrong} accumulators are not an H200's bits"


def test_negated_operands() -> None:
    plain, one, both = (
        f16_case(ALL, mma=spelled("m64n64k16", "f32.f16.f16", 32, f"0, {scales}, 0, 0")).view(np.float32)
        for scales in ("1, 1", "-1, 1", "-1, -1")
    )  # fmt: skip
    assert np.array_equal(one, -plain), "imm-scale-a = -1 must negate the products"
    assert np.array_equal(both, plain), "two negations must cancel"


MMA = spelled("m64n64k16", "f32.f16.f16", 32, "%on, 1, 1, 0, 0")
FRESH = spelled("m64n64k16", "f32.f16.f16", 32, "0, 1, 1, 0, 0")
FENCE, COMMIT = "wgmma.fence.sync.aligned;", "wgmma.commit_group.sync.aligned;"
WAIT = "wgmma.wait_group.sync.aligned"


def f16_case(body: str, schedule: str = "eager", mma: str = FRESH) -> npt.NDArray[np.uint32]:
    return run(mma, GOLDEN["img_f16"], GOLDEN["wf16_00_desc"][:1], 32, body=body, schedule=schedule)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("rule", "body"),
    [
        ("register-in-flight", f"{FENCE} MMA {COMMIT}"),
        ("register-in-flight", f"{FENCE} MMA {WAIT} 0;"),
        ("register-in-flight", f"{FENCE} MMA {COMMIT} {WAIT} 1;"),
        ("register-in-flight", f"{FENCE} MMA {COMMIT} mov.b32 %d3, 0; {WAIT} 0;"),
        ("missing-wgmma-fence", f"MMA {COMMIT} {WAIT} 0;"),
        ("missing-wgmma-fence", f"{FENCE} MMA {COMMIT} {WAIT} 0; mul.f32 %d0, %d0, %d0; {MMA} {COMMIT} {WAIT} 0;"),
        ("exit-with-pending-operation", f"{FENCE} MMA {COMMIT} {WAIT} 0; {FENCE} MMA {COMMIT} ret;"),
        ("missing-proxy-fence", f"@%one st.shared.b32 [%x+0x10000], %tx; bar.sync 0; {FENCE} LOW {COMMIT} {WAIT} 0;"),
        ("race", f"@%one st.shared.b32 [%x+0x10000], %tx; fence.proxy.async; {FENCE} LOW {COMMIT} {WAIT} 0;"),
        ("race", f"{FENCE} LOW {COMMIT} @%one st.shared.b32 [%x+0x10000], %tx; {WAIT} 0;"),
    ],
)  # fmt: skip
def test_a_forgotten_wait_or_fence_is_found(rule: str, body: str, schedule: str) -> None:
    low = f"mov.b64 %db, {unswizzled(0x10000)}; {FRESH}"
    with pytest.raises(Fault) as caught:
        f16_case(body.replace("LOW", low), schedule)
    assert caught.value.rule == rule, f"found {caught.value} where the broken rule is {rule}"


@pytest.mark.parametrize(
    "body",
    [
        f"{FENCE} MMA {COMMIT} xor.b32 %index, %index, 3; mov.b32 %d3, 0; xor.b32 %index, %index, 3; {WAIT} 0;",
        f"{FENCE} MMA {COMMIT} {WAIT} 0; xor.b32 %x, %x, 4; mul.f32 %d0, %d0, %d0; {MMA} {COMMIT} {WAIT} 0;",
    ],
    ids=["a register in flight", "no fence"],
)
def test_machine_code_of_what_touches_registers_of_wgmma_finds_the_same(
    monkeypatch: pytest.MonkeyPatch, body: str
) -> None:
    """Same message and line, whether or not the surrounding instructions are machine code."""
    said: list[tuple[str, int]] = []
    # Changed text, because bound code is cached by text.
    for often, text in ((1 << 40, body), (1, f"{body} // again")):
        monkeypatch.setattr(code, "OFTEN", often)
        monkeypatch.setattr(lanes, "WORTH", 0)
        with pytest.raises(Fault) as caught:
            f16_case(text)
        said.append((str(caught.value), caught.value.line))
    assert said[0] == said[1], f"with machine code: {said[1]}; without: {said[0]}"


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_enough_waits_and_fences_are_accepted(schedule: str) -> None:
    clean = f"""{FENCE} MMA {COMMIT} {WAIT} 0; bar.sync 0; @%one st.shared.b32 [%x+0x10000], %tx; fence.proxy.async;
        bar.sync 0; {FENCE} mov.b64 %db, {unswizzled(0x10000)}; {FRESH} {COMMIT} {MMA} {COMMIT} {WAIT} 1; {WAIT} 0;"""
    f16_case(clean, schedule)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_wait_covers_the_reads_of_the_other_warps_of_the_group(schedule: str) -> None:
    """All four warps read B; warp 3 overwrites it after its own wait for the group, without a barrier."""
    low = f"mov.b64 %db, {unswizzled(0x10000)}; {FRESH}"
    over = f"{WAIT} 0; setp.eq.s32 %one, %tx, 96; @%one st.shared.b32 [%x+0x10000], %tx;"
    f16_case(f"{FENCE} {low} {COMMIT} {over}", schedule)


def test_all_four_warps_must_issue_the_same() -> None:
    odd = f".reg .pred %w; setp.lt.s32 %w, %tx, 32; {FENCE} @%w add.s64 %db, %db, 8; MMA {COMMIT} {WAIT} 0;"
    with pytest.raises(Fault, match="all four must execute the same") as caught:
        f16_case(odd)
    assert caught.value.rule == "warpgroup-diverged"


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_warp_that_stays_away_is_a_deadlock_that_names_it(schedule: str) -> None:
    away = f".reg .pred %w; setp.lt.s32 %w, %tx, 96; {FENCE} @!%w bra OUT; MMA {COMMIT} {WAIT} 0; OUT: bar.sync 0;"
    with pytest.raises(Fault, match=r"warps \[3\] of its warpgroup") as caught:
        f16_case(away + "ret;", schedule)
    assert caught.value.rule == "deadlock"


@pytest.mark.parametrize(
    "tail", ["0, 1, 1, 0", "0, 2, 1, 0, 0", "0, 1, 1, 0, 3"], ids=["too few", "scale 2", "transpose 3"]
)
def test_wrong_immediates_are_refused(tail: str) -> None:
    with pytest.raises(UnknownInstructionError, match="immediates"):
        f16_case(ALL, mma=spelled("m64n64k16", "f32.f16.f16", 32, tail))


def test_integer_sums_wrap_or_are_clamped() -> None:
    """The addend is 127 * 127 * 32, on top of 2^31 - 1."""
    image = np.full(64 * 32 + 8 * 32, 127, np.uint8)
    raw = np.array([[unswizzled(0), unswizzled(64 * 32)]], np.uint64)
    cin = np.full((1, 128, 4), 2**31 - 1, np.uint32)
    wrapped, clamped = (
        run(spelled(f"m64n8k32{word}", "s32.s8.s8", 4, "%on"), image, raw, 4, cin=cin)
        for word in ("", ".satfinite")
    )  # fmt: skip
    assert np.all(wrapped == (2**31 - 1 + 127 * 127 * 32) % 2**32), "without .satfinite the sum wraps"
    assert np.all(clamped == 2**31 - 1), "with .satfinite the sum is clamped"


SPARSE = {"f16": (np.float16, "f32"), "bf16": (ml_dtypes.bfloat16, "f32"), "tf32": (np.float32, "f32"),
          "e4m3": (ml_dtypes.float8_e4m3fn, "f32"), "s8": (np.int8, "s32")}  # fmt: skip
Dense = Callable[[npt.NDArray[Any]], npt.NDArray[Any]]


def drawn_metadata(rows: int, k: int, size: int, draw: np.random.Generator) -> tuple[npt.NDArray[np.uint32], Dense]:
    """The metadata of each thread, and a function from stored elements [rows, k / 2] to A [rows, k]."""
    chunk = 2 if size == 4 else 4
    codes = draw.choice([4, 14] if chunk == 2 else [4, 8, 12, 9, 13, 14, 6], (rows, k // chunk))
    words = np.zeros((128, 4), np.uint64)
    for row, c in np.ndindex(*codes.shape):
        thread = 32 * (row // 16) + 4 * (row % 8)
        if size > 1:
            thread, place = thread + c // 4, 4 * (c % 4) + 16 * (row % 16 // 8)
        else:
            thread, place = thread + row % 16 // 8 + 2 * (c // 8), 4 * (c % 8)
        words[thread, 0] |= np.uint64(int(codes[row, c]) << place)

    def dense(stored: npt.NDArray[Any]) -> npt.NDArray[Any]:
        a = np.zeros((rows, k), stored.dtype)
        for row, c in np.ndindex(*codes.shape):
            code = int(codes[row, c])
            places = [int(code == 14)] if chunk == 2 else [code & 3, code >> 2]
            a[row, [chunk * c + at for at in places]] = stored[row, chunk // 2 * c : chunk // 2 * (c + 1)]
        return a

    return words.astype(np.uint32), dense


def sparse_product(
    kind: str,
    stored: npt.NDArray[np.generic],
    b: npt.NDArray[np.generic],
    metadata: npt.NDArray[np.uint32],
    accumulate: str,
    *,
    from_registers: bool = False,
) -> npt.NDArray[np.uint32]:
    """The words of D [64, 64]."""
    dtype, d_type = SPARSE[kind]
    size = np.dtype(dtype).itemsize
    images = [core_matrices(np.ascontiguousarray(one).view(np.uint8).reshape(len(one), -1)) for one in (stored, b)]
    places = np.cumsum([0, images[0].size])
    raw = [
        (BASE + at) >> 4 | (128 >> 4) << 16 | (8 * width >> 4) << 32 for at, width in zip(places, (32, 64), strict=True)
    ]
    fragment = wgmma_operand_a(8 * size)
    areg = np.ascontiguousarray(to_registers(stored.view(f"u{size}"), fragment).T)[None] if from_registers else None
    tail = "0" if kind == "s8" else "0, 1, 1"
    if size == 2:
        tail += ", 0" if from_registers else ", 0, 0"
    shape, left = f"m64n64k{64 // size}", vector("a", 4) if from_registers else "%da"
    mma = (f"wgmma.mma_async.sp.sync.aligned.{shape}.{d_type}.{kind}.{kind} {vector('d', 32)}, {left}, %db, %d63, 0, "
           f"{tail};")  # fmt: skip
    body = "mul.wide.u32 %mine, %tx, 16; add.s64 %p, %meta, %mine; ld.global.b32 %d63, [%p];" + ALL
    found = run(mma, np.concatenate(images), np.array([raw], np.uint64), 32, areg=areg, body=body,
                more={"meta": metadata}, accumulate=accumulate)  # fmt: skip
    return to_matrix(np.ascontiguousarray(found[0].T), wgmma_accumulator(64))


@pytest.mark.parametrize("kind", SPARSE)
@pytest.mark.parametrize("from_registers", [False, True], ids=["smem", "registers"])
def test_sparse_products_of_a_warpgroup(kind: str, from_registers: bool) -> None:
    """CUTLASS's metadata layouts (ELayout_64x16, 64x32, 64x64): each warp has the metadata of its 16 rows."""
    dtype, _ = SPARSE[kind]
    size = np.dtype(dtype).itemsize
    k, draw = 64 // size, np.random.default_rng(size)
    stored, b = (draw.integers(-2, 3, (64, columns)).astype(dtype) for columns in (k // 2, k))
    metadata, dense = drawn_metadata(64, k, size, draw)
    found = sparse_product(kind, stored, b, metadata, "exact", from_registers=from_registers)
    values = found.view(np.int32 if kind == "s8" else np.float32)
    assert np.array_equal(values, dense(stored.astype(np.float64)) @ b.astype(np.float64).T)


def test_sparse_products_in_the_ring_know_no_infinities() -> None:
    """Words of B that would be infinities or NaN are ordinary elements."""
    draw = np.random.default_rng(7)
    stored, b = (draw.integers(0, 1 << 16, (64, columns), np.uint16) for columns in (16, 32))
    b[::3, :4] = [0x7F80, 0xFF80, 0x7FC1, 0xFF81]
    metadata, dense = drawn_metadata(64, 32, 2, draw)
    found = sparse_product("bf16", stored, b, metadata, "ring")
    of_a, of_b = (ring.elements_of(ring.widened(one)).astype(np.int64) for one in (stored, b))
    assert np.array_equal(ring.elements_of(found.view(np.float32)), dense(of_a) @ of_b.T % ring.SIZE)

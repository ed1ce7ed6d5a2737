"""tcgen05.mma as an instruction: operands laid out by the formulas of facts.md 2.2, 2.3, 3.1, against plain products.

All values are small integers, so every order of summation gives the same float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
import pytest

from conformance.vm.kernel import (
    EVERY_SCHEDULE,
    FENCE,
    Array,
    Kernel,
    assert_blamed,
    assert_clean,
    init,
    tmem_alloc,
    wait,
)
from conformance.vm.tensor_kernel import CELLS, COMMIT, EXPECTED, LOAD, MMA, STORE, mma_kernel, tmem_kernel
from megamoe.contract import Row
from megamoe.explain.explain import explain
from megamoe.explain.tmem import tmem_map
from megamoe.spec.load import load_specs

SCHEDULES = ("eager", "lazy", "random:1")
IMAGE = 36864
SPAN = {"none": 16, "32B": 32, "64B": 64, "128B": 128}
CODE = {"none": 0, "128B": 2, "64B": 4, "32B": 6}
KINDS: dict[str, tuple[str, type, int]] = {
    "f16": ("f16", np.float16, 0),
    "bf16": ("f16", ml_dtypes.bfloat16, 1),
    "tf32": ("tf32", np.float32, 2),
    "e4m3": ("f8f6f4", ml_dtypes.float8_e4m3fn, 0),
    "e5m2": ("f8f6f4", ml_dtypes.float8_e5m2, 1),
}


@dataclass(frozen=True)
class Layout:
    """The layout of an operand [M or N, K] in shared memory; sbo and lbo in bytes."""

    major: str
    swizzle: str
    sbo: int
    lbo: int

    def offset(self, r: int, k: int, size: int) -> int:
        """Linear byte offset of element (r, k), before the swizzle: the table of facts.md 3.1."""
        t, w = 16 // size, SPAN[self.swizzle]
        if self.major == "k" and self.swizzle == "none":
            return r % 8 * 16 + r // 8 * self.sbo + k // t * self.lbo + k % t * size
        if self.major == "k":
            return r % 8 * w + r // 8 * self.sbo + k * size
        if self.swizzle == "none":
            return r % t * size + r // t * self.sbo + k % 8 * 16 + k // 8 * self.lbo
        return r % t * size + r % (w // size) // t * 16 + r // (w // size) * self.lbo + k % 8 * w + k // 8 * self.sbo

    def image(self, values: Array, start: int) -> Array:
        """IMAGE bytes of shared memory, 1024-aligned, with the operand `start` bytes into it."""
        out, size = np.zeros(IMAGE, np.uint8), values.itemsize
        mask = {"none": 0, "32B": 1, "64B": 3, "128B": 7}[self.swizzle]
        raw = values.view(np.uint8).reshape(*values.shape, size)
        for r in range(values.shape[0]):
            for k in range(values.shape[1]):
                address = start + self.offset(r, k, size)
                address ^= (address >> 7 & mask) << 4
                out[address : address + size] = raw[r, k]
        return out

    @property
    def descriptor(self) -> int:
        """The descriptor without its start address."""
        return CODE[self.swizzle] << 61 | 1 << 46 | (self.sbo >> 4) << 32 | (self.lbo >> 4) << 16


def k_major(rows: int, swizzle: str) -> Layout:
    return Layout("k", swizzle, 128, rows * 16) if swizzle == "none" else Layout("k", swizzle, 8 * SPAN[swizzle], 16)


def mn_major(rows: int, swizzle: str) -> Layout:
    if swizzle == "none":
        return Layout("mn", swizzle, 256, 128)
    return Layout("mn", swizzle, 8 * SPAN[swizzle], 2 * 8 * SPAN[swizzle])


def integers(shape: tuple[int, int], dtype: type, seed: int) -> Array:
    return np.random.default_rng(seed).integers(-3, 4, shape).astype(dtype)


def idesc(kind: str, m: int, n: int, *, d_f32: bool = True, extra: int = 0) -> int:
    code = KINDS[kind][2]
    return int(d_f32) << 4 | code << 7 | code << 10 | (n >> 3) << 17 | (m >> 4) << 24 | extra


@dataclass(frozen=True)
class Product:
    """One tcgen05.mma with its operands: `a` [m, k] and `b` [n, k], their layouts and first bytes."""

    kind: str
    a: Array
    b: Array
    a_layout: Layout
    b_layout: Layout
    descriptor: int
    a_start: int = 0
    b_start: int = 0
    accumulate: bool = False
    tail: str = ""
    disabled: str = ""
    from_tmem: bool = False
    d: str = "%r40"

    def kernel(self) -> Kernel:
        """Copies the operands from global into shared (or tensor) memory, runs the mma, and dumps tensor memory."""
        x = np.concatenate([self.a_layout.image(self.a, self.a_start), self.b_layout.image(self.b, self.b_start)])
        action = f"""mov.u32 %r1, image;
        shl.b32 %r2, %tx, 4; add.u32 %r3, %r1, %r2; cvt.u64.u32 %rd1, %r2; add.u64 %rd1, %rd1, %x;
        mov.u32 %r4, 0;
        COPYING: ld.global.v4.b32 {{%r5, %r6, %r7, %r8}}, [%rd1]; st.shared.v4.b32 [%r3], {{%r5, %r6, %r7, %r8}};
        add.u64 %rd1, %rd1, 2048; add.u32 %r3, %r3, 2048; add.u32 %r4, %r4, 1;
        setp.lt.u32 %p1, %r4, {2 * IMAGE // 2048};
        @%p1 bra COPYING;
        {self.store_a() if self.from_tmem else ""}
        {FENCE}
        {init("mbar")}
        add.u32 %r9, %r1, {self.a_start}; shr.u32 %r9, %r9, 4; cvt.u64.u32 %rd10, %r9;
        or.b64 %rd10, %rd10, {self.a_layout.descriptor};
        add.u32 %r9, %r1, {IMAGE + self.b_start}; shr.u32 %r9, %r9, 4; cvt.u64.u32 %rd11, %r9;
        or.b64 %rd11, %rd11, {self.b_layout.descriptor};
        mov.b32 %r10, {self.descriptor}; setp.eq.u32 %p2, 0, {int(not self.accumulate)};
        @!%p13 bra ISSUED;
        tcgen05.mma.cta_group::1.kind::{KINDS[self.kind][0]} [{self.d}],
            {"[%r40+256]" if self.from_tmem else "%rd10"}, %rd11, %r10{self.disabled}, %p2{self.tail};
        tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [mbar];
        ISSUED: {wait("mbar", 0)}"""
        declare = f".shared .align 1024 .b8 image[{2 * IMAGE}]; .shared .align 8 .b64 mbar;"
        return tmem_kernel(action, {"x": x, "words": self.a_words()}, declare)

    def a_words(self) -> Array:
        """Operand A as 32-bit words along k, each row in its lane: uint32 [128, 8]."""
        rows = np.zeros((128, 8), np.uint32)
        if self.from_tmem:
            rows[[lane_of(row, self.a.shape[0]) for row in range(self.a.shape[0])]] = np.ascontiguousarray(self.a).view(
                np.uint32
            )
        return rows

    def store_a(self) -> str:
        """Stores word row t in lane t, columns 256 and up."""
        names = "{" + ", ".join(f"%r{index}" for index in range(20, 28)) + "}"
        return f"""mul.wide.u32 %rd2, %tx, 32; add.u64 %rd2, %rd2, %words; ld.global.v8.b32 {names}, [%rd2];
        tcgen05.st.sync.aligned.32x32b.x8.b32 [%r44+256], {names}; tcgen05.wait::st.sync.aligned;"""

    def expected(
        self,
        change: Callable[[Array], Array] = lambda product: product,
        *,
        lane_shift: int = 0,
        kept: tuple[int, ...] = (),
        half: bool = False,
    ) -> Array:
        """Tensor memory afterwards: D as float32 (or float16 in the low half), everything else unchanged."""
        cells = CELLS.copy()
        if self.from_tmem:
            cells[:, 256:264] = self.a_words()
        product = change(self.a.astype(np.float64) @ self.b.astype(np.float64).T)
        m = self.a.shape[0]
        for row in range(m):
            lane = lane_of(row, m) + lane_shift
            if lane not in kept:
                words = (
                    product[row].astype(np.float16).view(np.uint16)
                    if half
                    else product[row].astype(np.float32).view(np.uint32)
                )
                cells[lane, : product.shape[1]] = words
        return cells


def lane_of(row: int, m: int) -> int:
    """Layouts D and F: M = 128 uses the lanes in order, M = 64 the first 16 of each 32."""
    return row if m == 128 else row % 16 + 32 * (row // 16)


def product(
    kind: str,
    m: int,
    n: int,
    a_major: str = "k",
    b_major: str = "k",
    a_swizzle: str = "none",
    b_swizzle: str = "none",
    extra: int = 0,
    d_f32: bool = True,
    **options: object,
) -> Product:
    dtype = KINDS[kind][1]
    k = 32 // np.dtype(dtype).itemsize
    a, b = integers((m, k), dtype, m + n), integers((n, k), dtype, m + n + 1)
    layouts = [
        (k_major if major == "k" else mn_major)(rows, swizzle)
        for major, rows, swizzle in ((a_major, m, a_swizzle), (b_major, n, b_swizzle))
    ]
    transposes = int(a_major == "mn") << 15 | int(b_major == "mn") << 16
    descriptor = idesc(kind, m, n, d_f32=d_f32, extra=extra | transposes)
    return Product(kind, a, b, *layouts, descriptor, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("n", [8, 16, 24, 64, 128, 256])
@pytest.mark.parametrize("m", [64, 128])
def test_every_shape(m: int, n: int) -> None:
    item = product("f16", m, n)
    assert_clean(item.kernel(), {"cells": item.expected()}, SCHEDULES)


@pytest.mark.parametrize("swizzle", ["none", "32B", "64B", "128B"])
@pytest.mark.parametrize("major", ["k", "mn"])
@pytest.mark.parametrize("operand", ["a", "b"])
def test_every_layout_of_either_operand(operand: str, major: str, swizzle: str) -> None:
    a_major, b_major = (major, "k") if operand == "a" else ("k", major)
    a_swizzle, b_swizzle = (swizzle, "none") if operand == "a" else ("none", swizzle)
    item = product("bf16", 64, 64, a_major, b_major, a_swizzle, b_swizzle)
    assert_clean(item.kernel(), {"cells": item.expected()}, SCHEDULES)


@pytest.mark.parametrize("advance", [32, 64, 96])
def test_an_operand_that_begins_inside_a_swizzle_atom(advance: int) -> None:
    """K advances by adding to the start address; the swizzle acts on the absolute address (facts.md 3.1)."""
    item = product("f16", 64, 16, a_swizzle="128B", b_swizzle="128B", a_start=advance, b_start=advance)
    assert_clean(item.kernel(), {"cells": item.expected()}, SCHEDULES)


@pytest.mark.parametrize("kind", list(KINDS))
def test_every_type(kind: str) -> None:
    item = product(kind, 128, 16)
    assert_clean(item.kernel(), {"cells": item.expected()}, SCHEDULES)


@pytest.mark.parametrize("kind", ["f16", "tf32", "e4m3"])
@pytest.mark.parametrize("m", [64, 128])
def test_operand_a_from_tensor_memory(kind: str, m: int) -> None:
    item = product(kind, m, 32, from_tmem=True)
    assert_clean(item.kernel(), {"cells": item.expected()}, SCHEDULES)


def test_an_f16_accumulator_lies_in_the_low_half() -> None:
    item = product("f16", 128, 16, d_f32=False)
    assert_clean(item.kernel(), {"cells": item.expected(half=True)}, SCHEDULES)


@pytest.mark.parametrize(("extra", "sign"), [(1 << 13, -1), (1 << 14, -1), (3 << 13, 1)])
def test_negated_operands(extra: int, sign: int) -> None:
    item = product("f16", 128, 16, extra=extra)
    assert_clean(item.kernel(), {"cells": item.expected(lambda d: sign * d + 0.0)}, SCHEDULES)


def before(m: int, n: int) -> Array:
    rows = [lane_of(row, m) for row in range(m)]
    return np.ascontiguousarray(CELLS[rows, :n]).view(np.float32).astype(np.float64)


@pytest.mark.parametrize(("tail", "factor"), [("", 1.0), (", 0", 1.0), (", 3", 2.0**-3), (", 15", 2.0**-15)])
def test_accumulation_and_its_scale(tail: str, factor: float) -> None:
    """D = A B^T + D 2^-s. The previous D is denormal and a nonzero product would hide it, so A is zero."""
    item = product("f16", 128, 16, accumulate=True, tail=tail)
    zeroed = Product(**{**vars_of(item), "a": np.zeros_like(item.a)})
    expected = zeroed.expected(lambda d: d + np.float32(before(128, 16) * factor).astype(np.float64))
    assert_clean(zeroed.kernel(), {"cells": expected}, SCHEDULES)


def vars_of(item: Product) -> dict[str, object]:
    return {name: getattr(item, name) for name in Product.__dataclass_fields__}


def test_disabled_lanes_keep_their_values() -> None:
    """Bit i of element j is lane 32 j + i (PTX ISA 9.7.16.10.9.1)."""
    lanes = (0, 31, 32, 70, 127)
    words = [sum(1 << lane % 32 for lane in lanes if lane // 32 == word) for word in range(4)]
    masks = "mov.b32 %r30, {}; mov.b32 %r31, {}; mov.b32 %r32, {}; mov.b32 %r33, {};".format(*words)
    for m in (64, 128):
        item = product("f16", m, 16, disabled=", {%r30, %r31, %r32, %r33}")
        kernel = item.kernel()
        body = kernel.body.replace("mov.b32 %r10", f"{masks} mov.b32 %r10")
        kernel = Kernel(body, kernel.buffers, block=kernel.block, inputs=kernel.inputs)
        assert_clean(kernel, {"cells": item.expected(kept=lanes)}, SCHEDULES)


def test_an_accumulator_of_64_rows_in_the_upper_half_lanes() -> None:
    item = product("f16", 64, 16, d="%r40+0x100000")
    assert_clean(item.kernel(), {"cells": item.expected(lane_shift=16)}, SCHEDULES)


def test_tf32_transposes_only_in_the_layout_of_32_byte_atoms() -> None:
    item = product("tf32", 128, 16, b_major="mn", b_swizzle="128B")
    kernel = item.kernel()
    lines = [f"{line} //!" if "tcgen05.mma" in line else line for line in kernel.body.splitlines()]
    kernel = Kernel("\n".join(lines), kernel.buffers, block=kernel.block)
    assert_blamed(kernel, "instruction-descriptor", "operand B of kind::tf32 is transposed", "32-byte atoms")


# A tcgen05.cp into an operand of an earlier mma: the ISA does not order the two, but the machine does, and counts it.


COPY = "tcgen05.cp.cta_group::1.128x256b [%r47], %rd10;"
"""Copies all of A to tensor memory."""
FROM_TMEM = MMA.replace("%rd10", "[%r47]")
SIGNAL = COMMIT.replace("[mbar]", "[other]")
BETWEEN = {
    "nothing": ("", True),
    "a commit without a wait": (SIGNAL, True),
    "a commit and its wait": (f"{SIGNAL}\n{wait('other', 0)}", False),
    "a wait for a commit before the mma": ("", True),
}


@pytest.mark.parametrize("name", BETWEEN)
def test_a_copy_over_an_operand_of_an_mma(name: str) -> None:
    between, counted = BETWEEN[name]
    first = f"{COPY}\n{SIGNAL}\n{wait('other', 0)}" if "before" in name else COPY
    stages = {
        "setup": f"{init('mbar', 'other')}\n{tmem_alloc(32)}\nadd.u32 %r47, %r40, 16;",
        "issue": f"{first}\n{FROM_TMEM}\n{between}\n{COPY}\n{FROM_TMEM}\n{COMMIT}",
    }
    for schedule in EVERY_SCHEDULE:
        data, counters = mma_kernel(stages).run(schedule)
        assert np.array_equal(data["out"], EXPECTED), f"{schedule}: both products must give 16 everywhere"
        copies = counters.get("tmem_unordered_copies", 0)
        assert copies == int(counted), (
            f"{schedule}, {name}: {copies} copies counted as unordered after an mma, not {int(counted)}"
        )


def test_a_copy_to_columns_that_no_mma_reads_is_not_counted() -> None:
    setup = f"{init('mbar')}\n{tmem_alloc(32)}\nadd.u32 %r47, %r40, 16; add.u32 %r39, %r40, 24;"
    issue = f"{COPY}\n{FROM_TMEM}\n{COPY.replace('%r47', '%r39')}\n{COMMIT}"
    for schedule in EVERY_SCHEDULE:
        data, counters = mma_kernel({"setup": setup, "issue": issue}).run(schedule)
        assert np.array_equal(data["out"], EXPECTED), f"{schedule}: the product must give 16 everywhere"
        assert "tmem_unordered_copies" not in counters, (
            f"{schedule}: no mma reads the columns of the second copy, yet it is counted"
        )


# Wrong explanations in a kernel author's notes: docs/notes has each one with a program.


K, B_VALUE = 16, 2.0


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize(("a_row", "seen"), [([1.0] * K, 32.0), ([1.0, 0.0] * (K // 2), 16.0)])
def test_no_mma_scales_by_a_half(kind: str, a_row: list[float], seen: float) -> None:
    """Ones times twos over K = 16: 32.0 with two ones per column; the notes' 16.0 comes from one and an empty half."""
    dtype = KINDS[kind][1]
    a, b = np.array([a_row] * 128).astype(dtype), np.full((16, K), B_VALUE).astype(dtype)
    item = replace(product(kind, 128, 16, from_tmem=True), a=a, b=b)
    cells = item.expected()
    assert (cells[:, :16].view(np.float32) == seen).all(), "the example is not that of the notes"
    assert_clean(item.kernel(), {"cells": cells}, SCHEDULES)


@pytest.mark.parametrize("hd", [128, 256, 512])
def test_p_takes_the_place_of_s(hd: int) -> None:
    """The raw-PTX attention keeps P in tensor memory for every hd, in columns of the S that it came from."""
    row = Row(f"fmha:hd={hd},t=4,s_k=256", "ptx", "sm_100a", "vm", "eager")
    found = explain(load_specs(None)["fmha"], row)
    assert found.violation is None
    map_ = tmem_map(found.trace.launches[0].ctas[0], found.trace.steps)
    assert map_ is not None
    columns = {name: [one.columns for one in map_.holdings if one.name == name] for name in ("S", "P")}
    assert columns["P"], "there is no P in tensor memory"
    assert all(any(s[0] <= p[0] and p[1] <= s[1] for s in columns["S"]) for p in columns["P"])


BEYOND = {
    "a copy to columns behind the last": (f"mov.b32 %r47, 508;\n{COPY} //!", "columns 508..515"),
    "a copy to columns that no address has": (f"mov.b32 %r47, 0xfffc;\n{COPY} //!", "columns 65532..65539"),
    "a copy to lanes behind the last": (f"mov.b32 %r47, 0x00100000;\n{COPY} //!", "lanes 16..143"),
    "a copy to lanes that no address has": (f"mov.b32 %r47, 0x80000000;\n{COPY} //!", "lanes 32768..32895"),
    "operand A behind the last lane": (f"mov.b32 %r47, 0x00800000;\n{FROM_TMEM} //!", "lanes 128..255"),
    "an accumulator behind the last column": (MMA.replace("%r40", "%r47") + " //!", "columns 500..515"),
}


@pytest.mark.parametrize("name", BEYOND)
def test_tensor_memory_ends_somewhere(name: str) -> None:
    issue, said = BEYOND[name]
    before = "mov.b32 %r47, 500;"
    kernel = mma_kernel({"issue": f"{before}\n{issue}\n{COMMIT}"})
    assert_blamed(kernel, "tmem-out-of-bounds", said, "128 x 512")


@pytest.mark.parametrize("bits", [0x00800000, 0x01000000, 0x80000000])
def test_lanes_behind_the_last(bits: int) -> None:
    """An address holds the lane in bits 31..16 (facts.md 1)."""
    beyond = f"or.b32 %r44, %r44, {bits};"
    wait_for = "tcgen05.wait::ld.sync.aligned;"
    said = "of a tensor memory of 128 x 512"
    assert_blamed(mma_kernel({"read": f"{beyond}\n{LOAD} //!\n{wait_for}"}), "tmem-out-of-bounds", said)
    assert_blamed(mma_kernel({"read": f"{LOAD}\n{wait_for}\n{beyond}\n{STORE} //!"}), "tmem-out-of-bounds", said)
    issue = f"or.b32 %r47, %r40, {bits};\n{MMA.replace('%r40', '%r47')} //!\n{COMMIT}"
    assert_blamed(mma_kernel({"issue": issue}), "tmem-lane", f"lies at lane {bits >> 16}")


def test_a_load_from_columns_behind_the_last() -> None:
    registers = ",".join(f"%r{index}" for index in range(16))
    load = f"tcgen05.ld.sync.aligned.32x32b.x16.b32 {{{registers}}}, [%r44]; //!"
    kernel = mma_kernel(
        {"read": f"and.b32 %r44, %r44, 0xffff0000;\nadd.u32 %r44, %r44, 504;\n{load}\ntcgen05.wait::ld.sync.aligned;"}
    )
    assert_blamed(kernel, "tmem-out-of-bounds", "columns 504..519")

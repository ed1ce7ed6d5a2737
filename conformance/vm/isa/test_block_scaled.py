"""Block-scaled tcgen05.mma against the formula of the ISA: every kind, scale vector, scale factor id and type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from backends.vm.faults import Fault, UnknownInstructionError
from conformance.vm.tensor_kernel import SCHEDULES, Image, core_matrices, descriptor, run_tensor

Float = npt.NDArray[np.float64]
Bytes = npt.NDArray[np.uint8]

TYPES: dict[str, Any] = {
    "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "e2m3": ml_dtypes.float6_e2m3fn,
    "e3m2": ml_dtypes.float6_e3m2fn, "e2m1": ml_dtypes.float4_e2m1fn, "ue8m0": ml_dtypes.float8_e8m0fnu,
    "ue4m3": ml_dtypes.float8_e4m3fn,
}  # fmt: skip
CODE = {"e4m3": 0, "e5m2": 1, "e2m3": 3, "e3m2": 4, "e2m1": 5}
SFA_COLUMN, SFB_COLUMN, A_COLUMN = 256, 264, 272


def numbers(codes: Bytes, kind: str) -> Float:
    return codes.view(TYPES[kind]).astype(np.float64)


@dataclass(frozen=True)
class Case:
    """One instruction: its kind and scale vector as spelt, N, types, and the scale factor ids."""

    kind: str
    size: str
    n: int
    a: str
    b: str
    sf: str
    blocks: int
    ids: tuple[int, int] = (0, 0)

    @property
    def k(self) -> int:
        return 32 if self.kind == "mxf8f6f4" else 64

    def idesc(self, m: int = 128) -> int:
        types = CODE[self.a] << 7 | CODE[self.b] << 10 if self.k == 32 else 1 << 7 | 1 << 10
        ids = self.ids[1] << 4 | self.ids[0] << 29
        return types | ids | self.n >> 3 << 17 | (self.sf == "ue8m0") << 23 | m >> 7 << 27

    def mma(self, group: int = 1, m: int = 128, *, a: str = "A", enable: str = "%no", at: str = "%tm") -> str:
        size = f".{self.size}" if self.size else ""
        return (f"tcgen05.mma.cta_group::{group}.kind::{self.kind}.block_scale{size} [{at}], {a}, B, "
                f"{self.idesc(m)}, [%tm+{SFA_COLUMN}], [%tm+{SFB_COLUMN}], {enable};")  # fmt: skip


CASES = [
    Case("mxf4nvf4", "block16", 64, "e2m1", "e2m1", "ue4m3", 4),
    Case("mxf4nvf4", "scale_vec::4X", 8, "e2m1", "e2m1", "ue4m3", 4),
    Case("mxf4nvf4", "block16", 256, "e2m1", "e2m1", "ue8m0", 4),
    Case("mxf4nvf4", "block32", 40, "e2m1", "e2m1", "ue8m0", 2, (2, 0)),
    Case("mxf4nvf4", "scale_vec::2X", 64, "e2m1", "e2m1", "ue8m0", 2, (0, 2)),
    Case("mxf4", "", 64, "e2m1", "e2m1", "ue8m0", 2),
    Case("mxf4", "block32", 96, "e2m1", "e2m1", "ue8m0", 2, (2, 2)),
    Case("mxf4", "scale_vec::2X", 96, "e2m1", "e2m1", "ue8m0", 2),
    Case("mxf8f6f4", "", 64, "e4m3", "e5m2", "ue8m0", 1, (1, 3)),
    Case("mxf8f6f4", "block32", 64, "e3m2", "e2m3", "ue8m0", 1, (2, 0)),
    Case("mxf8f6f4", "scale_vec::1X", 64, "e2m1", "e4m3", "ue8m0", 1, (3, 1)),
    Case("mxf8f6f4", "", 96, "e4m3", "e2m1", "ue8m0", 1, (0, 2)),
]


def random_codes(rng: np.random.Generator, shape: tuple[int, ...], kind: str) -> Bytes:
    if kind == "ue8m0":
        return rng.integers(121, 134, shape, np.uint8)
    if kind == "ue4m3":
        return rng.integers(1, 0x7F, shape, np.uint8)
    bits = {"e2m1": 4, "e2m3": 6, "e3m2": 6}.get(kind, 8)
    codes = rng.integers(0, 1 << bits, shape, np.uint8)
    return np.where(np.isfinite(numbers(codes, kind)), codes, 0).astype(np.uint8)


def in_smem(codes: Bytes, kind: str, element: str) -> Bytes:
    """Rows as the MMA reads them: nibbles packed for 4-bit kinds, else 16 elements in 16 bytes, with noise."""
    if kind != "mxf8f6f4":
        return (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8)
    bits = {"e2m1": 4, "e2m3": 6, "e3m2": 6}.get(element, 8)
    single = np.unpackbits(codes.reshape(-1, 16, 1), axis=2, bitorder="little")[:, :, :bits]
    packed = np.packbits(single.reshape(-1, 16 * bits), axis=1, bitorder="little")
    return np.pad(packed, ((0, 0), (0, 16 - packed.shape[1])), constant_values=0xA5).reshape(codes.shape)


def atom(codes: Bytes, sf_id: int, rng: np.random.Generator) -> list[Bytes]:
    """512-byte tables of up to 128 rows: byte 16 (row % 32) + 4 (row / 32) + sf; bytes of other ids are noise."""
    tables: list[Bytes] = []
    for first in range(0, len(codes), 128):
        table = rng.integers(0, 255, (32, 4, 4), np.uint8)
        for row in range(first, min(first + 128, len(codes))):
            table[row % 32, row % 128 // 32, sf_id : sf_id + codes.shape[1]] = codes[row]
        tables.append(table)
    return tables


def scaled_product(a: Float, sfa: Float, b: Float, sfb: Float) -> Float:
    """sum over j of SFA[m, j] SFB[n, j] sum over k in block j of A[m, k] B[n, k]."""
    blocks = sfa.shape[1]
    parts = zip(np.split(a, blocks, axis=1), np.split(b, blocks, axis=1), strict=True)
    return sum((np.outer(sfa[:, j], sfb[:, j]) * (x @ y.T) for j, (x, y) in enumerate(parts)), np.zeros(()))


@dataclass
class Operands:
    """Codes of A, B and their scale factors. `run` stores them and executes instructions on them."""

    case: Case
    a: Bytes
    b: Bytes
    sfa: Bytes
    sfb: Bytes

    @classmethod
    def random(cls, case: Case, seed: int = 0) -> Operands:
        rng = np.random.default_rng(seed)
        shapes = (
            ((128, case.k), case.a),
            ((case.n, case.k), case.b),
            ((128, case.blocks), case.sf),
            ((case.n, case.blocks), case.sf),
        )
        return cls(case, *(random_codes(rng, shape, kind) for shape, kind in shapes))

    def expected(self) -> Float:
        case = self.case
        return scaled_product(numbers(self.a, case.a), numbers(self.sfa, case.sf), numbers(self.b, case.b),
                              numbers(self.sfb, case.sf))  # fmt: skip

    def run(self, issue: str, **options: Any) -> Float:
        """D as float64 [128, n]. `issue` may use the descriptors A and B, and SCALES to copy the scale factors."""
        image, rng = Image(), np.random.default_rng(1)
        named = {
            " A,": f" {descriptor(image.add(core_matrices(in_smem(self.a, self.case.kind, self.case.a))))},",
            " B,": f" {descriptor(image.add(core_matrices(in_smem(self.b, self.case.kind, self.case.b))))},",
        }
        copies = [
            f"tcgen05.cp.cta_group::1.32x128b.warpx4 [%tm+{column + 4 * i}], {descriptor(image.add(table), 16)};"
            for codes, sf_id, column in (
                (self.sfa, self.case.ids[0], SFA_COLUMN),
                (self.sfb, self.case.ids[1], SFB_COLUMN),
            )
            for i, table in enumerate(atom(codes, sf_id, rng))
        ]
        for name, value in {**named, "SCALES": "\n".join(copies)}.items():
            issue = issue.replace(name, value)
        columns = -(-self.case.n // 32) * 32
        clear = "" if columns == self.case.n else _clearing(columns)
        changes = {"before": clear, **options.pop("changes", {})}
        out = run_tensor(issue, [image.data], columns, changes=changes, **options)
        return out[0, :, : self.case.n].view(np.float32).astype(np.float64)


def _clearing(columns: int) -> str:
    """Writes columns that the MMA does not touch, so that they may be read."""
    zeros = ", ".join(["%w0"] * 32)
    stores = [f"tcgen05.st.sync.aligned.32x32b.x32.b32 [%at+{c}], {{{zeros}}};" for c in range(0, columns, 32)]
    return ("mov.b32 %w0, 0; shl.b32 %at, %warp, 21; add.s32 %at, %at, %tm;" + "".join(stores)
            + "tcgen05.wait::st.sync.aligned; bar.sync 0;")  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.kind}-{c.size}-{c.n}-{c.sf}-{c.ids}")
def test_every_kind_computes_the_formula(case: Case) -> None:
    operands = Operands.random(case)
    found = operands.run("SCALES " + case.mma())
    assert np.array_equal(found, operands.expected().astype(np.float32)), f"{case}: another result than the formula's"


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_fast_is_within_rounding(schedule: str) -> None:
    case = CASES[0]
    operands = Operands.random(case, 1)
    found = operands.run("SCALES " + case.mma() + case.mma(enable="%yes"), schedule=schedule, accumulate="fast")
    a, b = (np.abs(numbers(codes, "e2m1")) for codes in (operands.a, operands.b))
    size = scaled_product(a, numbers(operands.sfa, "ue4m3"), b, numbers(operands.sfb, "ue4m3"))
    error = np.abs(found - 2 * operands.expected())
    assert np.all(error <= 64 * 2.0**-23 * 2 * size), "float32 accumulation is further off than its roundings"


def test_extreme_scale_factors_do_not_overflow_on_the_way() -> None:
    """2^127 on one side and 2^-127 on the other multiply to 1."""
    case = CASES[5]
    operands = Operands.random(case)
    operands.sfa[:], operands.sfb[:] = 254, 0
    found = operands.run("SCALES " + case.mma(), accumulate="fast")
    plain = numbers(operands.a, "e2m1") @ numbers(operands.b, "e2m1").T
    assert np.array_equal(found, plain), "2^127 2^-127 must leave the product as it is"


@pytest.mark.parametrize(
    ("case", "nan"), [(CASES[0], 0x7F), (CASES[5], 0xFF), (CASES[8], 0xFF)], ids=["ue4m3", "ue8m0", "1X"]
)
@pytest.mark.parametrize("accumulate", ["fast", "exact"])
def test_a_nan_scale_factor_makes_its_row_nan(case: Case, nan: int, accumulate: str) -> None:
    operands = Operands.random(case)
    operands.a[5], operands.sfa[5, case.blocks - 1] = 0, nan
    found = operands.run("SCALES " + case.mma(), accumulate=accumulate)
    assert np.all(np.isnan(found[5])), "NaN times 0 is NaN"
    assert not np.isnan(np.delete(found, 5, axis=0)).any(), "the other rows have no NaN"


def test_negated_operand() -> None:
    case = CASES[0]
    operands = Operands.random(case)
    found = operands.run("SCALES " + case.mma().replace(str(case.idesc()), str(case.idesc() | 1 << 13)))
    assert np.array_equal(found, -operands.expected().astype(np.float32)), "bit 13 negates A"


def test_a_from_tensor_memory() -> None:
    """Row m in lane m, 64 nibbles in 8 columns."""
    case = CASES[0]
    operands = Operands.random(case)
    copy = f"tcgen05.cp.cta_group::1.128x256b [%tm+{A_COLUMN}], {descriptor(0)};"
    found = operands.run(f"SCALES {copy} {case.mma(a=f'[%tm+{A_COLUMN}]')}")
    assert np.array_equal(found, operands.expected().astype(np.float32)), "A in tensor memory: another result"


def test_address_bits_that_repeat_the_id_are_ignored() -> None:
    case = CASES[3]
    operands = Operands.random(case)
    shifted = case.mma().replace(f"[%tm+{SFA_COLUMN}]", "[%x]")
    found = operands.run(
        "SCALES " + shifted, changes={"before": _clearing(64) + f"add.s32 %x, %tm, {0x80000000 + SFA_COLUMN};"}
    )
    assert np.array_equal(found, operands.expected().astype(np.float32)), "bits 31..30 of the address count for nothing"


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("rule", "issue"),
    [
        ("uninitialised-tmem", "MMA"),
        ("instruction-descriptor", "SCALES WRONG_ID"),
        ("tmem-lane", "SCALES LANE"),
        ("tmem-race", "SCALES MMA OTHER"),
    ],
)
def test_planted_faults(rule: str, issue: str, schedule: str) -> None:
    case = CASES[3]
    wrong = {
        "WRONG_ID": case.mma().replace(str(case.idesc()), str(case.idesc() | 1 << 29)),
        "LANE": case.mma().replace(f"%tm+{SFB_COLUMN}", f"%tm+{SFB_COLUMN + (32 << 16)}"),
        "OTHER": case.mma(at="%tm+8"),
        "MMA": case.mma(),
    }
    for name, text in wrong.items():
        issue = issue.replace(name, text)
    with pytest.raises(Fault) as caught:
        Operands.random(case).run(issue, schedule=schedule)
    assert caught.value.rule == rule, f"found {caught.value} where the broken rule is {rule}"


def test_a_kind_without_the_size_of_its_scale_vectors_is_refused() -> None:
    case = CASES[3]
    with pytest.raises(UnknownInstructionError, match="kind::mxf4nvf4 takes scale_vec::2X"):
        Operands.random(case).run("SCALES " + case.mma().replace(".block32", ""))


def test_in_the_ring_they_are_refused() -> None:
    with pytest.raises(UnknownInstructionError, match="a matrix product of e2m1 has no counterpart in the ring"):
        Operands.random(CASES[0]).run("SCALES " + CASES[0].mma(), accumulate="ring")


def test_replicas_that_differ_are_found() -> None:
    """The copy gives each of the 128 lanes its own row, but the four quarters need the same 32 rows."""
    case = CASES[0]
    spoilt = f"tcgen05.cp.cta_group::1.128x128b [%tm+{SFA_COLUMN}], {descriptor(0, 16)};"
    with pytest.raises(Fault, match="differ between quarters") as caught:
        Operands.random(case).run("SCALES " + spoilt + case.mma())
    assert caught.value.rule == "scale-factor-replicas"

"""Carries, video instructions and packed bytes against Python's integers. silicon/lanewise has an H200's bits."""

from __future__ import annotations

import numpy as np
import pytest

from conformance.vm.kernel import Kernel, run_ptx

GENERATOR = np.random.default_rng(7)
WORDS = {name: GENERATOR.integers(0, 2**32, 64, dtype=np.uint32) for name in "abcd"}
LONGS = {name: GENERATOR.integers(0, 2**64, 64, dtype=np.uint64) for name in "abcd"}


@pytest.mark.parametrize(("bits", "given"), [(32, WORDS), (64, LONGS)])
def test_two_words_are_multiplied_to_four(bits: int, given: dict[str, np.ndarray]) -> None:
    """The example of PTX ISA 9.7.2.6: [r3 r2 r1 r0] = [b a] * [d c]."""
    dtype = np.uint32 if bits == 32 else np.uint64
    body = """mul.lo.uN %r0, %a, %c; mul.hi.uN %r1, %a, %c;
mad.lo.cc.uN %r1, %b, %c, %r1; madc.hi.uN %r2, %b, %c, 0;
mad.lo.cc.uN %r1, %a, %d, %r1; madc.hi.cc.uN %r2, %a, %d, %r2; addc.uN %r3, 0, 0;
mad.lo.cc.uN %r2, %b, %d, %r2; madc.hi.uN %r3, %b, %d, %r3;""".replace("N", str(bits))
    found = run_ptx(body, given, dict.fromkeys(("r0", "r1", "r2", "r3"), dtype))
    for i in range(64):
        a, b, c, d = (int(given[name][i]) for name in "abcd")
        exact = (b << bits | a) * (d << bits | c)
        got = sum(int(found[f"r{place}"][i]) << bits * place for place in range(4))
        assert got == exact, f"{b:x}{a:x} * {d:x}{c:x} is {exact:#x}, not {got:#x}"


def test_a_difference_of_two_words_borrows() -> None:
    found = run_ptx("sub.cc.u32 %x, %a, %c; subc.u32 %y, %b, %d;", WORDS, {"x": np.uint32, "y": np.uint32})
    for i in range(64):
        a, b, c, d = (int(WORDS[name][i]) for name in "abcd")
        exact = ((b << 32 | a) - (d << 32 | c)) % 2**64
        assert int(found["y"][i]) << 32 | int(found["x"][i]) == exact


def test_lanes_that_take_no_part_keep_their_carry() -> None:
    ones = np.full(32, 0xFFFF_FFFF, np.uint32)
    on = np.arange(32) % 2 == 0
    found = run_ptx("add.cc.u32 %x, %a, 0; @%on add.cc.u32 %x, %a, 1; addc.u32 %y, 0, 0;", {"a": ones, "on": on},
                    {"x": np.uint32, "y": np.uint32})  # fmt: skip
    assert found["y"].tolist() == on.astype(int).tolist(), "the carry of a lane was changed by another lane's addition"


def read(value: int, bits: int, signed: bool) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if signed and value >> (bits - 1) else value


@pytest.mark.parametrize("kind", ["u32", "s32"])
def test_a_byte_and_a_half_are_selected_and_clamped(kind: str) -> None:
    found = run_ptx(f"vsub.{kind}.{kind}.{kind}.sat.add %x, %a.b2, %b.h1, %c;", WORDS, {"x": np.uint32})["x"]
    signed = kind == "s32"
    for i in range(64):
        a, b, c = (int(WORDS[name][i]) for name in "abc")
        difference = read(a >> 16, 8, signed) - read(b >> 16, 16, signed)
        clamped = difference if signed else max(difference, 0)
        assert int(found[i]) == (clamped + c) % 2**32


def test_a_result_is_merged_where_the_destination_says() -> None:
    """The pseudo-code of PTX ISA 9.7.18.1: the low byte of the result, in byte 2 of c."""
    found = run_ptx("vmax.u32.u32.u32 %x.b2, %a, %b, %c;", WORDS, {"x": np.uint32})["x"]
    wanted = (WORDS["c"] & 0xFF00_FFFF) | (np.maximum(WORDS["a"], WORDS["b"]) & 0xFF) << 16
    assert np.array_equal(found, wanted)


@pytest.mark.parametrize(
    ("instruction", "a", "b", "c", "wanted"),
    [
        ("vshl.s32.s32.u32.sat.wrap", 2, 31, None, 0x7FFF_FFFF),
        ("vshl.u32.u32.u32.sat.clamp", 2, 32, None, 0),  # 2^33 is -2^33 in 34 bits
        ("vabsdiff.s32.s32.s32.max", 0, 1 << 31, 1, 1 << 31),  # 2^31 is not -2^31
        ("vmin.u32.s32.s32.max", 0xFFFF_FF00, 0, 0xFFFF_FFFF, 0xFFFF_FF00),  # unsigned, -256 has more than 32 bits
        ("vadd.s32.s32.s32.max", 0x7FFF_FFFF, 1, 0, 0),  # the sum is cut to a word
    ],
)
def test_a_result_has_more_bits_than_a_word(instruction: str, a: int, b: int, c: int | None, wanted: int) -> None:
    """PTX ISA 9.7.18.1 says 34 bits; an H200 compares 64, but sums of words."""
    words = {name: np.full(64, value or 0, np.uint32) for name, value in (("a", a), ("b", b), ("c", c))}
    found = run_ptx(f"{instruction} %x, %a, %b{', %c' if c is not None else ''};", words, {"x": np.uint32})["x"]
    assert np.array_equal(found, np.full(64, wanted, np.uint32)), f"{instruction} gives {int(found[0]):#x}"


def test_four_bytes_of_both_sources_are_averaged_and_added() -> None:
    found = run_ptx("vavrg4.u32.u32.u32.add %x.b310, %a.b7520, %b, %c;", WORDS, {"x": np.uint32})["x"]
    for i in range(64):
        a, b, c = (int(WORDS[name][i]) for name in "abc")
        both = (b << 32 | a).to_bytes(8, "little")
        pairs = zip([both[0], both[2], both[5], both[7]], both[4:], strict=True)
        means = [(x + y + 1) >> 1 for x, y in pairs]
        assert int(found[i]) == (c + means[0] + means[1] + means[3]) % 2**32


def test_halves_that_compare_so_become_one() -> None:
    found = run_ptx("vset2.s32.s32.lt %x, %a, %b, %c;", WORDS, {"x": np.uint32})["x"]
    halves = [WORDS[name].view(np.int16).reshape(-1, 2) for name in "ab"]
    assert np.array_equal(found.view(np.uint16).reshape(-1, 2), (halves[0] < halves[1]).astype(np.uint16))


def test_a_truth_table_and_a_predicate() -> None:
    inputs = {**WORDS, "q": np.arange(64) % 3 == 0, "a": np.where(np.arange(64) % 2, WORDS["a"], 0).astype(np.uint32)}
    found = run_ptx("lop3.or.b32 %x|%p, %a, %b, %c, 0xC0, %q;", inputs, {"x": np.uint32, "p": np.bool_})
    assert np.array_equal(found["x"], inputs["a"] & WORDS["b"])
    assert np.array_equal(found["p"], (found["x"] != 0) | inputs["q"])


@pytest.mark.parametrize("kind", ["u8x4", "s8x4"])
@pytest.mark.parametrize("operation", ["add", "add.sat", "sub.sat", "max"])
def test_bytes_are_computed_by_themselves(kind: str, operation: str) -> None:
    body = f"""ld.global.u32 %r1, [%a]; ld.global.u32 %r2, [%b]; {operation}.{kind} %r3, %r1, %r2;
st.global.u32 [%out], %r3; ret;"""
    arrays = {"a": WORDS["a"][:1], "b": WORDS["b"][:1], "out": np.zeros(1, np.uint32)}
    found, _ = Kernel(body, arrays, block=(1, 1, 1), target="sm_120a").run()
    dtype = np.int8 if kind[0] == "s" else np.uint8
    x, y = (arrays[name].view(dtype).astype(int) for name in "ab")
    exact = {"add": x + y, "sub": x - y, "max": np.maximum(x, y)}[operation.split(".")[0]]
    if "sat" in operation:
        exact = np.clip(exact, np.iinfo(dtype).min, np.iinfo(dtype).max)
    assert np.array_equal(found["out"].view(np.uint8), exact.astype(np.uint8))

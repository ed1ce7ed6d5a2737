"""Tensor maps: bits against the driver's encoder and an H200's tensormap.replace, refusals against the driver's."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import NotRequired, TypedDict, cast

import numpy as np
import pytest

from backends.vm.faults import Fault
from backends.vm.tensor.swizzle import Swizzle
from backends.vm.tensor.tensor_map import (
    ELEMENT_TYPES,
    Im2col,
    OobFill,
    Target,
    TensorMapError,
    decode_tensor_map,
    encode_tensor_map,
)
from conformance import SILICON

GOLDEN = np.load(SILICON / "movement" / "tensor_map.npz")
MAPS = {str(name).split("|")[0]: raw.tobytes() for name, raw in zip(GOLDEN["enc_names"], GOLDEN["enc"], strict=True)}
DRIVER_ANSWER = {str(name).split("|")[0]: str(name).split("rc=")[1] for name in GOLDEN["enc_names"]}
REPLACED = {str(name): raw.tobytes() for name, raw in zip(GOLDEN["repl_names"], GOLDEN["repl"], strict=True)}

ADDRESS = 0x7F1234567000
DRIVER_DTYPES = ["u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32", "f64", "bf16", "f32_ftz", "tf32", "tf32_ftz"]
DRIVER_DTYPES += ["b4x16", "b4x16_p64", "b6x16_p32"]
WIDE = {"dims": (256, 96, 7, 5, 3), "strides": (512, 49152, 344064, 1720320), "box": (16, 8, 4, 2, 1)}
L2_PROMOTION = 3 << 17


class Parameters(TypedDict):
    address: int
    dtype: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: NotRequired[str]
    element_strides: NotRequired[tuple[int, ...]]
    im2col: NotRequired[Im2col]
    oob_fill: NotRequired[OobFill]
    target: Target


def asked(**changes: object) -> Parameters:
    usual = {"address": ADDRESS, "dtype": "f16", "dims": (256, 96), "strides": (512,), "box": (16, 16)}
    return cast(Parameters, {**usual, "target": "sm_90a", **changes})


def encode(parameters: Parameters) -> bytes:
    return encode_tensor_map(**parameters)


# The arguments that the measuring program passed to cuTensorMapEncodeTiled, by name of the answer.
ASKED: dict[str, Parameters] = {
    **{
        f"dt{code}": asked(dtype=dtype, strides=(256 * ELEMENT_TYPES[dtype].bits // 8,), box=(8, 16))
        for code, dtype in enumerate(DRIVER_DTYPES[:13])
    },
    **{f"dt{code}": asked(dtype=DRIVER_DTYPES[code], strides=(256,), box=(128, 16)) for code in (13, 14, 15)},
    "sw0": asked(),
    "sw1": asked(swizzle="32B"),
    "sw2": asked(swizzle="64B"),
    "sw3": asked(swizzle="128B"),
    "sw4": asked(swizzle="128B_ATOM_32B"),
    "sw6": asked(swizzle="128B_ATOM_64B"),
    **{f"l2_{code}": asked() for code in range(4)},
    "oob1": asked(oob_fill="nan"),
    **{
        f"rank{rank}": asked(dims=WIDE["dims"][:rank], strides=WIDE["strides"][: rank - 1], box=WIDE["box"][:rank])
        for rank in range(1, 6)
    },
    **{
        f"es{axis}": asked(**WIDE, element_strides=tuple(5 if i == axis and axis else 1 for i in range(5)))
        for axis in range(5)
    },
    "es8": asked(element_strides=(1, 8)),
    "bigstride": asked(**{**WIDE, "strides": (0x123456780, 0x2345678900, 0x3456789AB0, 0x456789ABC0)}),
    "bigdims": asked(
        dtype="u8",
        dims=(0xFFFFFFF0, 0x89ABCDEF, 0x76543210, 3, 2),
        strides=(0xFFFFFFF0, 16, 32, 48),
        box=(256, 255, 1, 1, 1),
    ),
    "small": asked(dims=(64, 8), strides=(128,), box=(16, 8)),
    "tf128k-16": asked(dims=(64, 1023), strides=(128,), box=(16, 8)),
    "tf128k": asked(dims=(64, 1024), strides=(128,), box=(16, 8)),
    "addr57": asked(address=0x1FFFFFFFFFFFF0, dims=(64, 8), strides=(128,), box=(16, 8)),
    "replace_addr": asked(address=0x7FAAAAAAA000),
}
NOT_ASKED = {"sw5", "il1", "il2"}  # a swizzle and layouts that the machine does not model


def test_every_answer_of_the_driver_is_judged() -> None:
    assert set(ASKED) | NOT_ASKED == set(MAPS), "the table of parameters does not match the measured names"


@pytest.mark.parametrize("name", [name for name in ASKED if DRIVER_ANSWER[name] == "0"])
def test_the_driver_writes_the_same_64_bytes(name: str) -> None:
    ours = struct.unpack("<8Q", encode(ASKED[name])[:64])
    theirs = list(struct.unpack("<8Q", MAPS[name][:64]))
    theirs[1] &= ~L2_PROMOTION  # a caching hint that our encoder leaves out
    wrong = [f"word {i}: {a:#x} instead of {b:#x}" for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b]
    assert not wrong, f"{name}: {'; '.join(wrong)}"


@pytest.mark.parametrize("name", [name for name in ASKED if DRIVER_ANSWER[name] != "0"])
def test_parameters_that_the_driver_refused_are_refused(name: str) -> None:
    with pytest.raises(TensorMapError, match=r"tensor map: .{20}"):
        encode(ASKED[name])


@pytest.mark.parametrize("name", [name for name in ASKED if DRIVER_ANSWER[name] == "0"])
def test_the_drivers_bits_decode_to_the_parameters(name: str) -> None:
    wanted, found = ASKED[name], decode_tensor_map(MAPS[name])
    steps = wanted.get("element_strides", (1,) * len(wanted["dims"]))
    assert (found.address, found.element.name) == (wanted["address"], wanted["dtype"]), f"{name}: {found}"
    assert (found.dims, found.strides, found.box) == (wanted["dims"], wanted["strides"], wanted["box"]), (
        f"{name}: {found}"
    )
    assert found.element_strides == steps, f"{name}: {found}"
    assert found.swizzle is Swizzle(wanted.get("swizzle", "none")), f"{name}: {found}"
    assert found.oob_fill == wanted.get("oob_fill", "zero"), f"{name}: {found}"


# tensormap.replace wrote one field of a zeroed map on an H200.
def replaced(name: str, base: bytes) -> bytes:
    """`base` with the bits that one tensormap.replace set on an H200 XORed in."""
    return bytes(a ^ b for a, b in zip(base, REPLACED[name], strict=True))


BLANK = struct.pack("<16Q", 0, 4 << 4, *[0] * 14)  # rank 5, everything else 0


@pytest.mark.parametrize("axis", range(5))
def test_replaced_fields_are_found_where_the_hardware_puts_them(axis: int) -> None:
    dims = decode_tensor_map(replaced(f"global_dim[{axis}]=0x89abcdef", BLANK)).dims
    assert dims == tuple(0x89ABCDEF if i == axis else 1 for i in range(5)), f"global_dim[{axis}]: {dims}"
    box = decode_tensor_map(replaced(f"box_dim[{axis}]=0x155", BLANK)).box
    assert box == tuple(0x55 if i == axis else 1 for i in range(5)), f"box_dim[{axis}] keeps 8 bits: {box}"
    steps = decode_tensor_map(replaced(f"element_stride[{axis}]=0x7", BLANK)).element_strides
    assert steps == tuple(7 if i == axis and axis else 1 for i in range(5)), f"element_stride[{axis}]: {steps}"
    if axis < 4:
        strides = decode_tensor_map(replaced(f"global_stride[{axis}]=0xABCDEF120", BLANK)).strides
        assert strides == tuple(0xABCDEF120 if i == axis else 0 for i in range(4)), f"global_stride[{axis}]: {strides}"


# PTX ISA 9.7.9.28: element types by their number in tensormap.replace.
REPLACE_DTYPES = ["u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32", "f32_ftz", "f64", "bf16", "tf32", "tf32_ftz"]


@pytest.mark.parametrize(("code", "dtype"), list(enumerate(REPLACE_DTYPES)))
def test_replaced_element_types_decode(code: int, dtype: str) -> None:
    found = decode_tensor_map(replaced(f"elemtype={code}", BLANK)).element.name
    assert found == dtype, f"elemtype {code} is {dtype}, decoded as {found}"


@pytest.mark.parametrize(("code", "swizzle"), list(enumerate(["none", "32B", "64B", "128B"])))
def test_replaced_swizzles_decode(code: int, swizzle: str) -> None:
    assert decode_tensor_map(replaced(f"swizzle={code}", BLANK)).swizzle is Swizzle(swizzle), f"swizzle {code}"


REFUSED: list[tuple[str, Parameters]] = [
    ("dtype 'f17'", asked(dtype="f17")),
    ("swizzle", asked(swizzle="96B")),
    ("0 dimensions", asked(dims=(), strides=(), box=())),
    ("6 dimensions", asked(dims=(8,) * 6, strides=(16,) * 5, box=(8,) * 6)),
    ("strides has 2 entries", asked(strides=(512, 512))),
    ("box has 1 entries", asked(box=(16,))),
    ("element_strides has 1 entries", asked(element_strides=(1,))),
    ("base address", asked(address=ADDRESS + 8)),
    ("dims[1] is 0", asked(dims=(256, 0))),
    ("dims[0] is 4294967297", asked(dims=(2**32 + 1, 4))),
    ("strides[0] is 504", asked(strides=(504,))),
    ("strides[0] is 1099511627776", asked(strides=(2**40,))),
    ("box[1] is 257", asked(box=(16, 257))),
    ("box[0] is 0", asked(box=(0, 16))),
    ("multiple of 16 bytes", asked(box=(4, 16))),
    ("wider than the 32 bytes", asked(box=(32, 16), swizzle="32B")),
    ("wider than the 128 bytes", asked(box=(128, 16), swizzle="128B")),
    ("element_strides[1] is 9", asked(element_strides=(1, 9))),
    ("no floating-point", asked(dtype="u16", oob_fill="nan")),
    ("oob_fill is 'one'", asked(oob_fill="one")),
    ("needs sm_100a", asked(swizzle="128B_ATOM_32B")),
    ("needs sm_100a", asked(dtype="b4x16", box=(32, 16))),
    ("box[0] is 64", asked(dtype="b4x16_p64", box=(64, 16), target="sm_100a")),
    ("multiple of 128", asked(dtype="b6x16_p32", dims=(192, 96), box=(128, 16), target="sm_100a")),
    ("32 bytes", asked(dtype="b4x16_p64", address=ADDRESS + 16, box=(128, 16), target="sm_100a")),
    ("wider than the 64 bytes", asked(dtype="b4x16_p64", box=(128, 16), swizzle="64B", target="sm_100a")),
    ("takes none, 128B or", asked(dtype="b4x16_p64", box=(128, 16), swizzle="128B_ATOM_64B", target="sm_100a")),
]


@pytest.mark.parametrize(("names", "parameters"), REFUSED, ids=[f"{i}-{names}" for i, (names, _) in enumerate(REFUSED)])
def test_bad_parameters_are_refused_by_name(names: str, parameters: Parameters) -> None:
    with pytest.raises(TensorMapError) as refusal:
        encode(parameters)
    assert names in str(refusal.value), f"the refusal does not say what is wrong: {refusal.value}"


def flags_changed(mask: int) -> bytes:
    words = list(struct.unpack("<16Q", encode(asked())))
    words[1] ^= mask
    return struct.pack("<16Q", *words)


UNUSABLE: list[tuple[str, bytes]] = [
    ("8 dimensions", flags_changed(6 << 4)),
    ("interleaved", flags_changed(1 << 11)),
    ("element type 15", flags_changed(9 << 7)),
    ("tf32 bit 1", flags_changed(1 << 16)),
    ("atomicity 1", flags_changed(1 << 19)),
    ("atomicity 2", flags_changed(3 << 13 | 2 << 19)),
    ("base address", struct.pack("<Q", ADDRESS + 4) + encode(asked())[8:]),
    ("0x8000000000000000, where no memory is", struct.pack("<Q", 1 << 63) + encode(asked())[8:]),
]


@pytest.mark.parametrize(("names", "raw"), UNUSABLE, ids=[names for names, _ in UNUSABLE])
def test_bits_that_no_tma_unit_can_execute_are_a_fault(names: str, raw: bytes) -> None:
    with pytest.raises(Fault) as fault:
        decode_tensor_map(raw)
    assert fault.value.rule == "tensor-map"
    assert names in fault.value.detail, f"the fault does not say what is wrong: {fault.value.detail}"


def test_bits_without_effect_are_ignored() -> None:
    plain = decode_tensor_map(encode(asked()))
    noisy = flags_changed(0b0010 | L2_PROMOTION | 1 << 21)[:64] + b"\xa5" * 64
    assert decode_tensor_map(noisy) == plain, "CuTeDSL's marker bits, an L2 hint or the upper half changed the map"
    assert decode_tensor_map(flags_changed(1 << 15)) == replace(plain, oob_fill="nan"), "the fill bit is lost"


def words_of(raw: bytes) -> tuple[int, ...]:
    return struct.unpack("<8Q", raw[:64])


CUTEDSL_BITS = 0x24_0002
"""CuTeDSL's bits in the second word besides the fields: its marker, an L2 promotion of 128 bytes, a large tensor."""
STRIDES_4D = (128, 1152, 16128)
DIMS_4D = (64, 9, 14, 64)
CUTEDSL = {
    "equal corners": (
        {"dims": DIMS_4D, "strides": STRIDES_4D, "im2col": Im2col((-1, -1), (-1, -1), 64)},
        (0x8_0024_0333, 0x3F0_0000_0048, 0, 0x8_0000_003F, 0x3F_0000_000D, 7 << 56, 0x3F_FFFF_FFFF),
    ),
    "four unlike coordinates": (
        {"dims": DIMS_4D, "strides": STRIDES_4D, "im2col": Im2col((-1, -2), (3, 4), 64)},
        (0x8_0024_0333, 0x3F0_0000_0048, 0, 0x8_0000_003F, 0x3F_0000_000D, 7 << 56, 0x3F_0403_FEFF),
    ),
    "traversal strides": (
        {"dims": DIMS_4D, "strides": STRIDES_4D, "im2col": Im2col((-1, -2), (3, 4), 64),
         "element_strides": (1, 2, 3, 1)},
        (0x8_0024_0333, 0x3F0_0000_0048, 0, 0x8_0000_003F, 0x3F_0000_000D, 0x0700_0088_0000_0000, 0x3F_0403_FEFF),
    ),
    "1024 pixels": (
        {"dims": (8, 64, 64, 64), "strides": (16, 1024, 65536), "im2col": Im2col((0, 0), (0, 0), 1024)},
        (0x1_0024_0333, 0x1000_0000_0040, 0, 0x3F_0000_0007, 0x3F_0000_003F, 7 << 56, 0x3FF_0000_0000),
    ),
    "three dimensions": (
        {"dims": (64, 64, 4), "strides": (128, 8192), "im2col": Im2col((-3,), (5,), 64), "element_strides": (1, 2, 1)},
        (0x8_0004_0323, 0x200, 0, 0x3F_0000_003F, 3, 0x0700_0008_0000_0000, 0x3F_0005_FFFD),
    ),
    "five dimensions": (
        {"dims": (64, 9, 14, 6, 4), "strides": (128, 1152, 16128, 96768), "im2col": Im2col((-1, -2, -3), (4, 5, 6), 64),
         "element_strides": (1, 1, 2, 3, 1)},
        (0x8_0024_0343, 0x3F0_0000_0048, 0x17A0, 0x8_0000_003F, 0x5_0000_000D, 0x0700_0440_0000_0003, 0x3F_18A4_77DF),
    ),
}  # fmt: skip
"""The encoding by make_im2col_tma_atom of CuTeDSL 4.8.1 for sm_90a, f16, 8 channels per pixel: words 1 to 7."""


@pytest.mark.parametrize("name", CUTEDSL)
def test_im2col_maps_have_the_bits_of_cutedsl(name: str) -> None:
    parameters, wanted = CUTEDSL[name]
    given = cast(Parameters, {**asked(box=(8,)), **parameters})
    raw = encode(given)
    _, flags, *rest = words_of(raw)
    assert flags == wanted[0] & ~CUTEDSL_BITS, f"{flags:#x}"
    assert tuple(rest) == wanted[1:], [f"{word:#x}" for word in rest]
    found = decode_tensor_map(struct.pack("<8Q", ADDRESS, *wanted))
    assert found == decode_tensor_map(raw)
    assert found.im2col == parameters["im2col"], "the corners are read otherwise than they were written"


IM2COL = {"dims": DIMS_4D, "strides": STRIDES_4D, "box": (8,)}
REFUSED_PIXELS = {
    "two dimensions": ({"dims": (64, 9), "strides": (128,), "im2col": Im2col((), (), 8)}, "an im2col map has 3 to 5"),
    "no pixels": ({"im2col": Im2col((0, 0), (0, 0), 0)}, "pixels is 0; 1 to 1024"),
    "too many pixels": ({"im2col": Im2col((0, 0), (0, 0), 1025)}, "pixels is 1025"),
    "a corner of another rank": ({"im2col": Im2col((0,), (0, 0), 8)}, "lower has 1 entries"),
    "a corner too far": ({"im2col": Im2col((0, 0), (0, 128), 8)}, r"upper\[1\] is 128; -128 to 127"),
    "an empty box": ({"im2col": Im2col((5, 0), (-5, 0), 8)}, "empty in dimension 1: it begins at 5 and ends at 3"),
    "a box of pixels": ({"box": (8, 8), "im2col": Im2col((0, 0), (0, 0), 8)}, "box has 2 entries"),
}


@pytest.mark.parametrize("name", REFUSED_PIXELS)
def test_im2col_maps_that_the_driver_refuses(name: str) -> None:
    changes, sentence = REFUSED_PIXELS[name]
    with pytest.raises(TensorMapError, match=sentence):
        encode(asked(**{**IM2COL, **changes}))

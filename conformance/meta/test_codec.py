"""The NVFP4 codec: every code and tie, saturation, zeros, refusals, layouts byte by byte.

It is compared with ml_dtypes and, if that is installed, torchao.
"""

from __future__ import annotations

import itertools
import math
import warnings

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megamoe.codec.nvfp4 import (
    CHUNK,
    DEVICE_CHUNK,
    E2M1_VALUES,
    decode_e2m1,
    decode_e4m3,
    decode_scales,
    deinterleave,
    dequantise,
    encode_e2m1,
    encode_e4m3,
    global_scale,
    interleave,
    pack,
    quantise,
    swizzle_scales,
    swizzled_shape,
    unpack,
    unswizzle_scales,
)

ALL_E2M1 = torch.arange(16, dtype=torch.uint8)
ALL_E4M3 = torch.arange(256, dtype=torch.uint8)
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def witness(values: torch.Tensor, dtype: type) -> torch.Tensor:
    """Codes of float32 `values`, from ml_dtypes."""
    return torch.from_numpy(values.numpy().astype(dtype).view(np.uint8).copy())


def dense_floats() -> torch.Tensor:
    """Every float32 sign and exponent with the upper 13 mantissa bits, and the neighbours of all of these."""
    upper = (torch.arange(1 << 22, dtype=torch.int64) * 1024 - (1 << 31)).to(torch.int32).view(torch.float32)
    upper = upper[~upper.isnan()]
    boundaries = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 7.0])
    near = torch.cat([boundaries, -boundaries])
    ends = [near.nextafter(torch.tensor(towards)) for towards in (-math.inf, math.inf)]
    return torch.cat([upper, near, *ends])


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_e2m1_code_decodes(dtype: torch.dtype) -> None:
    wanted = [*E2M1_VALUES, *(-value for value in E2M1_VALUES)]
    assert decode_e2m1(ALL_E2M1, dtype).tolist() == wanted
    expected = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    assert np.array_equal(decode_e2m1(ALL_E2M1, torch.float64).numpy(), expected), "ml_dtypes decodes otherwise"


def test_every_e2m1_code_encodes_to_itself() -> None:
    assert torch.equal(encode_e2m1(decode_e2m1(ALL_E2M1)), ALL_E2M1), "-0 keeps its sign, as it does in cvt"


@pytest.mark.parametrize(
    ("value", "code"),
    [(0.25, 0), (0.75, 2), (1.25, 2), (1.75, 4), (2.5, 4), (3.5, 6), (5.0, 6), (6.0, 7), (7.0, 7), (math.inf, 7)],
)
def test_ties_go_to_even_and_large_numbers_saturate(value: float, code: int) -> None:
    both = encode_e2m1(torch.tensor([value, -value]))
    assert both.tolist() == [code, code | 8], f"{value} encodes to {both.tolist()}"


def test_e2m1_encodes_as_ml_dtypes_does() -> None:
    values = dense_floats()
    differs = encode_e2m1(values) != witness(values, ml_dtypes.float4_e2m1fn)
    assert not differs.any(), f"{int(differs.sum())} of {len(values)} differ, among them {values[differs][:3].tolist()}"


def test_every_bf16_encodes_as_ml_dtypes_does() -> None:
    values = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    values = values[~values.isnan()]
    assert torch.equal(encode_e2m1(values), witness(values.float(), ml_dtypes.float4_e2m1fn))


def test_every_e4m3_code_decodes() -> None:
    expected = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    for dtype in FLOATS:
        assert np.array_equal(decode_e4m3(ALL_E4M3, dtype).double().numpy(), expected, equal_nan=True), f"{dtype}"


def test_e4m3_encodes_as_ml_dtypes_does_and_saturates() -> None:
    values = dense_floats()
    wanted = witness(values.clamp(-448, 448), ml_dtypes.float8_e4m3fn)
    differs = encode_e4m3(values) != wanted
    assert not differs.any(), f"{int(differs.sum())} of {len(values)} differ, among them {values[differs][:3].tolist()}"
    assert encode_e4m3(torch.tensor([449.0, 1e30, math.inf, -math.inf])).tolist() == [0x7E, 0x7E, 0x7E, 0xFE]
    numbers = ALL_E4M3[(ALL_E4M3 & 0x7F) != 0x7F]
    assert torch.equal(encode_e4m3(decode_e4m3(numbers)), numbers), "every code but NaN encodes to itself"


@pytest.mark.parametrize(("code", "what"), [(0x7F, "NaN"), (0xFF, "NaN"), (0x80, "negative"), (0xFE, "negative")])
def test_a_scale_that_is_none_is_refused(code: int, what: str) -> None:
    sf = torch.full((2, 1), 0x38, dtype=torch.uint8)
    sf[1, 0] = code
    with pytest.raises(ValueError, match=rf"element \(1, 0\) is {code:#04x}, {what}"):
        decode_scales(sf)
    with pytest.raises(ValueError, match=what):
        dequantise(torch.zeros(2, 8, dtype=torch.uint8), sf)
    assert decode_scales(ALL_E4M3[:0x7F]).isfinite().all(), "the other 127 are scales"


def test_numbers_that_are_none_are_refused() -> None:
    for encode in (encode_e2m1, encode_e4m3):
        with pytest.raises(ValueError, match=r"element \(2,\) is NaN"):
            encode(torch.tensor([0.0, 1.0, math.nan]))
    for bad in (math.nan, math.inf, -math.inf):
        values = torch.ones(5, 32)
        values[3, 17] = bad
        with pytest.raises(ValueError, match="row 3 of 5 holds a NaN or an infinity"):
            quantise(values, torch.tensor(1.0))
    for gs in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="global scales"):
            quantise(torch.ones(1, 16), torch.tensor(gs))
    with pytest.raises(ValueError, match="K is 24"):
        quantise(torch.ones(2, 24), torch.tensor(1.0))
    with pytest.raises(ValueError, match="is 16; an e2m1 code is 0"):
        decode_e2m1(torch.tensor([16], dtype=torch.uint8))
    with pytest.raises(ValueError, match="do not belong together"):
        dequantise(torch.zeros(2, 8, dtype=torch.uint8), torch.zeros(2, 2, dtype=torch.uint8))
    with pytest.raises(ValueError, match="leading axes"):
        quantise(torch.ones(4, 16), torch.ones(3))


def test_two_codes_share_a_byte_the_first_in_the_low_nibble() -> None:
    codes = torch.tensor([[1, 2, 3, 15]], dtype=torch.uint8)
    assert pack(codes).tolist() == [[0x21, 0xF3]]
    every = torch.arange(256, dtype=torch.uint8)[:, None]
    assert torch.equal(pack(unpack(every)), every), "all bytes unpack and pack to themselves"


def slow_quantise(values: torch.Tensor, gs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, block by block in NumPy float32, with conversions from ml_dtypes."""
    rows = values.float().numpy().reshape(-1, values.shape[-1] // 16, 16)
    each = gs.reshape(*gs.shape, *(1 for _ in values.shape[gs.dim() : -1])).expand(values.shape[:-1])
    scales = each.numpy().reshape(-1)
    codes, sf = np.zeros(rows.shape, np.uint8), np.zeros(rows.shape[:2], np.uint8)
    for r, row in enumerate(rows):
        for b, block in enumerate(row):
            raw = np.minimum(np.abs(block).max() / np.float32(6) / scales[r], np.float32(448))
            scale = raw.astype(ml_dtypes.float8_e4m3fn)
            sf[r, b] = scale.view(np.uint8)
            if scale != 0:
                codes[r, b] = (
                    (block / (scale.astype(np.float32) * scales[r])).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
                )
    packed = codes.reshape(len(rows), -1)
    return torch.from_numpy(packed[:, 0::2] | packed[:, 1::2] << 4), torch.from_numpy(sf)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("per", [0, 1, 2], ids=["tensor", "expert", "token"])
def test_quantisation_is_its_definition(dtype: torch.dtype, per: int) -> None:
    values = torch.randn(3, 5, 96, generator=torch.Generator().manual_seed(per)).to(dtype)
    values *= torch.tensor([1e-6, 1.0, 1e4]).view(3, 1, 1).to(dtype)
    values[1, 2, 16:48] = 0
    values[2, 3, 0] = -0.0
    gs = global_scale(values, per) * torch.tensor([1.0, 0.02, 3.0])[per]
    codes, sf = quantise(values, gs)
    wanted_codes, wanted_sf = slow_quantise(values, gs)
    assert torch.equal(sf.view(-1, 6), wanted_sf), "block scales"
    assert torch.equal(codes.view(-1, 48), wanted_codes), "codes"


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**99), max_value=2.0**99),
        min_size=16,
        max_size=16,
    ),
    st.floats(width=32, min_value=2.0**-99, max_value=2.0**99),
)
def test_any_block_quantises_as_defined(block: list[float], gs: float) -> None:
    values, scale = torch.tensor([block]), torch.tensor(gs)
    with np.errstate(over="ignore", under="ignore"):
        wanted_codes, wanted_sf = slow_quantise(values, scale)
    codes, sf = quantise(values, scale)
    assert torch.equal(sf, wanted_sf), f"block scale {sf.tolist()}; the definition gives {wanted_sf.tolist()}"
    assert torch.equal(codes, wanted_codes), f"codes {codes.tolist()}; the definition gives {wanted_codes.tolist()}"


def test_zero_blocks_and_vanishing_scales_have_codes_of_zero() -> None:
    values = torch.zeros(2, 32)
    values[0, 16:] = 2.0**-12
    values[1, :16] = -1.0
    codes, sf = quantise(values, torch.tensor(1.0))
    assert sf.tolist() == [[0, 0], [encode_e4m3(torch.tensor(1 / 6)).item(), 0]], "2**-12 / 6 rounds to no scale"
    assert not codes[0].any(), "without a scale there is no code"
    assert not codes[1, 8:].any(), "nor in a block of zeros"


def test_what_is_representable_comes_back() -> None:
    """Every code under every block scale comes back when quantised with its own global scale, if its block holds a
    6."""
    sf = ALL_E4M3[1:0x7F, None].expand(-1, 2).contiguous()
    codes = pack(torch.arange(32, dtype=torch.uint8).remainder(16).expand(len(sf), -1).contiguous())
    for gs in (1.0, 0.25, 2.0**-20):
        values = dequantise(codes, sf, torch.tensor(gs))
        again = quantise(values, torch.tensor(gs))
        assert torch.equal(again[0], codes), f"codes differ under gs {gs}"
        assert torch.equal(again[1], sf), f"scales differ under gs {gs}"


@pytest.mark.parametrize("dtype", FLOATS)
def test_dequantisation_is_exact_without_global_scale(dtype: torch.dtype) -> None:
    sf = ALL_E4M3[:0x7F, None]
    codes = pack(ALL_E2M1.expand(len(sf), -1).contiguous())
    wanted = decode_e2m1(ALL_E2M1, torch.float64) * decode_e4m3(sf, torch.float64)
    assert torch.equal(dequantise(codes, sf, dtype=dtype).double(), wanted)


def test_chunks_make_no_difference() -> None:
    values = torch.randn(2 * CHUNK // 48 + 7, 48, generator=torch.Generator().manual_seed(3))
    gs = global_scale(values, per=1)
    codes, sf = quantise(values, gs)
    for row in (0, CHUNK // 48 - 1, CHUNK // 48, len(values) - 1):
        alone = quantise(values[row : row + 1], gs[row : row + 1])
        assert torch.equal(alone[0][0], codes[row]), f"row {row}"
        assert torch.equal(alone[1][0], sf[row]), f"row {row}"
    assert torch.equal(dequantise(codes, sf, gs)[-1], dequantise(codes[-1:], sf[-1:], gs[-1:])[0])


def test_chunks_of_a_device_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(2 * CHUNK // 48 + 7, 48, generator=torch.Generator().manual_seed(5))
    gs = global_scale(values, per=1)
    codes, sf = quantise(values, gs)
    numbers = dequantise(codes, sf, gs)
    monkeypatch.setattr("megamoe.codec.nvfp4.CHUNK", DEVICE_CHUNK)
    again = quantise(values, gs)
    assert torch.equal(again[0], codes), "codes"
    assert torch.equal(again[1], sf), "scales"
    assert torch.equal(dequantise(codes, sf, gs), numbers), "numbers"


def test_global_scale_uses_the_whole_range() -> None:
    values = torch.tensor([[[3.0] * 16, [-5.0] * 16], [[0.0] * 16, [0.0] * 16]])
    assert global_scale(values).tolist() == pytest.approx(5.0 / 2688)
    assert global_scale(values, per=1).tolist() == pytest.approx([5.0 / 2688, 1.0])
    assert global_scale(values, per=2).flatten().tolist() == pytest.approx([3.0 / 2688, 5.0 / 2688, 1.0, 1.0])
    codes, sf = quantise(values, global_scale(values, per=1))
    assert int(sf[0, 1, 0]) == 0x7E, "the largest number has the largest scale"
    assert set(unpack(codes[0, 1]).tolist()) == {0xF}, "and the largest code"


def torchao() -> object:
    """torchao's MX formats, an optional witness. Its import warns about extensions that a CPU lacks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor", reason="torchao is not installed")


def test_quantises_as_torchao_does() -> None:
    """Block scales agree for any input. torchao multiplies by the reciprocal of the scale, so codes are compared only
    where that is exact: for block scales and global scales that are powers of two."""
    other = torchao()
    values = torch.randn(64, 256, generator=torch.Generator().manual_seed(5)).bfloat16()
    for gs in (global_scale(values), torch.tensor(2.0**-7)):
        assert torch.equal(quantise(values, gs)[1], other.nvfp4_quantize(values, 16, gs)[0].view(torch.uint8))  # pyright: ignore
    gs, largest = torch.tensor(2.0**-6), 6.0 * torch.exp2(torch.arange(16) % 6 - 4.0)[:, None]
    blocks = values.float().view(64, 16, 16).clamp(-largest, largest)
    blocks[..., 0] = largest[:, 0]
    plain = blocks.view(64, 256)
    assert torch.equal(quantise(plain, gs)[0], other.nvfp4_quantize(plain, 16, gs)[1].view(torch.uint8))  # pyright: ignore


SHAPES = [(1, 1), (31, 3), (32, 4), (33, 5), (127, 4), (128, 4), (128, 8), (129, 9), (256, 16), (300, 24)]


def numbered(rows: int, blocks: int) -> torch.Tensor:
    """Scales that encode their position, as far as a byte can: 251 is prime."""
    return (torch.arange(rows * blocks).view(rows, blocks) * 7 % 251 + 1).to(torch.uint8)


@pytest.mark.parametrize(("rows", "blocks"), SHAPES)
def test_every_scale_is_where_the_tensor_core_looks(rows: int, blocks: int) -> None:
    """facts.md 2.4: byte (row % 32) * 16 + (row // 32) * 4 + sf of an atom of 512, atoms along K first."""
    sf = numbered(rows, blocks)
    stored = swizzle_scales(sf, padding=0).flatten().tolist()
    k_atoms = -(-blocks // 4)
    for row, block in itertools.product(range(rows), range(blocks)):
        atom = row // 128 * k_atoms + block // 4
        at = atom * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4
        assert stored[at] == sf[row, block], f"scale {block} of row {row} is not at byte {at}"
        stored[at] = 0
    assert not any(stored), "the other bytes are padding"


@pytest.mark.parametrize(("rows", "blocks"), SHAPES)
def test_swizzling_comes_undone(rows: int, blocks: int) -> None:
    sf = torch.stack([numbered(rows, blocks), numbered(rows, blocks).flip(0)])
    swizzled = swizzle_scales(sf, padding=0x7F)
    assert tuple(swizzled.shape) == (2, *swizzled_shape(rows, blocks))
    assert int((swizzled == 0x7F).sum()) == swizzled.numel() - sf.numel() + int((sf == 0x7F).sum()), "padding is poison"
    assert torch.equal(unswizzle_scales(swizzled, rows, blocks), sf), "and none of it comes back"


def test_swizzled_scales_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"129 rows of 4 blocks have \(2, 1, 512\)"):
        unswizzle_scales(torch.zeros(1, 1, 512, dtype=torch.uint8), 129, 4)


@pytest.mark.parametrize("granularity", [8, 16, 32, 64])
def test_gate_and_up_take_turns(granularity: int) -> None:
    gate, up = torch.arange(128).view(128, 1) * 2, torch.arange(128).view(128, 1) * 2 + 1
    both = interleave(gate.expand(3, -1, 2), up.expand(3, -1, 2), granularity)
    assert both.shape == (3, 256, 2)
    for row in range(256):
        pair, inside = divmod(row, 2 * granularity)
        of_up, offset = divmod(inside, granularity)
        assert both[0, row, 0] == 2 * (pair * granularity + offset) + of_up, f"row {row} at granularity {granularity}"
    again = deinterleave(both, granularity)
    assert torch.equal(again[0], gate.expand(3, -1, 2)), "gate comes back"
    assert torch.equal(again[1], up.expand(3, -1, 2)), "up comes back"


def test_rows_that_cannot_take_turns_are_refused() -> None:
    with pytest.raises(ValueError, match="24 rows cannot be split into groups of 16"):
        interleave(torch.zeros(24, 1), torch.zeros(24, 1), 16)
    with pytest.raises(ValueError, match="24 rows cannot be split into groups of 32"):
        deinterleave(torch.zeros(24, 1), 16)
    with pytest.raises(ValueError, match="must be the same"):
        interleave(torch.zeros(16, 1), torch.zeros(16, 2), 8)


def test_swizzles_as_torchao_does() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        other = pytest.importorskip("torchao.prototype.mx_formats.utils", reason="torchao is not installed")
    for rows, blocks in SHAPES:
        sf = numbered(rows, blocks)
        assert torch.equal(swizzle_scales(sf).flatten(), other.to_blocked(sf)), f"{rows} rows of {blocks} scales"

"""NVFP4: 4-bit floats (e2m1), one e4m3 block scale per 16 of them, one fp32 global scale for many; and their layouts.

A number is decode_e2m1(code) * decode_scales(sf) * gs. Two codes share a byte, the first one in the low nibble
(facts.md 2.5). Blocks of 16 lie along the last axis, K.

    gs = global_scale(w, per=1)                     # one for each index of the first axis: per expert, per token
    codes, sf = quantise(w, gs)                     # uint8 [..., K / 2] and uint8 [..., K / 16]
    w = dequantise(codes, sf, gs)

Swizzled block scales are stored in atoms of 512 bytes, for 128 rows by 4 blocks along K. Scale `j` of row `r` of an
atom is at byte (r % 32) * 16 + (r // 32) * 4 + j; atoms along K are adjacent (facts.md 2.4). tcgen05.mma reads an atom
as tcgen05.cp.32x128b.warpx4 copies it. Rows and blocks that fill up the last atoms are padding without meaning.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import torch

from megamoe.contract.counted import counted

SF_VEC_SIZE: Final = 16
E2M1_MAX: Final = 6.0
E4M3_MAX: Final = 448.0
E2M1_VALUES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Elements per pass. On a CPU, the output of one pass must still be in the cache for the next one. On a device, the
# passes must take longer to run than to launch.
CHUNK: Final = 1 << 16
DEVICE_CHUNK: Final = 1 << 24

_EXPONENT: Final = 0x7F800000
_ONE: Final = 127 << 23


def encode_e2m1(values: torch.Tensor) -> torch.Tensor:
    """uint8 in the shape of `values`: codes 0..15, rounded to nearest even and saturated to 6, signs of zeros kept.

    Reads `values` as float32, so a double is rounded twice. ValueError for a NaN.
    """
    if torch.isnan(values).any():
        raise ValueError(f"{_first(torch.isnan(values))} is NaN, which e2m1 cannot hold")
    return _codes(values.float().reshape(-1).clone()).to(torch.uint8).view(values.shape)


def _codes(values: torch.Tensor) -> torch.Tensor:
    """int32 codes of float32 [n]. Overwrites its input."""
    bits = values.view(torch.int32)
    sign = (bits >> 28).bitwise_and_(8)
    values.abs_().clamp_(max=E2M1_MAX)
    # Adding 2**22 times the greatest power of two not above a number leaves one mantissa bit and rounds the sum to
    # nearest even. Below 1 the step stays that of [1, 2), because e2m1's subnormals have the same step.
    power = bits.bitwise_and(_EXPONENT).clamp_(min=_ONE)
    anchor = power + (22 << 23)
    steps = values.add_(anchor.view(torch.float32)).view(torch.int32).sub_(anchor)
    return steps.add_(power.sub_(_ONE).bitwise_right_shift_(22)).bitwise_or_(sign)


def decode_e2m1(codes: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The values of codes 0..15, exact in every floating type. ValueError for any other code."""
    if codes.numel() and int(codes.max()) > 15:
        raise ValueError(f"{_first(codes > 15)} is {int(codes.max())}; an e2m1 code is 0..15")
    table = torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)], dtype=dtype, device=codes.device)
    return _looked_up(table, codes)


def _looked_up(table: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    # table[codes] takes 4.3 ns per element on a CPU, this takes 0.8 ns.
    return table.index_select(0, codes.reshape(-1).int()).view(codes.shape)


def encode_e4m3(values: torch.Tensor) -> torch.Tensor:
    """uint8: the e4m3 codes of `values`, rounded to nearest even and saturated to 448. ValueError for a NaN."""
    if torch.isnan(values).any():
        raise ValueError(f"{_first(torch.isnan(values))} is NaN; a scale must be a number")
    return _saturated_e4m3(values.float())


def _saturated_e4m3(values: torch.Tensor) -> torch.Tensor:
    return values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def decode_e4m3(codes: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The values of e4m3 codes (uint8); 0x7F and 0xFF are NaN. Exact in bf16, f16, f32 and f64."""
    table = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(dtype)
    return _looked_up(table.to(codes.device), codes)


def decode_scales(sf: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """decode_e4m3 for block scales. ValueError for a NaN or a sign, because the tensor core's ue4m3 has no sign."""
    wrong = sf >= 0x7F
    if wrong.any():
        seen = int(sf[wrong][0])
        what = "NaN" if seen & 0x7F == 0x7F else "negative"
        raise ValueError(f"the block scale at {_first(wrong)} is {seen:#04x}, {what}; it must be 0x00 to 0x7e")
    return decode_e4m3(sf, dtype)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [..., K] of codes 0..15 to uint8 [..., K / 2], the first code of each pair in the low nibble."""
    if codes.shape[-1] % 2:
        raise ValueError(f"K is {codes.shape[-1]}; two codes share a byte, so it must be even")
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [..., K / 2] to uint8 [..., K] of codes 0..15. Inverse of `pack`."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def global_scale(values: torch.Tensor, per: int = 0) -> torch.Tensor:
    """float32 [first `per` axes]: the scale at which the largest number gets the largest code and block scale.

    `per` = 0: one for the tensor. `per` = 1: one for each expert of a weight stack, or for each token. If all values
    are zero, the scale is 1.0.
    """
    flat = values.reshape(*values.shape[:per], -1)
    largest = torch.maximum(flat.amax(dim=-1), -flat.amin(dim=-1)).float()
    return torch.where(largest > 0, _quotient(largest, E2M1_MAX * E4M3_MAX), 1.0)


def quantise(values: torch.Tensor, gs: torch.Tensor, *, check: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes uint8 [..., K / 2], sf uint8 [..., K / 16]) of `values` [..., K] under the global scale `gs` float32.

    The axes of `gs` are leading axes of `values`: [] per tensor, [experts] per expert, [tokens] per token. In float32,
    rounded to nearest even and saturated: sf = e4m3(max|block| / 6 / gs), code = e2m1(value / (sf * gs)). A block whose
    sf is 0 has codes 0.

    ValueError if K is not a multiple of 16, for a value that is not finite, or for a `gs` that is not float32, finite
    and above 0. Without `check` values are not inspected, so nothing waits for the device; values that are not finite
    then give arbitrary codes.
    """
    k = values.shape[-1]
    if k % SF_VEC_SIZE:
        raise ValueError(f"K is {k}; a block scale is for {SF_VEC_SIZE} numbers, so K must be a multiple of it")
    if check and (not bool((torch.isfinite(gs) & (gs > 0)).all()) or gs.dtype != torch.float32):
        raise ValueError(
            f"global scales of {gs.dtype} from {gs.min():g} to {gs.max():g}; they must be f32, finite, above 0"
        )
    rows = values.reshape(-1, k)
    row_gs = _expanded(gs, values.shape[:-1]).reshape(-1, 1)
    codes = torch.empty(len(rows), k // 2, dtype=torch.uint8, device=values.device)
    sf = torch.empty(len(rows), k // SF_VEC_SIZE, dtype=torch.uint8, device=values.device)
    step = max(1, _chunk(values) // k)
    for start in range(0, len(rows), step):
        here = slice(start, start + step)
        largest = _quantise_rows(rows[here], row_gs[here], codes[here], sf[here])
        if check and not bool(torch.isfinite(largest.sum())):
            row = start + int((~torch.isfinite(largest)).any(dim=1).nonzero()[0])
            raise ValueError(f"row {row} of {len(rows)} holds a NaN or an infinity; only numbers can be quantised")
    return codes.view(*values.shape[:-1], k // 2), sf.view(*values.shape[:-1], k // SF_VEC_SIZE)


def _quantise_rows(values: torch.Tensor, gs: torch.Tensor, codes: torch.Tensor, sf: torch.Tensor) -> torch.Tensor:
    """Quantises rows [n, k] under gs [n, 1] into packed codes and sf; returns the largest magnitudes of the blocks [n,
    k / 16]."""
    block = values.float().view(*sf.shape, SF_VEC_SIZE)
    largest = block.abs().amax(dim=-1)
    sf.copy_(_saturated_e4m3(_quotient(largest, E2M1_MAX) / gs))
    step = sf.view(torch.float8_e4m3fn).float().mul_(gs)
    # For a block of scale 0 divide by inf, so that its codes are 0.
    scaled = block / step.masked_fill_(step <= 0, torch.inf)[..., None]
    pair = _codes(scaled.view(-1)).view(torch.int64)
    torch.bitwise_or(pair, pair >> 28, out=pair)
    codes.copy_(pair.to(torch.uint8).view(codes.shape))
    # On a device, checking for a zero scale costs more than masking.
    if sf.device.type != "cpu" or not bool(sf.all()):
        codes.view(*sf.shape, SF_VEC_SIZE // 2).masked_fill_((sf == 0)[..., None], 0)
    return largest


def _quotient(values: torch.Tensor, divisor: float) -> torch.Tensor:
    # Divides by a tensor: on CUDA, torch multiplies by the reciprocal of a host number, and the last bit then differs
    # from the CPU's.
    return values / values.new_full((), divisor)


def _chunk(tensor: torch.Tensor) -> int:
    return CHUNK if tensor.device.type == "cpu" else DEVICE_CHUNK


def _expanded(gs: torch.Tensor, leading: torch.Size) -> torch.Tensor:
    if gs.shape != leading[: gs.dim()]:
        raise ValueError(f"global scales of shape {tuple(gs.shape)} for values of leading axes {tuple(leading)}")
    return gs.reshape(*gs.shape, *(1 for _ in leading[gs.dim() :])).expand(leading)


def dequantise(
    codes: torch.Tensor, sf: torch.Tensor, gs: torch.Tensor | None = None, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """[..., K] of `dtype` from packed codes [..., K / 2], sf [..., K / 16] and gs (leading axes, as for `quantise`).

    Code times block scale is exact in bf16 and wider types. Only the product with `gs` rounds. ValueError for a block
    scale that is NaN or negative, or for shapes that do not match.
    """
    if codes.shape[:-1] != sf.shape[:-1] or codes.shape[-1] * 2 != sf.shape[-1] * SF_VEC_SIZE:
        raise ValueError(
            f"codes of shape {tuple(codes.shape)} and block scales of shape {tuple(sf.shape)} do not belong together"
        )
    if dtype not in _PAIRS:
        raise ValueError(f"dtype {dtype}; numbers can be had as {', '.join(str(known) for known in _PAIRS)}")
    rows, scales = codes.reshape(-1, codes.shape[-1]), sf.reshape(-1, sf.shape[-1])
    row_gs = None if gs is None else _expanded(gs, codes.shape[:-1]).reshape(-1, 1, 1)
    values = torch.empty(*scales.shape, SF_VEC_SIZE, dtype=dtype, device=codes.device)
    table, step = _pairs(dtype).to(codes.device), max(1, _chunk(codes) // 2 // codes.shape[-1])
    for start in range(0, len(values), step):
        here = slice(start, start + step)
        pairs = torch.index_select(table, 0, rows[here].reshape(-1).int())
        block = pairs.view(dtype).view_as(values[here])
        factor = decode_scales(scales[here], dtype)[..., None]
        if row_gs is None:
            torch.mul(block, factor, out=values[here])
        else:
            values[here] = block.mul_(factor) * row_gs[here].to(torch.promote_types(dtype, torch.float32))
    return values.view(*codes.shape[:-1], codes.shape[-1] * 2)


_PAIRS: Final = {
    torch.bfloat16: torch.int32,
    torch.float16: torch.int32,
    torch.float32: torch.int64,
    torch.float64: torch.complex128,
}


@lru_cache(maxsize=4)
def _pairs(dtype: torch.dtype) -> torch.Tensor:
    """[256] elements of twice the size of `dtype`: the two numbers of each byte, adjacent."""
    both = decode_e2m1(unpack(torch.arange(256, dtype=torch.uint8)[:, None]), dtype)
    return both.view(_PAIRS[dtype]).flatten()


def _first(where: torch.Tensor) -> str:
    at = tuple(int(i) for i in where.nonzero()[0])
    return f"element {at}" if at else "the element"


ATOM_ROWS: Final = 128
ATOM_BLOCKS: Final = 4
ATOM_BYTES: Final = ATOM_ROWS * ATOM_BLOCKS


def swizzled_shape(rows: int, blocks: int) -> tuple[int, int, int]:
    """(atoms along the rows, atoms along K, 512) for `rows` rows of `blocks` block scales each."""
    return -(-rows // ATOM_ROWS), -(-blocks // ATOM_BLOCKS), ATOM_BYTES


def swizzle_scales(sf: torch.Tensor, padding: int = 0) -> torch.Tensor:
    """uint8 [..., rows, blocks] to uint8 [..., *swizzled_shape(rows, blocks)]. `padding`: the fill byte."""
    rows, blocks = sf.shape[-2:]
    row_atoms, k_atoms, _ = swizzled_shape(rows, blocks)
    fill = (0, k_atoms * ATOM_BLOCKS - blocks, 0, row_atoms * ATOM_ROWS - rows)
    whole = torch.nn.functional.pad(sf, fill, value=padding)
    # [row atom, row // 32, row % 32, K atom, block] becomes [row atom, K atom, row % 32, row // 32, block].
    split = whole.reshape(*sf.shape[:-2], row_atoms, 4, 32, k_atoms, ATOM_BLOCKS)
    return split.movedim((-5, -2, -3, -4, -1), (-5, -4, -3, -2, -1)).flatten(-3)


def unswizzle_scales(swizzled: torch.Tensor, rows: int, blocks: int) -> torch.Tensor:
    """uint8 [..., row atoms, K atoms, 512] to uint8 [..., rows, blocks], unpadded. ValueError for other shapes."""
    if tuple(swizzled.shape[-3:]) != swizzled_shape(rows, blocks):
        raise ValueError(
            f"swizzled scales of shape {tuple(swizzled.shape)}; {counted(rows, 'row')} of {counted(blocks, 'block')} "
            f"have {swizzled_shape(rows, blocks)} at the end"
        )
    row_atoms, k_atoms = swizzled.shape[-3:-1]
    split = swizzled.reshape(*swizzled.shape[:-1], 32, 4, ATOM_BLOCKS)
    whole = split.movedim((-5, -4, -3, -2, -1), (-5, -2, -3, -4, -1))
    return whole.reshape(*swizzled.shape[:-3], row_atoms * ATOM_ROWS, k_atoms * ATOM_BLOCKS)[..., :rows, :blocks]


def interleave(gate: torch.Tensor, up: torch.Tensor, granularity: int) -> torch.Tensor:
    """Two [..., n, x] to one [..., 2 n, x]: `granularity` rows of gate, as many of up, and so on.

    For codes and for unswizzled block scales. ValueError if n is not a multiple of `granularity`.
    """
    if gate.shape != up.shape:
        raise ValueError(f"gate has shape {tuple(gate.shape)} and up {tuple(up.shape)}; they must be the same")
    rows = _groups(gate.shape[-2], granularity)
    shape = (*gate.shape[:-2], rows, granularity, gate.shape[-1])
    return torch.stack((gate.reshape(shape), up.reshape(shape)), dim=-3).flatten(-4, -2)


def deinterleave(both: torch.Tensor, granularity: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(gate, up) of [..., 2 n, x]. Inverse of `interleave`."""
    groups = _groups(both.shape[-2], 2 * granularity)
    split = both.reshape(*both.shape[:-2], groups, 2, granularity, both.shape[-1])
    gate, up = split.unbind(dim=-3)
    return gate.flatten(-3, -2), up.flatten(-3, -2)


def _groups(rows: int, size: int) -> int:
    if size < 1 or rows % size:
        raise ValueError(f"{counted(rows, 'row')} cannot be split into groups of {size}")
    return rows // size

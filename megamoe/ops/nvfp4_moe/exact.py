"""Inputs of NVFP4 MoE for which every correct kernel gives the same bits: `exact_sums`.

Every number is a small integer times a power of two, and every sum of both GEMMs fits into fp32 in every order. Columns
along K come in pairs, in blocks far apart: x has the same number in both, up to a sign. The weights of a pair cancel,
except in one pair of a row of W1 and in two pairs of a row of W2. So a sum is small, but each of its products counts:
what is left out, added twice or taken from another place does not cancel. Columns of W1 come in pairs as well, with the
same signal and other weights around it: this makes the rows between the GEMMs as symmetric as x.

A gate is 0 or at least GATE in magnitude, so silu is exactly its positive part, in fp32 and in float64. h is an e2m1
number times a power of two and its block's largest is 1, 2, 3, 4, 6, 8 or 12 of the same unit: the quotients that
requantisation rounds are then no closer than 1 % to a step. A row of l2 has 8 bits, so it is a bf16 number. y may have
more and is then rounded once, from an exact sum, which a single wrong bit moves where it lies between two bf16 numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from megamoe.codec.nvfp4 import SF_VEC_SIZE, encode_e2m1, encode_e4m3, interleave, pack
from megamoe.codec.routing import expert_rows
from megamoe.spec.draws import generator, signs, uniform

if TYPE_CHECKING:
    from megamoe.contract import Case

Stack = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

# exp(1024) is infinite in fp32 and in float64, so that silu(-1024) is 0 and silu(1024) is 1024.
GATE: Final = 10
"""Binary exponent of the smallest gate."""
# Weights in some blocks are larger by these powers of two. Before they cancel, their sums need more bits than bf16 and
# f16 have, or the FP8 sums of Hopper. Products of W2 have more bits than those of W1.
LOUD: Final = {"w1": 11, "w2": 2}
LOUD_SHARE: Final = 4
MAX_LOUD: Final = 8
"""Pairs of loud blocks, so that sums along any K fit into fp32."""
# Binary exponent of the smaller of the two block scales of quiet weights. Times LOUD, the larger one is at most 256.
QUIET: Final = {"w1": -4, "w2": -1}
MAGNITUDES: Final = (1.0, 1.5, 2.0, 3.0)
# Gate and up of a column are multiples of two numbers of x, each 1 or 2. These factors make h one of H_VALUES.
FACTORS: Final = ((1, 1), (1, 2), (2, 1), (1, 3), (3, 1))
H_VALUES: Final = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0)
# The weights of a pair that does not cancel, by their sum: 1, 2 or 3. None is 0.
DIVIDED: Final = (
    ((2.0, -1.0), (-1.0, 2.0), (3.0, -2.0), (-2.0, 3.0)),
    ((1.0, 1.0), (3.0, -1.0), (-1.0, 3.0), (1.0, 1.0)),
    ((1.0, 2.0), (2.0, 1.0), (1.5, 1.5), (1.5, 1.5)),
)


@dataclass(frozen=True, slots=True)
class Pairs:
    """The pairs of columns along a K.

    `first`, `second`: int64 [K / 2]. `sign`: what the number in the second is times the one in the first. `loud`: bool
    [K / 2], pairs in which weights are large and which always cancel.
    """

    first: torch.Tensor
    second: torch.Tensor
    sign: torch.Tensor
    loud: torch.Tensor

    def mirrored(self, numbers: torch.Tensor, sign: torch.Tensor | float = 1.0) -> torch.Tensor:
        """[..., K]: `numbers` [..., K / 2] in the first columns and, times `sign`, in the second ones."""
        return self.woven(numbers, (numbers * sign).to(numbers.dtype))

    def woven(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        """[..., K] of two [..., K / 2]: what is in the first columns, and what is in the second ones."""
        whole = first.new_empty(*first.shape[:-1], 2 * first.shape[-1])
        whole[..., self.first], whole[..., self.second] = first, second
        return whole

    def by_block(self, numbers: torch.Tensor) -> torch.Tensor:
        """[..., K / 16]: `numbers` [..., K / 32], one for each pair of blocks, in both blocks of the pair."""
        first, second = (columns[::SF_VEC_SIZE] // SF_VEC_SIZE for columns in (self.first, self.second))
        whole = numbers.new_empty(*numbers.shape[:-1], 2 * numbers.shape[-1])
        whole[..., first], whole[..., second] = numbers, numbers
        return whole


def pairs_of(case: Case, axis: str) -> Pairs:
    """The pairs along `axis`: each block of the first half of K with one of the second half, in another order."""
    half = case.int(axis) // 2
    blocks = half // SF_VEC_SIZE
    partner = torch.randperm(blocks, generator=generator(case, f"{axis} blocks")) + blocks
    inside = uniform(case, f"{axis} columns", (blocks, SF_VEC_SIZE)).argsort(dim=1)
    loud = torch.randperm(blocks, generator=generator(case, f"{axis} loud")) < min(MAX_LOUD, blocks // LOUD_SHARE)
    second = (partner[:, None] * SF_VEC_SIZE + inside).flatten()
    sign = signs(case, f"{axis} signs", (half,)).float()
    return Pairs(torch.arange(half), second, sign, loud.repeat_interleave(SF_VEC_SIZE))


def exact_stack(case: Case, name: str) -> Stack:
    """The codes, block scales and global scales of x, w1, w2 or a2."""
    if name == "x":
        return *_symmetric_x(case), powers(case, "x_gs", (case.int("tokens"),), 0)
    if name == "a2":
        codes, sf = _symmetric_a2(case)
        return codes, sf, torch.ones(len(codes))
    return (*_w1(case), _w1_gs(case)) if name == "w1" else (*_w2(case), _w2_gs(case))


def exact_plain(case: Case, name: str) -> torch.Tensor:
    """bf16 x or a2: what the NVFP4 numbers would be, each row times a power of two."""
    if name == "x":
        numbers, count = _x_numbers(case), case.int("tokens")
    else:
        numbers, count = _a2_numbers(case), expert_rows(case)
    return (numbers * powers(case, f"{name}_gs", (count, 1), 0)).bfloat16()


def powers(case: Case, stream: str, shape: tuple[int, ...], least: int, count: int = 3) -> torch.Tensor:
    """float32: 2^least, or one of the next `count` - 1 powers of two."""
    return torch.exp2((uniform(case, stream, shape) * count).floor() + least).float()


def _gate_unit(case: Case) -> torch.Tensor:
    """float64 [num_experts]: what 1 in a sum of W1 stands for, in tokens whose scale is 1."""
    return powers(case, "w1_gs", (case.int("num_experts"),), GATE).double()


def _w1_gs(case: Case) -> torch.Tensor:
    """float32 [num_experts]: takes QUIET back."""
    return (_gate_unit(case) * 2.0 ** (-1 - QUIET["w1"])).float()


def a2_gs(case: Case) -> torch.Tensor:
    """float32 [num_experts]: block scales of activations are then normal numbers of e4m3, 0.02 to 256."""
    return (_gate_unit(case).square() * powers(case, "a2_gs", (case.int("num_experts"),), -3, 2)).float()


def _w2_gs(case: Case) -> torch.Tensor:
    """float32 [num_experts]: takes the scales of gate and up back, up to a factor of 1, 2 or 4."""
    return (powers(case, "w2_gs", (case.int("num_experts"),), 0) / _gate_unit(case).square()).float()


def topk_weights(case: Case, shape: tuple[int, ...]) -> torch.Tensor:
    """float32: 1, 1/2, ... 1/32. Sums of rows so scaled may lie between two bf16 numbers."""
    return powers(case, "topk_weights", shape, -5, 6)


def exact_h(case: Case) -> torch.Tensor:
    """float32 [expert rows, intermediate]: numbers that l1 could have given."""
    shape = (expert_rows(case), case.int("intermediate"))
    h = torch.tensor(H_VALUES)[(uniform(case, "h", shape) * len(H_VALUES)).long()] * signs(case, "h_sign", shape)
    return (h * powers(case, "h_scale", (len(h), 1), 2 * GATE + 2)).float()


def exact_rows(case: Case) -> torch.Tensor:
    """bf16 [expert rows, hidden]: whole numbers of 8 bits."""
    shape = (expert_rows(case), case.int("hidden"))
    return ((uniform(case, "rows", shape) * 256).floor() * signs(case, "rows_sign", shape)).bfloat16()


def _x_numbers(case: Case) -> torch.Tensor:
    """float32 [tokens, hidden]: 1 or 2, of either sign."""
    shape, pairs = (case.int("tokens"), case.int("hidden") // 2), pairs_of(case, "hidden")
    numbers = (1 + (uniform(case, "x", shape) * 2).floor()) * signs(case, "x_sign", shape)
    return pairs.mirrored(numbers.float(), pairs.sign)


def _symmetric_x(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = (case.int("tokens"), 1, case.int("hidden") // SF_VEC_SIZE)
    scale = powers(case, "x_sf", blocks, -1)
    return pack(encode_e2m1(_divided(_x_numbers(case)[:, None], scale))), encode_e4m3(scale)


def _a2_numbers(case: Case) -> torch.Tensor:
    """float32 [expert rows, intermediate]: e2m1 numbers."""
    shape, pairs = (expert_rows(case), case.int("intermediate") // 2), pairs_of(case, "intermediate")
    magnitude = torch.tensor(H_VALUES)[(uniform(case, "a2", shape) * len(H_VALUES)).long()] / 2
    return pairs.mirrored((magnitude * signs(case, "a2_sign", shape)).float(), pairs.sign)


def _symmetric_a2(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Block scales are 8 to 11 times a power of two, so that a row of l2 has 8 bits; the same in paired blocks."""
    pairs, shape = pairs_of(case, "intermediate"), (expert_rows(case), case.int("intermediate") // 32)
    scale = (8 + (uniform(case, "a2_sf", shape) * 4).floor()) / 8 * powers(case, "a2_sf_power", shape, -1)
    whole = pairs.by_block(scale.float())[:, None]
    return pack(encode_e2m1(_a2_numbers(case)[:, None])), encode_e4m3(whole)


def _w1(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """A column of h is relu(factor * x[a]) * factor' * x[b], and its partner is the same up to a sign."""
    pairs, columns = pairs_of(case, "hidden"), pairs_of(case, "intermediate")
    shape = (case.int("num_experts"), case.int("intermediate") // 2)
    quiet = (~pairs.loud).nonzero().flatten()
    factors = torch.tensor(FACTORS)[(uniform(case, "w1_factors", shape) * len(FACTORS)).long()]
    halves = []
    for part, up in (("gate", 0), ("up", 1)):
        at = quiet[(uniform(case, f"{part}_at", shape) * len(quiet)).long()]
        sign = signs(case, "up_sign", shape).float() if up else torch.ones(shape)
        total = columns.mirrored(sign * factors[..., up], columns.sign if up else 1.0)
        halves.append(_weights(case, ("w1", part), pairs, columns.mirrored(at)[..., None], total[..., None]))
    turn = case.int("interleave")
    codes, sf = (interleave(gate, up, turn) for gate, up in zip(*halves, strict=True))
    return codes, sf


def _w2(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """A row is the sum or difference of two numbers of one block of a2."""
    pairs, shape = pairs_of(case, "intermediate"), (case.int("num_experts"), case.int("hidden"))
    quiet = (~pairs.loud[::SF_VEC_SIZE]).nonzero().flatten()
    block = quiet[(uniform(case, "w2_block", shape) * len(quiet)).long()]
    inside = uniform(case, "w2_at", (*shape, SF_VEC_SIZE)).argsort(dim=-1)[..., :2]
    total = signs(case, "w2_sign", (*shape, 2)).float()
    return _weights(case, ("w2", "both"), pairs, block[..., None] * SF_VEC_SIZE + inside, total)


def _weights(
    case: Case, name: tuple[str, str], pairs: Pairs, at: torch.Tensor, total: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and block scales of weights that cancel in all pairs but `at` [experts, rows, n].

    There the two weights of the pair sum up to `total` [experts, rows, n], if x has the same sign in both. `name`: the
    stack and its part.
    """
    stack, stream = name[0], " ".join(name)
    shape = (*at.shape[:2], len(pairs.first))
    left = torch.tensor(MAGNITUDES)[(uniform(case, f"{stream} size", shape) * len(MAGNITUDES)).long()]
    left *= signs(case, f"{stream} sign", shape)
    right = -left
    way = (uniform(case, f"{stream} divided", tuple(total.shape)) * len(DIVIDED[0])).long()
    divided = torch.tensor(DIVIDED)[total.abs().long() - 1, way] * total.sign()[..., None]
    left.scatter_(-1, at, divided[..., 0])
    right.scatter_(-1, at, divided[..., 1])
    blocks = (*shape[:2], 2 * shape[2] // SF_VEC_SIZE)
    scale = powers(case, f"{stream} sf", blocks, -1, 2)
    codes = pack(encode_e2m1(_divided(pairs.woven(left, right * pairs.sign), scale)))
    louder = pairs.by_block(torch.where(pairs.loud[::SF_VEC_SIZE], LOUD[stack], 0))
    return codes, encode_e4m3(torch.ldexp(scale, louder + QUIET[stack] + 1))


def _divided(numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return numbers / scales.repeat_interleave(SF_VEC_SIZE, dim=-1)

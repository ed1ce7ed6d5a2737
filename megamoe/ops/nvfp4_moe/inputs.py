"""Input distributions of NVFP4 MoE. Each makes one kind of mistake visible."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

import torch

from megamoe.codec.layout import swizzle_scales
from megamoe.codec.nvfp4 import (
    E2M1_MAX,
    E4M3_MAX,
    SF_VEC_SIZE,
    decode_e4m3,
    global_scale,
    quantise,
)
from megamoe.codec.routing import expert_rows, routing
from megamoe.ops.nvfp4_moe.loads import draw_topk_ids
from megamoe.spec.draws import generator, normal, uniform

if TYPE_CHECKING:
    from megamoe.contract import Case

Inputs = dict[str, torch.Tensor]
Stack = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

# Of weights with more elements than this, a few experts are drawn; the others are these, rotated along the rows.
POOL: Final = 1 << 25
# About the largest activation after SwiGLU of N(0, 1) gates and ups.
LARGEST_ACTIVATION: Final = 8.0
ROTATION: Final = 37
NAN_SCALE: Final = 0x7F


def make_inputs(case: Case, device: str | torch.device = "cpu") -> Inputs:
    """Every input of the case's stage, drawn on the CPU and then moved to `device`.

    The bits depend on the case's id alone. ValueError for an unknown distribution.
    """
    if case.inputs not in DISTRIBUTIONS:
        known = ", ".join(DISTRIBUTIONS)
        raise ValueError(f"{case.id}: there is no input distribution {case.inputs!r} for nvfp4_moe; there are: {known}")
    wanted = INPUTS[str(case["stage"])]
    made: Inputs = {"topk_ids": draw_topk_ids(case), "topk_weights": _topk_weights(case), "a2_gs": _a2_gs(case)}
    stack = DISTRIBUTIONS[case.inputs]
    if "x_codes" in wanted:
        made |= _operand("x", stack(case, "x", (case.int("tokens"), 1, case.int("hidden"))), _padding(case), rows=True)
    if "w1_codes" in wanted:
        shape = (case.int("num_experts"), 2 * case.int("intermediate"), case.int("hidden"))
        made |= _operand("w1", _weights(case, "w1", shape), _padding(case))
    if "w2_codes" in wanted:
        shape = (case.int("num_experts"), case.int("hidden"), case.int("intermediate"))
        made |= _operand("w2", _weights(case, "w2", shape), _padding(case))
    made |= {name: draw(case, made) for name, draw in _EXPERT_ROWS.items() if name in wanted}
    if "a2_codes" in wanted:
        made |= _a2(case, made)
    return {name: made[name].to(device) for name in wanted}


_X: Final = ("x_codes", "x_sf", "x_gs")
_W1: Final = ("w1_codes", "w1_sf", "w1_gs")
_W2: Final = ("w2_codes", "w2_sf", "w2_gs")
_TOPK: Final = ("topk_ids", "topk_weights")
# The inputs of each stage, in the order of the spec.
INPUTS: Final[Mapping[str, tuple[str, ...]]] = {
    "layer": (*_X, *_W1, *_W2, "a2_gs", *_TOPK),
    "l1": (*_X, *_W1, "a2_gs", *_TOPK),
    "requantise": ("h", "a2_gs", "topk_ids"),
    "l2": ("a2_codes", "a2_sf", *_W2, "a2_gs", "topk_ids"),
    "combine": ("rows", *_TOPK),
}


def _operand(name: str, stack: Stack, padding: int, *, rows: bool = False) -> Inputs:
    """Codes, swizzled scales and global scales of a stack. `rows`: its matrices are the rows of one matrix."""
    codes, sf, gs = (part.squeeze(1) if rows and part.dim() > 1 else part for part in stack)
    return {f"{name}_codes": codes, f"{name}_sf": swizzle_scales(sf, padding), f"{name}_gs": gs}


def _weights(case: Case, name: str, shape: tuple[int, int, int]) -> Stack:
    """One matrix an expert. A real layer has more numbers than can be drawn in seconds: see POOL."""
    experts, per_expert = shape[0], shape[1] * shape[2]
    pool = min(experts, max(1, POOL // per_expert))
    codes, sf, gs = DISTRIBUTIONS[case.inputs](case, name, (pool, *shape[1:]))
    if pool < experts:
        turns = [(expert % pool, ROTATION * (expert // pool)) for expert in range(experts)]
        codes, sf = (_rotations(part, turns) for part in (codes, sf))
        gs = gs[torch.arange(experts) % pool] * (0.75 + 0.5 * uniform(case, f"{name}_spread", (experts,))).float()
    return codes, sf, gs


def _rotations(pool: torch.Tensor, turns: list[tuple[int, int]]) -> torch.Tensor:
    whole = torch.empty(len(turns), *pool.shape[1:], dtype=pool.dtype)
    for made, (source, turn) in zip(whole, turns, strict=True):
        turn %= len(made)
        made[turn:], made[:turn] = pool[source, : len(made) - turn], pool[source, len(made) - turn :]
    return whole


def _padding(case: Case) -> int:
    return NAN_SCALE if case.inputs == "poisoned_padding" else 0


def _deviation(name: str, k: int) -> float:
    """The deviation that makes x N(0, 1) and either product N(0, 1) or smaller."""
    return 1.0 if name == "x" else 1.0 / math.sqrt(k)


def _normal(case: Case, name: str, shape: tuple[int, int, int]) -> Stack:
    """bf16 N(0, 1) or N(0, 1 / K), quantised with a global scale for each token or expert."""
    values = (normal(case, name, shape) * _deviation(name, shape[-1])).bfloat16()
    gs = global_scale(values, per=1)
    return *quantise(values, gs), gs


def _zero_blocks(case: Case, name: str, shape: tuple[int, int, int]) -> Stack:
    """As normal, but half of the blocks are zero, and so are the first token and the first 64 rows of every expert."""
    values = normal(case, name, shape) * _deviation(name, shape[-1])
    kept = uniform(case, f"{name}_zero", (*shape[:-1], shape[-1] // SF_VEC_SIZE)) < 0.5
    values *= kept.repeat_interleave(SF_VEC_SIZE, dim=-1)
    (values[0] if name in ("x", "a2") else values[:, :64])[:] = 0
    gs = global_scale(values, per=1)
    return *quantise(values, gs), gs


def _full_range(case: Case, name: str, shape: tuple[int, int, int]) -> Stack:
    """All 16 codes and all 127 block scales, equally likely."""
    source = generator(case, f"{name}_codes")
    codes = torch.randint(256, (*shape[:-1], shape[-1] // 2), generator=source, dtype=torch.uint8)
    sf = torch.randint(0x7F, (*shape[:-1], shape[-1] // SF_VEC_SIZE), generator=source, dtype=torch.uint8)
    return codes, sf, _unit(case, name, shape, decode_e4m3(torch.arange(0x7F, dtype=torch.uint8)))


def _saturating_scales(case: Case, name: str, shape: tuple[int, int, int]) -> Stack:
    """Block scales of 448 or one of the three below it. Activations need more than 448 and 6 (see _a2_gs)."""
    codes, _, _ = _full_range(case, name, shape)
    source = generator(case, f"{name}_sf")
    sf = torch.randint(0x7B, 0x7F, (*shape[:-1], shape[-1] // SF_VEC_SIZE), generator=source, dtype=torch.uint8)
    return codes, sf, _unit(case, name, shape, decode_e4m3(torch.arange(0x7B, 0x7F, dtype=torch.uint8)))


def _unit(case: Case, name: str, shape: tuple[int, int, int], scales: torch.Tensor) -> torch.Tensor:
    """float32 [shape[0]]: global scales that give uniform codes under these block scales the deviation of `normal`."""
    mean_square = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]).square().mean() * scales.square().mean()
    spread = 0.75 + 0.5 * uniform(case, f"{name}_gs", shape[:1])
    return (spread * _deviation(name, shape[-1]) / math.sqrt(float(mean_square))).float()


DISTRIBUTIONS: Final[Mapping[str, Callable[[Case, str, tuple[int, int, int]], Stack]]] = {
    "normal": _normal,
    "full_range": _full_range,
    "saturating_scales": _saturating_scales,
    "zero_blocks": _zero_blocks,
    # The scales of padding rows are NaN, and so is everything else in padding.
    "poisoned_padding": _normal,
}


def _topk_weights(case: Case) -> torch.Tensor:
    """float32 [tokens, topk]: a softmax over the choices."""
    return normal(case, "topk_weights", (case.int("tokens"), case.int("topk"))).double().softmax(dim=1).float()


def _a2_gs(case: Case) -> torch.Tensor:
    """float32 [num_experts]: a calibrated scale of each expert's activations, 256 times too small if they saturate."""
    largest = LARGEST_ACTIVATION / (256.0 if case.inputs == "saturating_scales" else 1.0)
    spread = 0.5 + 1.5 * uniform(case, "a2_gs", (case.int("num_experts"),))
    return (spread * largest / (E2M1_MAX * E4M3_MAX)).float()


def _h(case: Case, made: Inputs) -> torch.Tensor:
    """float32 [expert rows, intermediate]: SwiGLU of two N(0, 1); NaN in padding rows if padding is poisoned."""
    gate, up = (normal(case, name, (expert_rows(case), case.int("intermediate"))) for name in ("gate", "up"))
    return _pad_rows(case, made, gate * gate.sigmoid() * up, math.nan)


def _rows(case: Case, made: Inputs) -> torch.Tensor:
    """bf16 [expert rows, hidden]: N(0, 1)."""
    return _pad_rows(case, made, normal(case, "rows", (expert_rows(case), case.int("hidden"))).bfloat16(), math.nan)


_EXPERT_ROWS: Final[Mapping[str, Callable[[Case, Inputs], torch.Tensor]]] = {"h": _h, "rows": _rows}


def _a2(case: Case, made: Inputs) -> Inputs:
    """Requantised activations for the stage l2. Scales of padding rows are NaN if padding is poisoned."""
    codes, sf, _ = DISTRIBUTIONS[case.inputs](case, "a2", (expert_rows(case), 1, case.int("intermediate")))
    sf = _pad_rows(case, made, sf.squeeze(1), NAN_SCALE)
    return {"a2_codes": codes.squeeze(1), "a2_sf": swizzle_scales(sf, _padding(case))}


def _pad_rows(case: Case, made: Inputs, rows: torch.Tensor, poison: float) -> torch.Tensor:
    if case.inputs == "poisoned_padding":
        padding = torch.ones(len(rows), dtype=torch.bool)
        padding[routing(case, made["topk_ids"]).row] = False
        rows[padding] = poison
    return rows

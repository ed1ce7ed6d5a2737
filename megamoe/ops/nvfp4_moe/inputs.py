"""Inputs of NVFP4 MoE: how tokens choose their experts, the distributions of numbers, a sample of a large layer.

Each distribution makes one kind of mistake visible.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import torch
from torch.utils.weak import WeakIdRef

from megamoe.codec.nvfp4 import (
    E2M1_MAX,
    E4M3_MAX,
    SF_VEC_SIZE,
    decode_e4m3,
    global_scale,
    quantise,
    swizzle_scales,
    unswizzle_scales,
)
from megamoe.codec.routing import EP_RANKS, expert_rows, routing
from megamoe.ops import Sample, distribution_of
from megamoe.ops.nvfp4_moe import exact
from megamoe.spec.draws import counted_normal, generator, normal, uniform

if TYPE_CHECKING:
    from megamoe.contract import Case


def draw_topk_ids(case: Case) -> torch.Tensor:
    """int32 [tokens, topk]: distinct experts for each token, by the case's load, followed by the shared experts."""
    shared = torch.arange(case.int("num_experts") - case.int("shared"), case.int("num_experts"), dtype=torch.int32)
    return torch.cat((_draw_routed(_without_shared(case)), shared.expand(case.int("tokens"), -1)), dim=1)


def _without_shared(case: Case) -> Case:
    """`case` with only the routed experts and choices, under the same id."""
    fewer = case.int("shared")
    axes = {**dict(case.axes), **{name: case.int(name) - fewer for name in ("num_experts", "topk")}}
    return replace(case, axes=tuple(axes.items()))


def _draw_routed(case: Case) -> torch.Tensor:
    if not case.int("topk"):
        return torch.empty(case.int("tokens"), 0, dtype=torch.int32)
    drawn = _LOADS[str(case["load"])](case)
    # Draw which expert gets which load, and the position of each choice.
    names = torch.randperm(case.int("num_experts"), generator=generator(case, "expert_names"))
    places = uniform(case, "places", tuple(drawn.shape)).argsort(dim=1)
    drawn = drawn.gather(1, places)
    return torch.where(drawn >= 0, names[drawn.clamp(min=0)], -1).int()


def _balanced(case: Case) -> torch.Tensor:
    """Loads differ by at most one: routes are dealt round-robin."""
    tokens, topk = case.int("tokens"), case.int("topk")
    return torch.arange(tokens * topk).view(tokens, topk) % case.int("num_experts")


def _drawn(case: Case, weight: torch.Tensor) -> torch.Tensor:
    """Draws topk experts per token without replacement, in proportion to `weight`."""
    level = uniform(case, "topk_ids", (case.int("tokens"), len(weight)))
    return (level.clamp(min=1e-300).log() / weight).topk(case.int("topk"), dim=1).indices


def _skewed(case: Case) -> torch.Tensor:
    """The n-th most popular expert has a share of 1 / n."""
    return _drawn(case, 1.0 / torch.arange(1, case.int("num_experts") + 1, dtype=torch.float64))


def _one_token(case: Case) -> torch.Tensor:
    """As many experts as possible have one token each. All other routes go to the same topk experts."""
    tokens, topk = case.int("tokens"), case.int("topk")
    ids = torch.arange(topk).repeat(tokens, 1)
    lonely = torch.arange(topk, case.int("num_experts"))[:tokens]
    ids[torch.arange(len(lonely)), torch.arange(len(lonely)) % topk] = lonely
    return ids


def _empty(case: Case) -> torch.Tensor:
    """Half of the experts, or all but topk of them if that is fewer, have no token."""
    experts = max(case.int("topk"), (case.int("num_experts") + 1) // 2)
    return _drawn(case, torch.ones(experts, dtype=torch.float64))


def _slice(case: Case) -> torch.Tensor:
    """Tokens choose among the experts of EP_RANKS ranks. An id is -1 if the expert belongs to another rank."""
    ids = _drawn(case, torch.ones(EP_RANKS * case.int("num_experts"), dtype=torch.float64))
    return torch.where(ids < case.int("num_experts"), ids, -1)


_LOADS: Final = {"balanced": _balanced, "skewed": _skewed, "one_token": _one_token, "empty": _empty, "slice": _slice}


Inputs = dict[str, torch.Tensor]
Stack = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Shape = tuple[int, int, int]
Device = str | torch.device
Distribution = Callable[["Case", str, Shape, Device], Stack]

# Larger stacks use counter-based draws, this many numbers at a time: a sequential draw takes minutes for a real layer.
COUNTED: Final = 1 << 26
# Roughly the largest activation after SwiGLU of N(0, 1) gates and ups.
LARGEST_ACTIVATION: Final = 8.0
NAN_SCALE: Final = 0x7F
EXACT: Final = "exact_sums"
"""The distribution for which a stage has one right answer, bit for bit, unless there is a clamp."""


def make_inputs(case: Case, device: Device = "cpu") -> Inputs:
    """Every input of the case's stage, on `device`. Do not change the weights of a real layer: they are shared.

    Such weights are drawn on `device`, unless the caller still holds those of another case of the layer. The bits
    depend on the case's id alone. Raises ValueError for an unknown distribution.
    """
    draw_stack = distribution_of(case, DISTRIBUTIONS)

    def stack(name: str, count: int, rows: int, k: int) -> Stack:
        return draw_stack(case, name, (count, rows, k), device)

    wanted = input_names(case)
    made: Inputs = {"topk_ids": draw_topk_ids(case), "topk_weights": _topk_weights(case), "a2_gs": _a2_gs(case)}
    if "x_codes" in wanted:
        made |= _operand("x", stack("x", case.int("tokens"), 1, case.int("hidden")), _padding(case), rows=True)
    if "x" in wanted:
        made["x"] = _plain(case, "x", (case.int("tokens"), case.int("hidden")))
    layer = _layer_of(case)
    for name, rows, k in (
        ("w1", 2 * case.int("intermediate"), case.int("hidden")),
        ("w2", case.int("hidden"), case.int("intermediate")),
    ):
        if f"{name}_codes" not in wanted:
            continue
        shape = (case.int("num_experts"), rows, k)
        if draw_stack is not _normal or math.prod(shape) <= COUNTED:
            made |= _operand(name, draw_stack(case, name, shape, device), _padding(case))
            continue
        key = (layer.id, str(device), name)
        kept = _unchanged(key)
        if not kept:
            kept = _operand(name, _normal(layer, name, shape, device), _padding(case))
            _KEPT[key] = {part: (WeakIdRef(tensor), tensor._version) for part, tensor in kept.items()}
        made |= kept
    made |= {name: draw(case, made) for name, draw in _EXPERT_ROWS.items() if name in wanted}
    if "a2_codes" in wanted:
        made |= _a2(case, made, stack("a2", expert_rows(case), 1, case.int("intermediate")))
    if "a2" in wanted:
        a2 = _plain(case, "a2", (expert_rows(case), case.int("intermediate")))
        made["a2"] = _pad_rows(case, made, a2, math.nan)
    return {name: made[name].to(device) for name in wanted}


_OF_WEIGHTS: Final = ("hidden", "intermediate", "num_experts", "inputs", "seed")
_KEPT: Final[dict[tuple[str, str, str], dict[str, tuple[WeakIdRef, int]]]] = {}
"""Weak references to weights of real layers in use, by layer, device and name, with their tensor versions when drawn.

The weights of 384 experts take seconds to draw and gigabytes to store, so nothing is kept alive here.
"""


def _unchanged(key: tuple[str, str, str]) -> Inputs:
    """The weights of `key`. Empty if any of them was freed or changed."""
    found: Inputs = {}
    for part, (kept, version) in _KEPT.get(key, {}).items():
        tensor = kept()
        if tensor is None or tensor._version != version:
            return {}
        found[part] = tensor
    return found


def _layer_of(case: Case) -> Case:
    """`case` with an id of only the axes that define its weights: rows of one real layer share weights, as in a
    model."""
    op, _, axes = case.id.partition(":")
    kept = [axis for axis in axes.split(",") if axis.partition("=")[0] in _OF_WEIGHTS]
    return replace(case, id=f"{op}:{','.join(kept)}")


_W1: Final = ("w1_codes", "w1_sf", "w1_gs")
_W2: Final = ("w2_codes", "w2_sf", "w2_gs")
_TOPK: Final = ("topk_ids", "topk_weights")


def input_names(case: Case) -> tuple[str, ...]:
    """The inputs of the case's stage."""
    x, a2, gs = ("x",), ("a2",), ()
    if case["activations"] == "nvfp4":
        x, a2, gs = ("x_codes", "x_sf", "x_gs"), ("a2_codes", "a2_sf"), ("a2_gs",)
    names: Mapping[str, tuple[str, ...]] = {
        "layer": (*x, *_W1, *_W2, *gs, *_TOPK),
        "l1": (*x, *_W1, *gs, *_TOPK),
        "requantise": ("h", *gs, "topk_ids"),
        "l2": (*a2, *_W2, *gs, "topk_ids"),
        "combine": ("rows", *_TOPK),
    }
    return names[str(case["stage"])]


def output_names(case: Case) -> tuple[str, ...]:
    """The outputs of the case's stage."""
    a2 = ("a2_codes", "a2_sf") if case["activations"] == "nvfp4" else ("a2",)
    return {"l1": a2, "requantise": a2, "l2": ("rows",)}.get(str(case["stage"]), ("y",))


def _operand(name: str, stack: Stack, padding: int, *, rows: bool = False) -> Inputs:
    """Codes, swizzled scales and global scales of a stack. `rows`: the stack's matrices are rows of one matrix."""
    codes, sf, gs = (part.squeeze(1) if rows and part.dim() > 1 else part for part in stack)
    return {f"{name}_codes": codes, f"{name}_sf": swizzle_scales(sf, padding), f"{name}_gs": gs}


def _padding(case: Case) -> int:
    return NAN_SCALE if case.inputs == "poisoned_padding" else 0


def _deviation(name: str, k: int) -> float:
    """The standard deviation that makes x N(0, 1) and both products N(0, 1) or smaller."""
    return 1.0 if name == "x" else 1.0 / math.sqrt(k)


def _normal(case: Case, name: str, shape: Shape, device: Device) -> Stack:
    """bf16 N(0, 1) or N(0, 1 / K), quantised with one global scale per token or expert."""
    each = math.prod(shape[1:])
    if shape[0] * each <= COUNTED:
        return _quantised(name, normal(case, name, shape).to(device))
    step = max(1, COUNTED // each)
    counts = ((first, min(step, shape[0] - first)) for first in range(0, shape[0], step))
    drawn = (counted_normal(case, name, first * each, count * each, device) for first, count in counts)
    parts = [_quantised(name, part.view(-1, *shape[1:])) for part in drawn]
    codes, sf, gs = (torch.cat(part) for part in zip(*parts, strict=True))
    # The largest of millions of numbers is always the same, so all global scales would be equal.
    return codes, sf, gs * _spread(case, f"{name}_spread", len(gs)).float().to(device)


def _quantised(name: str, values: torch.Tensor) -> Stack:
    rounded = values.mul_(_deviation(name, values.shape[-1])).bfloat16()
    gs = global_scale(rounded, per=1)
    return *quantise(rounded, gs), gs


def _zero_blocks(case: Case, name: str, shape: Shape, device: Device) -> Stack:
    """Like normal, but half of the blocks are zero, and so are the first token and the first 64 rows of every
    expert."""
    values = normal(case, name, shape) * _deviation(name, shape[-1])
    kept = uniform(case, f"{name}_zero", (*shape[:-1], shape[-1] // SF_VEC_SIZE)) < 0.5
    values *= kept.repeat_interleave(SF_VEC_SIZE, dim=-1)
    (values[0] if name in ("x", "a2") else values[:, :64])[:] = 0
    gs = global_scale(values, per=1)
    return *quantise(values, gs), gs


def _full_range(case: Case, name: str, shape: Shape, device: Device) -> Stack:
    """All 16 codes and all 127 block scales, equally likely."""
    source = generator(case, f"{name}_codes")
    codes = torch.randint(256, (*shape[:-1], shape[-1] // 2), generator=source, dtype=torch.uint8)
    sf = torch.randint(0x7F, (*shape[:-1], shape[-1] // SF_VEC_SIZE), generator=source, dtype=torch.uint8)
    return codes, sf, _unit(case, name, shape, decode_e4m3(torch.arange(0x7F, dtype=torch.uint8)))


def _saturating_scales(case: Case, name: str, shape: Shape, device: Device) -> Stack:
    """Block scales of 448 or one of the three values below it. Activations need more than 448 and 6 (see _a2_gs)."""
    codes, _, _ = _full_range(case, name, shape, device)
    source = generator(case, f"{name}_sf")
    sf = torch.randint(0x7B, 0x7F, (*shape[:-1], shape[-1] // SF_VEC_SIZE), generator=source, dtype=torch.uint8)
    return codes, sf, _unit(case, name, shape, decode_e4m3(torch.arange(0x7B, 0x7F, dtype=torch.uint8)))


def _unit(case: Case, name: str, shape: tuple[int, int, int], scales: torch.Tensor) -> torch.Tensor:
    """float32 [shape[0]]: global scales that give uniform codes with these block scales the deviation of `normal`."""
    mean_square = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]).square().mean() * scales.square().mean()
    spread = _spread(case, f"{name}_gs", shape[0])
    return (spread * _deviation(name, shape[-1]) / math.sqrt(float(mean_square))).float()


def _spread(case: Case, stream: str, count: int) -> torch.Tensor:
    """[count]: 0.75 to 1.25."""
    return 0.75 + 0.5 * uniform(case, stream, (count,))


def _exact_sums(case: Case, name: str, shape: Shape, device: Device) -> Stack:
    """Small whole numbers times powers of two, whose sums are exact in every order: see `exact`."""
    return exact.exact_stack(case, name)


DISTRIBUTIONS: Final[Mapping[str, Distribution]] = {
    "normal": _normal,
    "full_range": _full_range,
    "saturating_scales": _saturating_scales,
    "zero_blocks": _zero_blocks,
    # Padding holds NaN: the scales of padding rows, and everything else.
    "poisoned_padding": _normal,
    EXACT: _exact_sums,
}


# Rows of a bf16 `full_range` are scaled by 2^-20 to 2^20. f16 can hold neither end.
MAX_ROW_EXPONENT: Final = 20


def _plain(case: Case, name: str, shape: tuple[int, int]) -> torch.Tensor:
    """bf16 activations: N(0, 1) or N(0, 1 / K) as in _normal, with the zeros of _zero_blocks.

    Under `full_range` each row is scaled by a power of two. Under `exact_sums`: see `exact`.
    """
    if case.inputs == EXACT:
        return exact.exact_plain(case, name)
    values = normal(case, name, shape) * _deviation(name, shape[-1])
    if case.inputs == "zero_blocks":
        kept = uniform(case, f"{name}_zero", (shape[0], shape[1] // SF_VEC_SIZE)) < 0.5
        values *= kept.repeat_interleave(SF_VEC_SIZE, dim=-1)
        values[0] = 0
    if case.inputs == "full_range":
        turns = uniform(case, f"{name}_exponent", (shape[0], 1)) * (2 * MAX_ROW_EXPONENT + 1)
        values *= torch.exp2(turns.floor() - MAX_ROW_EXPONENT)
    return values.bfloat16()


def _topk_weights(case: Case) -> torch.Tensor:
    """float32 [tokens, topk]: a softmax over the choices, then 1 for each shared expert. For `exact_sums`, each of the
    former is a power of two."""
    tokens, shared = case.int("tokens"), case.int("shared")
    shape = (tokens, case.int("topk") - shared)
    if case.inputs == EXACT:
        routed = exact.topk_weights(case, shape)
    else:
        routed = normal(case, "topk_weights", shape).double().softmax(dim=1).float()
    return torch.cat((routed, torch.ones(tokens, shared)), dim=1)


def _a2_gs(case: Case) -> torch.Tensor:
    """float32 [num_experts]: a calibrated scale for each expert's activations; 256 times too small for
    saturating_scales; a power of two for exact_sums."""
    if case.inputs == EXACT:
        return exact.a2_gs(case)
    largest = LARGEST_ACTIVATION / (256.0 if case.inputs == "saturating_scales" else 1.0)
    spread = 0.5 + 1.5 * uniform(case, "a2_gs", (case.int("num_experts"),))
    return (spread * largest / (E2M1_MAX * E4M3_MAX)).float()


def _h(case: Case, made: Inputs) -> torch.Tensor:
    """float32 [expert rows, intermediate]: SwiGLU of two N(0, 1); NaN in padding rows if padding is poisoned; half of
    the blocks zero under `zero_blocks`; see `exact` for `exact_sums`."""
    if case.inputs == EXACT:
        return exact.exact_h(case)
    gate, up = (normal(case, name, (expert_rows(case), case.int("intermediate"))) for name in ("gate", "up"))
    h = gate * gate.sigmoid() * up
    if case.inputs == "zero_blocks":
        kept = uniform(case, "h_zero", (len(h), h.shape[1] // SF_VEC_SIZE)) < 0.5
        h *= kept.repeat_interleave(SF_VEC_SIZE, dim=1)
    return _pad_rows(case, made, h, math.nan)


def _rows(case: Case, made: Inputs) -> torch.Tensor:
    """bf16 [expert rows, hidden]: N(0, 1), or whole numbers for `exact_sums`."""
    if case.inputs == EXACT:
        return exact.exact_rows(case)
    return _pad_rows(case, made, normal(case, "rows", (expert_rows(case), case.int("hidden"))).bfloat16(), math.nan)


_EXPERT_ROWS: Final[Mapping[str, Callable[[Case, Inputs], torch.Tensor]]] = {"h": _h, "rows": _rows}


def _a2(case: Case, made: Inputs, stack: Stack) -> Inputs:
    """Requantised activations for the stage l2. Scales of padding rows are NaN if padding is poisoned."""
    codes, sf, _ = stack
    sf = _pad_rows(case, made, sf.squeeze(1), NAN_SCALE)
    return {"a2_codes": codes.squeeze(1), "a2_sf": swizzle_scales(sf, _padding(case))}


def _pad_rows(case: Case, made: Inputs, rows: torch.Tensor, poison: float) -> torch.Tensor:
    if case.inputs == "poisoned_padding":
        padding = torch.ones(len(rows), dtype=torch.bool)
        padding[routing(case, made["topk_ids"]).row] = False
        rows[padding.to(rows.device)] = poison
    return rows


OF_TOKENS = ("x", "x_codes", "x_gs", "topk_ids", "topk_weights")


def tokens_of(case: Case, inputs: Mapping[str, torch.Tensor], chosen: torch.Tensor) -> Inputs:
    """A layer's inputs, cut to the tokens in `chosen` (int64 [n])."""
    cut = {name: inputs[name][chosen] for name in OF_TOKENS if name in inputs}
    if "x_sf" in inputs:
        x_sf = unswizzle_scales(inputs["x_sf"], case.int("tokens"), case.int("hidden") // SF_VEC_SIZE)
        cut["x_sf"] = swizzle_scales(x_sf[chosen])
    return cut


def sample_tokens(case: Case, inputs: Mapping[str, torch.Tensor], share: float) -> Sample | None:
    """`share` of a layer's tokens, spread evenly from the first to the last. None if that is all of them.

    Token inputs are cut to the chosen tokens; weights are the same tensors. `x_sf` is swizzled again, with padding 0.
    """
    tokens = case.int("tokens")
    count = max(1, int(tokens * share))
    if count >= tokens:
        return None
    device = inputs["topk_ids"].device
    chosen = torch.linspace(0, tokens - 1, count, dtype=torch.float64).round().long().to(device)
    cut = tokens_of(case, inputs, chosen)
    axes = tuple((name, count if name == "tokens" else value) for name, value in case.axes)
    return Sample(
        replace(case, axes=axes), {**inputs, **cut}, {"y": chosen}, f"{count} of {tokens} tokens, evenly spread"
    )

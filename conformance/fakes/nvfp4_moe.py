"""A backend and an executor that compute NVFP4 MoE with torch, step by step like a kernel: correctly or with a fault.

They share only the 4-bit and 8-bit conversions with the references, and these have tests of their own. The backend of a
style or a fault is its name in capitals: `conformance.fakes.nvfp4_moe:CORRECT`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

import torch

from conformance.fakes.backends import FakeExecutor, NamedBackend
from megamoe.codec.nvfp4 import (
    decode_e2m1,
    decode_e4m3,
    dequantise,
    encode_e2m1,
    encode_e4m3,
    global_scale,
    quantise,
)
from megamoe.contract import Case, Execution, Program, RunOptions

TILE: Final = 128
# Faults that the judge catches, in words. Each is a common mistake in kernels.
FAULTS: Final[Mapping[str, str]] = {
    "gate_up_swapped": "silu is taken of up, and gate is the factor",
    "neighbour_scale": "the block scales of x are those of the next block along K",
    "wrong_expert": "the last row of every expert goes through the weights of the next one",
    "weight_missing": "the top-k weight is never applied",
    "weight_twice": "the top-k weight is applied twice",
    "weight_of_first_choice": "all choices of a token have the weight of the first",
    "clamp_missing": "gate and up are not clamped",
    "clamp_gate_below": "gate is clamped from below as well",
    "truncated_codes": "codes are rounded towards zero",
    "truncated_scales": "block scales of activations are rounded towards zero",
    "unsaturated_scales": "a block scale above 448 wraps to 256",
    "codes_without_scale": "a block whose scale rounds to 0 has codes of 6",
    "k_block_dropped": "the last 64 of K are left out of the first GEMM",
    "k_block_dropped_l2": "the last 64 of K are left out of the second GEMM",
    "swizzle_ignored": "block scales of w1 are read as if they were linear in an atom",
    "scales_by_column": "block scales of activations are written as if a tile had 32 x 16 of them",
    "padding_leaks": "a padding row, a copy of the last row of its expert, is added to token 0",
    "nibbles_swapped": "the codes of a byte of w2 are swapped",
    "interleave_halved": "gate and up are taken in turns of half as many rows",
    "global_scale_of_first_expert": "the global scale of w2 is that of expert 0",
    "token_scale_of_first_token": "the global scale of x is that of token 0",
    "slice_wraps": "an id of -1 is the last expert",
    "route_dropped": "the last choice of every token is left out",
    "one_wrong_element": "one element of the output is off by a tenth of its row",
    "silu_missing": "h is gate * up",
    "activations_quantised": "bf16 activations are rounded to NVFP4",
    "activations_in_f16": "bf16 activations are rounded to f16",
    "a2_truncated": "bf16 activations are truncated between the two GEMMs",
    "shared_dropped": "the shared experts are left out",
    "shared_doubled": "what the shared experts give is added twice",
    "shared_weighted": "the shared experts have the weight of the first choice",
}
# Faults that pass with the rows of other inputs, within their tolerance, and that `exact_sums` shows.
SMALL_FAULTS: Final[Mapping[str, str]] = {
    "sums_of_13_bits": "sums of both GEMMs are cut to 13 bits after every 64 of K",
    "product_dropped": "the smallest product is left out of one sum of each row of the first GEMM",
    "product_dropped_l2": "the smallest product is left out of one sum of each row of the second GEMM",
    "scale_ulp": "one block scale of w1 is an ulp too large",
    "weight_ulp": "the weights of the first choices are an fp32 ulp too large",
}
SMALL_ROW: Final = 5
"""The row of W1 or of W2 in which a small fault is."""
# Faults that laws catch, and which law. Some are within the judge's tolerance, or right for every case by itself.
LAW_FAULTS: Final[Mapping[str, tuple[str, str]]] = {
    "truncated_codes": (FAULTS["truncated_codes"], "matches_reference"),
    "history_leaks": ("a bit of the output changes from one run to the next", "bitwise_repeatable"),
    "schedule_decides_order": ("choices are added in bf16 in the order in which they complete", "schedule_independent"),
    "tile_position_matters": ("rows in odd places of a tile are 1 % too large", "token_permutation"),
    "expert_number_matters": ("what expert 1 adds is 1 % too large", "expert_permutation"),
    "global_scale_of_first_expert": (FAULTS["global_scale_of_first_expert"], "expert_permutation"),
    "token_count_matters": ("K is cut off at 64 if there are 8 tokens or more", "batch_split"),
    "token_scale_of_first_token": (FAULTS["token_scale_of_first_token"], "batch_split"),
    "zero_weight_adds": ("a weight below 0.01 counts as 0.01", "zero_weight_expert"),
    "global_scale_rounded": ("global scales of weights are multiples of 2**-20", "global_scale_power_of_two"),
    "single_expert_shortcut": ("the rows of a single expert are rounded to e4m3", "dense_equals_one_expert"),
    "fused_rounds_less": ("the layer keeps its rows in fp32, unlike its stages", "fused_equals_unfused"),
    "silu_missing": (FAULTS["silu_missing"], "gate_up_swap_is_noticed"),
}


@dataclass(frozen=True, slots=True)
class Style:
    """Choices that a correct kernel is free to make.

    `k_per_step`: products added at once. `truncate`: sums are truncated to fp32. `reciprocal`: a quotient is a product
    with a reciprocal that is up to `ulps` off.
    """

    k_per_step: int = 1 << 20
    backwards: bool = False
    truncate: bool = False
    reciprocal: bool = False
    ulps: float = 0.0


STYLES: Final[Mapping[str, Style]] = {
    "correct": Style(),
    "stepwise": Style(k_per_step=64),
    "truncating": Style(k_per_step=64, truncate=True),
    "approximate": Style(k_per_step=32, backwards=True, reciprocal=True, ulps=1.0),
    "free": Style(k_per_step=64, backwards=True, truncate=True, reciprocal=True, ulps=1.0),
}


def emulate(case: Case, tensors: Mapping[str, torch.Tensor], name: str, schedule: str = "eager", run: int = 1) -> None:
    """Writes the outputs of `case` into `tensors`, in the style or with the fault `name`."""
    style, fault = STYLES.get(name, Style()), name if name in {**FAULTS, **SMALL_FAULTS, **LAW_FAULTS} else ""
    Kernel(case, tensors, style, fault, schedule, run).write()


@dataclass
class Kernel:
    """One run."""

    case: Case
    tensors: Mapping[str, torch.Tensor]
    style: Style
    fault: str
    schedule: str
    run: int
    noise: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        digest = hashlib.sha256(self.case.id.encode()).digest()
        self.noise = torch.Generator().manual_seed(int.from_bytes(digest[:4], "little"))

    def write(self) -> None:
        """Runs the whole stage. Tensors between stages are outputs or lie in poisoned memory."""
        stage, case = str(self.case["stage"]), self.case
        held = {**self.tensors}
        rows = self.capacity
        if stage == "layer":
            held["a2_codes"] = torch.full((rows, case.int("intermediate") // 2), 0xA5, dtype=torch.uint8)
            held["a2_sf"] = torch.full((rows // TILE, case.int("intermediate") // 64, 512), 0x7F, dtype=torch.uint8)
            held["a2"] = torch.full((rows, case.int("intermediate")), torch.nan, dtype=torch.bfloat16)
            held["rows"] = torch.full((rows, case.int("hidden")), torch.nan)
        if stage in ("layer", "l1"):
            self.l1(held)
        if stage == "requantise":
            for expert, first, routes in self.groups():
                here = slice(first, first + len(routes))
                self.requantise(held, here, held["h"][here], expert)
        if stage in ("layer", "l2"):
            self.l2(held, "float32" if stage == "layer" and self.fault == "fused_rounds_less" else "bfloat16")
        if stage in ("layer", "combine"):
            self.combine(held)
        self.spoil()

    @property
    def capacity(self) -> int:
        routes = self.case.int("tokens") * self.case.int("topk")
        return (routes + 127 * self.case.int("num_experts")) // TILE * TILE

    def groups(self) -> Iterator[tuple[int, int, list[tuple[int, int]]]]:
        """Yields each expert with its first row and its routes (token, choice), in order."""
        first, experts = 0, self.case.int("num_experts")
        routes_of: dict[int, list[tuple[int, int]]] = {expert: [] for expert in range(-1, experts)}
        for t, row in enumerate(self.tensors["topk_ids"].tolist()):
            for k, expert in enumerate(row):
                routes_of[self.named(expert, experts)].append((t, k))
        for expert in range(experts):
            if routes := routes_of[expert]:
                yield expert, first, routes
            first += -(-len(routes) // TILE) * TILE

    def named(self, expert: int, experts: int) -> int:
        return experts - 1 if self.fault == "slice_wraps" and expert < 0 else expert

    # Operands.

    def operand(self, name: str, codes: torch.Tensor, sf: torch.Tensor, first: int = 0) -> torch.Tensor:
        """float64 [rows, K] without global scales, from codes [rows, K / 2] and atoms [row atoms, K atoms, 512].

        `first`: which row of the atoms is row 0 of the codes.
        """
        nibbles = (codes & 15, codes >> 4)
        if self.fault == "nibbles_swapped" and name == "w2":
            nibbles = nibbles[::-1]
        values = decode_e2m1(torch.stack(nibbles, dim=-1).view(len(codes), -1, 16), torch.float64)
        row = torch.arange(first, first + len(codes))[:, None]
        block = torch.arange(values.shape[1])[None, :]
        if self.fault == "neighbour_scale" and name == "x":
            block = (block + 1) % block.shape[1]
        inside = row % 32 * 16 + row // 32 % 4 * 4 + block % 4
        if self.fault == "swizzle_ignored" and name == "w1":
            inside = row % TILE * 4 + block % 4
        scales = sf.take((row // TILE * sf.shape[1] + block // 4) * 512 + inside)
        if self.fault == "scale_ulp" and name == "w1":
            scales[SMALL_ROW, 0] += 1
        return values.mul_(decode_e4m3(scales, torch.float64)[..., None]).flatten(1)

    @property
    def bf16(self) -> bool:
        return self.case["activations"] == "bf16"

    def plain(self, values: torch.Tensor) -> torch.Tensor:
        """bf16 activations as float64 [rows, K]."""
        if self.fault == "activations_in_f16":
            return values.clamp(-65504, 65504).half().double()
        if self.fault == "activations_quantised":
            gs = global_scale(values, per=1)
            return dequantise(*quantise(values, gs), gs).double()
        return values.double()

    def weights(self, held: Mapping[str, torch.Tensor], name: str, expert: int) -> torch.Tensor:
        return self.operand(name, held[f"{name}_codes"][expert], held[f"{name}_sf"][expert])

    def gemm(self, a: torch.Tensor, b: torch.Tensor, k: int | None = None) -> torch.Tensor:
        """fp32 [m, n] of a [m, K] and b [n, K] in float64, in steps along K."""
        a, b = a[:, :k], b[:, :k]
        total = torch.zeros(len(a), len(b))
        size = 64 if self.fault == "sums_of_13_bits" else self.style.k_per_step
        starts = list(range(0, a.shape[1], size))
        for start in reversed(starts) if self.style.backwards else starts:
            step = slice(start, start + size)
            # In fp32, torch's sum of a row depends on the number of rows.
            exact = total.double() + a[:, step] @ b[:, step].mT
            total = exact.float()
            if self.fault == "sums_of_13_bits":
                # An fp32 number has 24 bits.
                total = (total.view(torch.int32) & -(1 << 11)).view(torch.float32)
            if self.style.truncate:
                total = torch.where(total.double().abs() > exact.abs(), total.nextafter(torch.zeros(())), total)
        return total

    def gs(self, values: torch.Tensor, index: int | torch.Tensor) -> torch.Tensor:
        scale = values[index]
        return torch.round(scale * 2**20) / 2**20 if self.fault == "global_scale_rounded" else scale

    # Stages.

    def l1(self, held: Mapping[str, torch.Tensor]) -> None:
        x = self.plain(held["x"]) if self.bf16 else self.operand("x", held["x_codes"], held["x_sf"])
        all_gs = torch.ones(len(x)) if self.bf16 else held["x_gs"]
        cut = {"k_block_dropped": x.shape[1] - 64, "token_count_matters": 64 if len(x) >= 8 else None}.get(self.fault)
        for expert, first, routes in self.groups():
            token = torch.tensor([t for t, _ in routes])
            w1 = self.weights(held, "w1", expert)
            x_gs = all_gs[torch.zeros_like(token) if self.fault == "token_scale_of_first_token" else token]
            scale = (x_gs * self.gs(held["w1_gs"], expert))[:, None]
            both = self.gemm(x[token], w1, cut)
            if self.fault == "product_dropped":
                row = SMALL_ROW + self.case.int("interleave")
                both[:, row] -= smallest(x[token] * w1[row])
            both *= scale
            if self.fault == "wrong_expert":
                other = (expert + 1) % self.case.int("num_experts")
                both[-1:] = self.gemm(x[token[-1:]], self.weights(held, "w1", other)) * scale[-1:]
            h = self.swiglu(both)
            if self.case["weight"] == "before" or self.fault == "weight_twice":
                h = h * self.route_weights(held, routes)
            self.requantise(held, slice(first, first + len(routes)), h, expert)

    def swiglu(self, both: torch.Tensor) -> torch.Tensor:
        turn = self.case.int("interleave") // (2 if self.fault == "interleave_halved" else 1)
        of_gate = torch.arange(both.shape[1]) // turn % 2 == 0
        gate, up = both[:, of_gate], both[:, ~of_gate]
        if self.fault == "gate_up_swapped":
            gate, up = up, gate
        clamp = self.case["clamp"]
        if clamp is not None and self.fault != "clamp_missing":
            gate, up = gate.clamp(max=float(clamp)), up.clamp(-float(clamp), float(clamp))
            if self.fault == "clamp_gate_below":
                gate = gate.clamp(min=-float(clamp))
        exponential = torch.exp2(gate * torch.tensor(-1.4426950408889634))
        if self.fault == "silu_missing":
            return gate * up
        return gate * self.wobble(1.0 / (1.0 + self.wobble(exponential))) * up

    def wobble(self, values: torch.Tensor) -> torch.Tensor:
        """Returns `values`, each up to `ulps` off."""
        if not self.style.ulps:
            return values
        return values * (1 + self.style.ulps * 2.0**-23 * (2 * torch.rand(values.shape, generator=self.noise) - 1))

    def route_weights(self, held: Mapping[str, torch.Tensor], routes: list[tuple[int, int]]) -> torch.Tensor:
        if self.fault == "weight_missing":
            return torch.ones(len(routes), 1)
        routed = self.case.int("topk") - self.case.int("shared")
        first = {"weight_of_first_choice": 0, "shared_weighted": routed}.get(self.fault, self.case.int("topk"))
        tokens, choices = zip(*[(t, 0 if k >= first else k) for t, k in routes], strict=True)
        weight = held["topk_weights"][list(tokens), list(choices)][:, None]
        if self.fault == "weight_ulp":
            weight = torch.where(torch.tensor(choices)[:, None] == 0, weight * (1 + 2.0**-23), weight)
        return weight.clamp(min=1e-2) if self.fault == "zero_weight_adds" else weight

    def requantise(self, held: Mapping[str, torch.Tensor], here: slice, h: torch.Tensor, expert: int) -> None:
        """Requantises h [n, intermediate] into rows `here` of a2, or of a2_codes and a2_sf."""
        if self.bf16:
            if self.fault == "a2_truncated":
                h = (h.view(torch.int32) & -(1 << 16)).view(torch.float32)
            held["a2"][here] = h.bfloat16()
            return
        gs = held["a2_gs"][expert]
        block = h.view(len(h), -1, 16)
        largest = block.abs().amax(dim=-1)
        raw = largest * torch.tensor(1 / 6) * self.wobble(1 / gs) if self.style.reciprocal else largest / 6 / gs
        sf = encode_e4m3(raw)
        if self.fault == "truncated_scales":
            sf = torch.where(decode_e4m3(sf) > raw, sf - 1, sf)
        if self.fault == "unsaturated_scales":
            sf = torch.where(raw > 448, 0x78, sf).byte()
        step = (decode_e4m3(sf) * gs)[..., None]
        scaled = block * self.wobble(1 / step) if self.style.reciprocal else block / step
        nothing = 6.0 if self.fault == "codes_without_scale" else 0.0
        scaled = torch.where(step > 0, scaled, nothing).nan_to_num()
        codes = encode_e2m1(scaled)
        if self.fault == "truncated_codes":
            codes = torch.where(decode_e2m1(codes).abs() > scaled.abs(), codes - 1, codes)
        codes = codes.view(len(h), -1)
        held["a2_codes"][here] = codes[:, 0::2] | codes[:, 1::2] << 4
        row = torch.arange(here.start, here.stop)[:, None]
        j = torch.arange(sf.shape[1])[None, :]
        inside = row % 32 * 16 + row // 32 % 4 * 4 + j % 4
        if self.fault == "scales_by_column":
            inside = row % TILE + j % 4 * TILE
        held["a2_sf"][row // TILE, j // 4, inside] = sf

    def l2(self, held: dict[str, torch.Tensor], dtype: str) -> None:
        if dtype == "bfloat16" and "rows" not in self.tensors:
            held["rows"] = held["rows"].bfloat16()
        cut = self.case.int("intermediate") - 64 if self.fault == "k_block_dropped_l2" else None
        for expert, first, routes in self.groups():
            here = slice(first, first + len(routes))
            w2_gs = self.gs(held["w2_gs"], 0 if self.fault == "global_scale_of_first_expert" else expert)
            scale = w2_gs if self.bf16 else held["a2_gs"][expert] * w2_gs
            if self.bf16:
                a = self.plain(held["a2"][here])
            else:
                a = self.operand("a2", held["a2_codes"][here], held["a2_sf"], first)
            w2 = self.weights(held, "w2", expert)
            rows = self.gemm(a, w2, cut)
            if self.fault == "product_dropped_l2":
                rows[:, SMALL_ROW] -= smallest(a * w2[SMALL_ROW])
            rows *= scale
            if self.fault == "tile_position_matters":
                rows[1::2] *= 1.01
            if self.fault == "expert_number_matters" and expert == 1:
                rows *= 1.01
            if self.fault == "single_expert_shortcut" and self.case.int("num_experts") == 1:
                rows = rows.to(torch.float8_e4m3fn).float()
            held["rows"][here] = rows.to(held["rows"].dtype)

    def combine(self, held: Mapping[str, torch.Tensor]) -> None:
        row_of = {route: first + i for _, first, routes in self.groups() for i, route in enumerate(routes)}
        y = torch.zeros(self.case.int("tokens"), self.case.int("hidden"))
        late = self.fault == "schedule_decides_order"
        for k in range(self.case.int("topk"))[:: -1 if late and self.schedule != "eager" else 1]:
            shared = k >= self.case.int("topk") - self.case.int("shared")
            if (self.fault == "route_dropped" and k == self.case.int("topk") - 1) or (
                self.fault == "shared_dropped" and shared
            ):
                continue
            routes = [(t, k) for t in range(len(y)) if (t, k) in row_of]
            if not routes:
                continue
            rows = held["rows"][[row_of[route] for route in routes]].float()
            if self.case["weight"] == "after" or self.fault == "weight_twice":
                rows = rows * self.route_weights(held, routes)
            y[[t for t, _ in routes]] += 2 * rows if shared and self.fault == "shared_doubled" else rows
            y = y.bfloat16().float() if late else y
        if self.fault == "padding_leaks":
            ends = [first + len(routes) - 1 for _, first, routes in self.groups() if len(routes) % TILE]
            y[0] += held["rows"][ends].float().sum(dim=0)
        self.tensors["y"].copy_(y)

    def spoil(self) -> None:
        """Applies faults to the stored outputs, in any stage."""
        for name in ("y", "rows"):
            if name in self.tensors and (name != "rows" or self.case["stage"] == "l2"):
                out = self.tensors[name]
                if self.fault == "one_wrong_element":
                    out[0, 3] += 0.1 * out[0].float().square().mean().sqrt()
                if self.fault == "history_leaks":
                    out.view(torch.int16)[0, 0] ^= self.run & 1


@dataclass
class FakeDevice(FakeExecutor):
    """Computes on a CUDA device, so that the judge has large rows there: results/records/planted."""

    device: str = "cuda"

    def run(self, program: Program, tensors: Mapping[str, torch.Tensor], options: RunOptions) -> Execution:
        """See FakeExecutor."""
        with torch.device(self.device):
            return super().run(program, tensors, options)


def smallest(products: torch.Tensor) -> torch.Tensor:
    """float32 [n]: the product [n, K] of each row that is smallest in magnitude but not 0; 0 if all are."""
    size = products.abs().masked_fill(products == 0, torch.inf)
    return products.gather(1, size.argmin(dim=1, keepdim=True)).squeeze(1).float()


EXECUTOR = FakeExecutor(emulate)
DEVICE = FakeDevice(emulate)
BACKENDS = {name: NamedBackend(name, "nvfp4_moe") for name in (*FAULTS, *SMALL_FAULTS, *LAW_FAULTS, *STYLES)}
globals().update({name.upper(): backend for name, backend in BACKENDS.items()})

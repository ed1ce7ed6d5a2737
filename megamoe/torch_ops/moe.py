"""megamoe.moe: an NVFP4 Mixture-of-Experts layer as a PyTorch operator, with the kernels of op nvfp4_moe.

    weights = megamoe.load_moe_weights("checkpoint/").to("cuda")
    y = megamoe.moe(x, weights, topk_ids, topk_weights)

Nothing waits for the device. The first call converts the weights to the kernels' layout, and later calls do so again
when the weights have changed. On a CPU the virtual machine executes the kernels' PTX. docs/torch.md lists what is not
supported.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from importlib.util import find_spec
from typing import Literal

import torch

from megamoe.codec.nvfp4 import (
    E2M1_MAX,
    E4M3_MAX,
    SF_VEC_SIZE,
    deinterleave,
    dequantise,
    global_scale,
    interleave,
    quantise,
    swizzle_scales,
    swizzled_shape,
    unswizzle_scales,
)
from megamoe.contract.counted import counted
from megamoe.torch_ops.calls import (
    ALIGNMENT,
    OpCall,
    Output,
    Wanted,
    call_for,
    forget_layouts,
    require_kinds,
    require_one_device,
    with_defaults,
    without_derivatives,
)

MAX_CALLS = 1024
ROWS_PER_TILE = 128
MAX_MACHINE_WORK = 1 << 26
"""Row tiles of experts times hidden times intermediate: three experts of 7168 x 3072. The machine runs tiles one by
one."""
CUT = 1.25
"""How far above the largest number a call may go before it warns. A code's own rounding is off by a fifth."""
INTERLEAVE = 8
"""w1 alternates between this many rows of gate and of up."""
STACKS = ("w1_codes", "w1_sf", "w1_gs", "w2_codes", "w2_sf", "w2_gs", "a2_gs")
TENSORS = "x, topk_ids, topk_weights and the weights"
PREPARED = ("w1_codes", "w1_sf", "w2_codes", "w2_sf")
"""The stacks that kernels may convert to their own layout."""
INPUTS = ("x_codes", "x_sf", "x_gs", *STACKS, "topk_ids", "topk_weights")
BF16_INPUTS = ("x", *(name for name in STACKS if name != "a2_gs"), "topk_ids", "topk_weights")


@dataclass(frozen=True, slots=True)
class MoeWeights:
    """The experts of a layer in NVFP4, as in specs/nvfp4_moe.yaml; `e` counts this rank's experts and the shared ones.

    `w1_codes` u8 [e, 2 intermediate, hidden / 2] and `w2_codes` u8 [e, hidden, intermediate / 2]: two codes a byte.
    `w1_sf` u8 [e, 2 intermediate / 128, hidden / 64, 512], `w2_sf` u8 [e, hidden / 128, intermediate / 64, 512]: e4m3
    block scales, swizzled. w1 alternates between `interleave` rows of gate and of up. `w1_gs`, `w2_gs` f32 [e]: global
    scales. `a2_gs` f32 [e]: global scale of each expert's activations between the two GEMMs. `x_gs` f32 [1]: global
    scale of the layer's input; or [0]: each token gets its own, from its largest element. For bf16 activations a2_gs
    may be [0], too. The last `shared` experts are visited by every token. A tensor that is not contiguous, or a stack
    that does not begin at a multiple of 16 bytes of its storage, is copied once, here.
    """

    w1_codes: torch.Tensor
    w1_sf: torch.Tensor
    w1_gs: torch.Tensor
    w2_codes: torch.Tensor
    w2_sf: torch.Tensor
    w2_gs: torch.Tensor
    a2_gs: torch.Tensor
    x_gs: torch.Tensor
    interleave: int = INTERLEAVE
    shared: int = 0

    def __post_init__(self) -> None:
        # A call would copy them each time, and convert each copy to the kernels' layout.
        if not 0 <= self.shared <= len(self.w1_codes):
            raise ValueError(
                f"shared is {self.shared}; of {counted(len(self.w1_codes), 'expert')} none to all can be shared"
            )
        for name, one in zip((*STACKS, "x_gs"), self.tensors(), strict=True):
            shifted = name in PREPARED and one.storage_offset() * one.element_size() % ALIGNMENT
            if shifted or not one.is_contiguous():
                object.__setattr__(self, name, one.clone(memory_format=torch.contiguous_format))

    @classmethod
    def quantised(
        cls, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, largest_activation: torch.Tensor,
        largest_input: float | None = None,
    ) -> MoeWeights:  # fmt: skip
        """Quantises gate and up [e, intermediate, hidden] and down [e, hidden, intermediate], of any floating dtype.

        `largest_activation` [e]: the largest magnitude between the two GEMMs, from calibration. `largest_input`: the
        same for x. Larger values in a call are clipped to these; only a call on a CPU warns about it.
        """
        w1 = interleave(gate, up, INTERLEAVE)
        w1_gs, w2_gs = global_scale(w1, per=1), global_scale(down, per=1)
        (w1_codes, w1_sf), (w2_codes, w2_sf) = quantise(w1, w1_gs), quantise(down, w2_gs)
        a2_gs = global_scale(largest_activation.to(gate.device)[:, None], per=1)
        x_gs = torch.empty(0, device=gate.device)
        if largest_input is not None:
            x_gs = global_scale(torch.tensor([[float(largest_input)]], device=gate.device), per=1)
        return cls(
            w1_codes, swizzle_scales(w1_sf), w1_gs, w2_codes, swizzle_scales(w2_sf), w2_gs, a2_gs, x_gs
        )  # fmt: skip

    @property
    def num_experts(self) -> int:
        """Number of this rank's experts that topk_ids may name."""
        return self.w1_codes.shape[0] - self.shared

    @property
    def hidden(self) -> int:
        """Width of x and y."""
        return self.w2_codes.shape[1]

    @property
    def intermediate(self) -> int:
        """Width between the two GEMMs."""
        return self.w1_codes.shape[1] // 2

    def tensors(self) -> list[torch.Tensor]:
        """The tensors in the order of the fields."""
        return [getattr(self, name) for name in (*STACKS, "x_gs")]

    def to(self, device: torch.device | str | int) -> MoeWeights:
        """The same weights on `device`."""
        return replace(self, **{name: getattr(self, name).to(device) for name in (*STACKS, "x_gs")})

    def changed(self) -> None:
        """Declares that numbers have changed in a way that torch does not track, for example through `.data`.

        The next call converts the weights to the kernels' layout again, including views such as `experts`. Replaced
        tensors and in-place changes that torch tracks need no such call.
        """
        forget_layouts(getattr(self, name) for name in PREPARED)

    def experts(self, first: int, count: int) -> MoeWeights:
        """The weights of experts `first` to `first + count - 1`, without shared ones, for one rank of several.

        Returns views, no copies.
        """
        if not 0 <= first < first + count <= self.num_experts:
            raise ValueError(f"experts {first} to {first + count - 1} of {self.num_experts}")
        return replace(self, shared=0, **{name: getattr(self, name)[first : first + count] for name in STACKS})

    def dequantised(self, expert: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """gate and up f32 [intermediate, hidden], down f32 [hidden, intermediate]: the stored numbers.

        Shared experts have the numbers from num_experts on.
        """
        rows, hidden, width = 2 * self.intermediate, self.hidden, self.intermediate
        w1_sf = unswizzle_scales(self.w1_sf[expert], rows, hidden // SF_VEC_SIZE)
        w2_sf = unswizzle_scales(self.w2_sf[expert], hidden, width // SF_VEC_SIZE)
        both = dequantise(self.w1_codes[expert], w1_sf, self.w1_gs[expert])
        gate, up = deinterleave(both, self.interleave)
        return gate, up, dequantise(self.w2_codes[expert], w2_sf, self.w2_gs[expert])

    def swiglu(self, x: torch.Tensor, expert: int, clamp: float | None = None) -> torch.Tensor:
        """silu(gate) * up f32 [tokens, intermediate] for tokens x [tokens, hidden]: what is requantised, unweighted.

        Computed in float32 from the stored numbers; x is not quantised. Its largest magnitude over a sample of tokens
        is the largest_activation for `quantised`.
        """
        gate, up, _ = self.dequantised(expert)
        gated, upped = x.float() @ gate.T, x.float() @ up.T
        if clamp is not None:
            gated, upped = gated.clamp(max=clamp), upped.clamp(-clamp, clamp)
        return torch.nn.functional.silu(gated) * upped


_LIBRARY = torch.library.Library("megamoe", "FRAGMENT")
_LIBRARY.define(
    "moe(Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor[] weights, int interleave=8, float? clamp=None, "
    "bool weigh_before=False, str? backend=None, int shared=0, bool bf16=False) -> Tensor",
    tags=torch.Tag.needs_exact_strides,
)


_DEFAULTS = (INTERLEAVE, None, False, None, 0, False)
_KINDS = {"clamp": "float?", "backend": "str?"}


def moe(
    x: torch.Tensor, weights: MoeWeights, topk_ids: torch.Tensor, topk_weights: torch.Tensor, *,
    clamp: float | None = None, weight: Literal["after", "before"] = "after", backend: str | None = None,
    activations: Literal["nvfp4", "bf16"] = "nvfp4",
) -> torch.Tensor:  # fmt: skip
    """y[t] = sum over k of w[t, k] * W2[e] requantise(silu(gate) * up); e = topk_ids[t, k], gate and up are W1[e] x[t].

    x bf16 [tokens, hidden]; topk_ids int32 or int64 [tokens, topk], distinct in a row, -1 for an expert of another
    rank; topk_weights f32 [tokens, topk]. Returns y bf16 [tokens, hidden]. Shared experts of `weights` are added for
    every token with weight 1, and topk_ids do not name them. `clamp`: limits gate from above and up from both sides.
    `weight`: whether w multiplies rows of W2, or what is requantised. `activations`: "nvfp4" quantises x here, and the
    values between the GEMMs; with "bf16" both stay bf16. `backend`: as for megamoe.attention. The first call with a new
    number of tokens builds and loads its kernels. A token that is not finite goes unnoticed. So does, on a device, an
    id beyond the experts or a number clipped to the largest ones of `weights`, because a check would wait for the
    device. On a CPU such an id raises ValueError, and such a number warns with RuntimeWarning.

    Raises ValueError for unsupported tensors or sizes; UnsupportedError if no backend has the kernel here; RuntimeError
    if a tensor requires a gradient or has a tangent.
    """
    if weight not in ("after", "before"):
        raise ValueError(f"weight is {weight!r}; it is 'after' or 'before'")
    bf16 = stay_bf16(activations)
    if not isinstance(weights, MoeWeights):
        raise ValueError(f"weights is a {type(weights).__name__}; make MoeWeights of them, or load_moe_weights(...)")
    require_kinds(
        {"x": x, "topk_ids": topk_ids, "topk_weights": topk_weights, "clamp": clamp, "backend": backend}, _KINDS
    )
    tensors = weights.tensors()
    require_one_device(TENSORS, (x, topk_ids, topk_weights, *tensors))
    options = (weights.interleave, clamp, weight == "before", backend, weights.shared, bf16)
    return torch.ops.megamoe.moe.default(x, topk_ids, topk_weights, tensors, *options)


def stay_bf16(activations: str) -> bool:
    """Whether `activations` is "bf16". Raises ValueError if it is neither that nor "nvfp4"."""
    if activations not in ("nvfp4", "bf16"):
        raise ValueError(f"activations is {activations!r}; it is 'nvfp4' or 'bf16'")
    return activations == "bf16"


def _moe(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    weights: Sequence[torch.Tensor],
    *options: object,
) -> torch.Tensor:
    given = (x, topk_ids, topk_weights, *weights)
    call = _made(
        tuple(one.shape for one in given), tuple(one.dtype for one in given), tuple(one.get_device() for one in given),
        options,
    )  # fmt: skip
    if not len(x):
        return call((x,))[0]
    *stacks, x_gs = weights
    shared, bf16 = with_defaults(options, _DEFAULTS)[4:]
    if not x.is_cuda:
        _look_at(x, topk_ids, topk_weights, weights, options)
    if topk_ids.dtype != torch.int32:
        # The cast alone would turn an id that exceeds 32 bits into another expert.
        topk_ids = topk_ids.clamp(-1, len(stacks[0])).to(torch.int32)
    if shared:
        topk_ids, topk_weights = _with_shared(topk_ids, topk_weights, len(stacks[0]), int(shared))
    if bf16:
        return call((x.contiguous(), *stacks[:-1], topk_ids, topk_weights))[0]
    return call((*_tokens(x.contiguous(), x_gs), *stacks, topk_ids, topk_weights))[0]


def _look_at(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    weights: Sequence[torch.Tensor],
    options: tuple[object, ...],
) -> None:
    """On a CPU, raises ValueError for experts that do not exist, and warns (RuntimeWarning) about clipped numbers."""
    interleaved, clamp, before, _, shared, bf16 = with_defaults(options, _DEFAULTS)
    held = MoeWeights(*weights, interleave=interleaved, shared=shared)
    if int(topk_ids.max()) >= held.num_experts:
        token = int((topk_ids >= held.num_experts).any(dim=1).nonzero()[0])
        raise ValueError(
            f"topk_ids of token {token} are {topk_ids[token].tolist()}; experts are 0 to {held.num_experts - 1}, and "
            f"-1 is one of another rank"
        )
    if bf16:
        return
    largest_input = held.x_gs * (E2M1_MAX * E4M3_MAX)
    largest = held.a2_gs * (E2M1_MAX * E4M3_MAX)
    visited = x if shared else x[(topk_ids >= 0).any(dim=1)]
    if len(largest_input) and len(visited):
        _warn_of_cut("x", "largest_input", visited, float(largest_input))
    for expert in range(held.num_experts + shared):
        chosen = topk_ids == expert if expert < held.num_experts else torch.ones_like(topk_ids, dtype=torch.bool)
        visits = chosen.any(dim=1)
        if not visits.any():
            continue
        seen = held.swiglu(x[visits], expert, clamp)
        if before and expert < held.num_experts:
            seen = seen * torch.where(chosen, topk_weights, 0.0).sum(dim=1)[visits, None]
        what = f"what lies between the GEMMs of expert {expert}"
        _warn_of_cut(what, "largest_activation", seen, float(largest[expert]))


def _warn_of_cut(what: str, name: str, numbers: torch.Tensor, most: float) -> None:
    # A number that is not finite must not hide other tokens' numbers.
    if (reached := float(numbers.abs().where(numbers.isfinite(), 0.0).max())) > CUT * most:
        warnings.warn(
            f"{what} reaches {reached:.4g}, and {name} says {most:.4g}: what is larger is cut to that. Calibrate "
            f"{name}, or choose it larger",
            RuntimeWarning,
            stacklevel=2,
        )


def _with_shared(
    topk_ids: torch.Tensor, topk_weights: torch.Tensor, experts: int, shared: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token's choices, followed by the last `shared` experts with weight 1."""
    names = torch.arange(experts - shared, experts, dtype=topk_ids.dtype, device=topk_ids.device)
    ones = topk_weights.new_ones(len(topk_weights), shared)
    return torch.cat((topk_ids, names.expand(len(topk_ids), -1)), dim=1), torch.cat((topk_weights, ones), dim=1)


def _tokens(x: torch.Tensor, x_gs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, swizzled block scales and global scales of x."""
    if x.is_cuda and _has_triton():
        from megamoe.torch_ops.quantise import quantised_tokens

        with torch.cuda.device_of(x):
            return quantised_tokens(x, x_gs)
    gs = x_gs.expand(len(x)).contiguous() if len(x_gs) else global_scale(x, per=1)
    codes, sf = quantise(x, gs, check=False)
    return codes, swizzle_scales(sf), gs


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


@lru_cache(maxsize=MAX_CALLS)
def _made(
    shapes: tuple[torch.Size, ...],
    dtypes: tuple[torch.dtype, ...],
    devices: tuple[int, ...],
    options: tuple[object, ...],
) -> OpCall:
    interleaved, clamp, before, backend, shared, bf16 = with_defaults(options, _DEFAULTS)
    _check(shapes, dtypes, bf16)
    if len(set(devices)) > 1:
        raise ValueError(f"{TENSORS} must be on one device")
    (tokens, hidden), (_, topk), num_experts, intermediate = shapes[0], shapes[1], shapes[3][0], shapes[3][1] // 2
    topk += shared
    row_tiles = min(num_experts, tokens * topk) + tokens * topk // ROWS_PER_TILE
    return call_for(
        Wanted(
            op="nvfp4_moe",
            axes={
                "hidden": hidden,
                "intermediate": intermediate,
                "num_experts": num_experts,
                "tokens": tokens,
                "topk": topk,
                "weight": "before" if before else "after",
                "clamp": clamp,
                "interleave": interleaved,
                "shared": shared,
                "activations": "bf16" if bf16 else "nvfp4",
            },
            inputs=BF16_INPUTS if bf16 else INPUTS,
            weights=PREPARED,
            outputs=(Output("y", (tokens, hidden), torch.bfloat16),),
            work=row_tiles * hidden * intermediate,
            bound=MAX_MACHINE_WORK,
            unit=f"tiles of {ROWS_PER_TILE} rows of experts x hidden x intermediate",
            device=devices[0],
            backend=backend,
        )
    )


def _check(shapes: Sequence[torch.Size], dtypes: Sequence[torch.dtype], bf16: bool) -> None:
    """Raises ValueError if the tensors do not form one layer. The text names the first that is wrong."""
    x, ids = shapes[0], shapes[1]
    if len(x) != 2 or len(ids) != 2 or len(shapes) != 3 + len(STACKS) + 1:
        raise ValueError(f"x is [tokens, hidden] and topk_ids [tokens, topk]; given: {list(x)} and {list(ids)}")
    if dtypes[1] not in (torch.int32, torch.int64):
        raise ValueError(f"topk_ids are {dtypes[1]}; they must be torch.int32 or torch.int64")
    w1 = shapes[3]
    if len(w1) != 3:
        raise ValueError(f"w1_codes has shape {list(w1)}; it is [experts, 2 * intermediate, hidden / 2]")
    experts, intermediate, hidden = w1[0], w1[1] // 2, x[1]
    byte, real = torch.uint8, torch.float32
    wanted: list[tuple[str, torch.dtype, tuple[int, ...]]] = [
        ("x", torch.bfloat16, (x[0], hidden)),
        ("topk_ids", dtypes[1], (x[0], ids[1])),
        ("topk_weights", real, (x[0], ids[1])),
        ("w1_codes", byte, (experts, 2 * intermediate, hidden // 2)),
        ("w1_sf", byte, (experts, *swizzled_shape(2 * intermediate, hidden // SF_VEC_SIZE))),
        ("w1_gs", real, (experts,)),
        ("w2_codes", byte, (experts, hidden, intermediate // 2)),
        ("w2_sf", byte, (experts, *swizzled_shape(hidden, intermediate // SF_VEC_SIZE))),
        ("w2_gs", real, (experts,)),
        ("a2_gs", real, (0,) if bf16 and not shapes[-2][0] else (experts,)),
        ("x_gs", real, (min(1, shapes[-1][0]),)),
    ]
    for (name, dtype, shape), seen, found in zip(wanted, shapes, dtypes, strict=True):
        if tuple(seen) != shape or found != dtype:
            raise ValueError(f"{name} is {found} {list(seen)}; for x of {list(x)} it must be {dtype} {list(shape)}")


def _fake(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    weights: Sequence[torch.Tensor],
    *options: object,
) -> torch.Tensor:
    given = (x, topk_ids, topk_weights, *weights)
    _check([one.shape for one in given], [one.dtype for one in given], with_defaults(options, _DEFAULTS)[5])
    require_one_device(TENSORS, given)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("moe", _moe, _key)
_LIBRARY.impl("moe", without_derivatives("moe", torch.ops.megamoe.moe.default), "Autograd", with_keyset=True)
torch.library.register_fake("megamoe::moe", _fake, lib=_LIBRARY)

"""An executor that calls peers on CPU tensors, and stand-ins for the foreign modules that peers call.

A stand-in computes in float32 and notes how it was called. Its masks follow the manual of its project. Tests with
stand-ins check our side of the call: layouts, masks, scales, results put back. They say nothing about the foreign
kernels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import ModuleType, SimpleNamespace

import pytest
import torch

from megamoe.contract import AnyProgram, Execution, PythonProgram, RunOptions, Target

Tensors = Mapping[str, torch.Tensor]
Call = dict[str, object]

NVFP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass
class PeersOnCpu:
    """Prepares, enqueues and collects a PythonProgram, `replays` times over."""

    name: str = "peers-on-cpu"
    replays: int = 2

    def unavailable(self, target: Target) -> str | None:
        return None

    def run(self, program: AnyProgram, tensors: Tensors, options: RunOptions) -> Execution:
        assert isinstance(program, PythonProgram), "peers give PythonProgram"
        call = program.prepare(tensors)
        for name in options.outputs or ():
            assert tensors[name].shape, f"output {name} has no axes"
        for _ in range(self.replays):
            call.enqueue()
            call.collect()
        return Execution()


EXECUTOR = PeersOnCpu()


@dataclass
class Faults:
    """Mistakes of a stand-in that the judge must notice.

    `scale`: factor on the scale of the logits. `shift`: keys by which a mask is off. `lse_base_2`: lse is a logarithm
    to base 2. `stale`: a second call changes no result. `row`: rows by which the result of a GEMM is shifted.
    """

    scale: float = 1.0
    shift: int = 0
    lse_base_2: bool = False
    stale: bool = False
    row: int = 0


@dataclass
class Foreign:
    """The state that the stand-ins share: their faults, and notes of their calls."""

    faults: Faults = field(default_factory=Faults)
    calls: list[tuple[str, Call]] = field(default_factory=list)
    _kept: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def note(self, name: str, call: Call) -> None:
        self.calls.append((name, call))

    def called(self, name: str) -> list[Call]:
        """Arguments of every call of `name`."""
        return [call for known, call in self.calls if known == name]

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, left: int | None, right: int | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns o and natural lse [b, h, t] of q [b, h, t, d]. Row p sees key j if p - left <= j <= p + right,
        bottom-right."""
        if self.faults.stale and self._kept:
            return self._kept[0]
        group = q.shape[1] // k.shape[1]
        k, v = (tensor.repeat_interleave(group, dim=1).float() for tensor in (k, v))
        t, s_k = q.shape[2], k.shape[2]
        position = torch.arange(t)[:, None] + s_k - t + self.faults.shift
        key = torch.arange(s_k)
        seen = torch.ones(t, s_k, dtype=torch.bool)
        if left is not None:
            seen &= key >= position - left
        if right is not None:
            seen &= key <= position + right
        s = (q.float() @ k.mT * (scale * self.faults.scale)).masked_fill(~seen, -math.inf)
        lse = torch.logsumexp(s, dim=-1)
        p = torch.exp(s - lse.masked_fill(lse == -math.inf, 0.0)[..., None])
        self._kept = [((p @ v).bfloat16(), lse / math.log(2.0) if self.faults.lse_base_2 else lse)]
        return self._kept[0]


def install(monkeypatch: pytest.MonkeyPatch, faults: Faults | None = None) -> Foreign:
    """Replaces every foreign module, and torch's CUDA operators, by stand-ins of version 0.0."""
    foreign = Foreign(faults or Faults())
    monkeypatch.setattr("backends.peers.peer.version", lambda name: "0.0")
    for name, stand_in in _operators(foreign).items():
        monkeypatch.setattr(torch.ops.aten, name, stand_in, raising=False)
    for name, attributes in _modules(foreign).items():
        module = ModuleType(name)
        module.__dict__.update(attributes)
        monkeypatch.setitem(__import__("sys").modules, name, module)
    return foreign


def _operators(foreign: Foreign) -> dict[str, object]:
    """torch's operators (native_functions.yaml). cuDNN gives lse a last axis of 1; the memory-efficient one pads it."""

    def cudnn(q, k, v, attn_bias, compute_log_sumexp, dropout_p, is_causal, *, scale):
        foreign.note("cudnn", {"bias": attn_bias, "dropout": dropout_p, "q": q.shape, "lse": compute_log_sumexp})
        # Top-left and bottom-right are the same if there are as many keys as rows.
        assert not is_causal or q.shape[2] == k.shape[2], "cuDNN's causal mask in torch is aligned top-left"
        o, lse = foreign.attend(q, k, v, scale, None, 0 if is_causal else None)
        return o, lse[..., None], None, None

    def flash(q, k, v, cum_q, cum_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *, scale, **window):
        foreign.note("flash", {"cum": (cum_q, cum_k), "max": (max_q, max_k), "dropout": dropout_p, **window})
        o, lse = _second(foreign, q, k, v, scale, *_flash_window(is_causal, tuple(window.values()) or (-1, -1)))
        return o, lse, None, None, None

    def efficient(q, k, v, bias, cu_q, cu_k, max_q, max_k, dropout_p, mask, compute_log_sumexp, *, scale):
        foreign.note("efficient", {"mask": mask, "dropout": dropout_p})
        assert q.shape[2] == k.shape[2], "the memory-efficient kernel has no GQA"
        o, lse = _second(foreign, q, k, v, scale, None, {0: None, 2: 0}[mask])
        return o, torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=math.inf), None, None

    return {
        "_scaled_dot_product_cudnn_attention": cudnn,
        "_flash_attention_forward": flash,
        "_efficient_attention_forward": efficient,
    }


def _modules(foreign: Foreign) -> dict[str, Mapping[str, object]]:
    return {
        **_fa3(foreign),
        **_fa4(foreign),
        **_cudnn_frontend(foreign),
        "humming": {},
        "humming.layer": {"HummingLayer": lambda **options: HummingLayerStandIn(foreign, **options)},
        "humming.tune": {"get_heuristics_config": _tuned},
    }


def _tuned(config: object, shape_m: int, gemm_type: str) -> dict[str, object]:
    """Returns a configuration for `shape_m` rows."""
    block_m = next(rows for rows in (8, 16, 64) if shape_m <= 4 * rows or rows == 64)
    return {"for": (config, gemm_type), "block_m": block_m}


def _fa3(foreign: Foreign) -> dict[str, Mapping[str, object]]:
    def plan(batch, t, s_k, heads, kv_heads, hd, lengths, **options):
        foreign.note(
            "fa3.plan", {"shape": (batch, t, s_k, heads, kv_heads, hd), "lengths": lengths.tolist(), **options}
        )
        return torch.zeros(batch, dtype=torch.int32)

    def attend(q, k, v, *, cache_seqlens, softmax_scale, causal, return_softmax_lse, **options):
        assert all(tensor.stride(-1) == 1 for tensor in (q, k, v)), "the last dimension must be contiguous"
        foreign.note("fa3", {"lengths": cache_seqlens.tolist(), "causal": causal, **options})
        return (*_second(foreign, q, k, v, softmax_scale, *_flash_window(causal, (-1, -1))), None, None)

    return {"fa3_fwd_interface": {"get_scheduler_metadata": plan, "flash_attn_with_kvcache": attend}}


def _fa4(foreign: Foreign) -> dict[str, Mapping[str, object]]:
    def attend(q, k, v, *, softmax_scale, causal, window_size, return_lse, **options):
        foreign.note("fa4", {"window_size": window_size, "causal": causal, **options})
        left, right = (-1 if side is None else side for side in window_size)
        o, lse = _second(foreign, q, k, v, softmax_scale, *_flash_window(causal, (left, right)))
        return o, lse if return_lse else None

    return {"flash_attn": {}, "flash_attn.cute": {"flash_attn_func": attend}}


def _cudnn_frontend(foreign: Foreign) -> dict[str, Mapping[str, object]]:
    def attend(q, k, v, is_causal, causal_bottom_right, scale_softmax, window_size_left=None):
        foreign.note("cudnn-frontend", {"causal": is_causal, "window": window_size_left, "q": q.shape})
        assert is_causal or window_size_left is None, "a window without causal is aligned top-left"
        assert causal_bottom_right == is_causal, "causal alone is aligned top-left"
        o, lse = foreign.attend(q, k, v, scale_softmax, window_size_left, 0 if is_causal else None)
        return {"o_tensor": o.transpose(1, 2).contiguous().transpose(1, 2), "lse_tensor": lse}

    return {"cudnn": {}, "cudnn.sdpa": {}, "cudnn.sdpa.fwd": {"sdpa_fwd_wrapper_dsl_sm90": attend}}


def _flash_window(causal: bool, window: Sequence[int]) -> tuple[int | None, int | None]:
    """(left, right) as flash-attention's manual defines them: -1 is infinite, causal means a right of 0."""
    left, right = window
    return None if left < 0 else left, 0 if causal else None if right < 0 else right


def _second(
    foreign: Foreign,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    left: int | None,
    right: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs Foreign.attend on [b, t, h, d]."""
    o, lse = foreign.attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), scale, left, right)
    return o.transpose(1, 2), lse


def _check_ranges(tuning: object, rows: object) -> None:
    """Raises where humming's launcher does (launcher.cpp, find_kernel_configs_target_index).

    A configuration by itself fits any number of rows. One of a list fits numbers of rows above its first number, up to
    its second. The launcher looks up a single row first, then the rows of the call.
    """
    for wanted in (1, rows):
        if isinstance(tuning, list) and not any(low < wanted <= high for low, high, _ in tuning):
            raise RuntimeError("shape_m is not within any range defined in configs.")


class HummingLayerStandIn:
    """modelopt's NVFP4: weight u8 [E, N, K / 2], weight_scale e4m3 [E, N, K / 16], weight_scale_2 f32 [E]."""

    def __init__(self, foreign: Foreign, **options: object) -> None:
        self.foreign, self.options = foreign, SimpleNamespace(**options)
        self.humming_config: object = None
        foreign.note("humming.layer", options)

    def to(self, device: torch.device) -> HummingLayerStandIn:
        return self

    def load_from_tensors(self, tensors: Tensors) -> None:
        assert tensors["weight_scale"].dtype == torch.float8_e4m3fn, "block scales are e4m3"
        table = torch.tensor([*NVFP4_VALUES, *(-value for value in NVFP4_VALUES)])
        weight = tensors["weight"].int()
        values = torch.stack((table[weight & 15], table[weight >> 4]), dim=-1).flatten(-2)
        self.weight = values * tensors["weight_scale"].float().repeat_interleave(16, dim=-1)
        self.scale = tensors["weight_scale_2"]

    def transform(self) -> None:
        self.humming_config = "transformed"

    def __call__(self, a: torch.Tensor, *, outputs: torch.Tensor, expert_layout: torch.Tensor, **call: object) -> None:
        assert self.humming_config == "transformed", "call transform() before forward()"
        self.foreign.note("humming", {"layout": expert_layout.tolist(), "rows": len(a), **call})
        _check_ranges(call["tuning_config"], call["valid_shape_m"])
        if self.foreign.faults.stale and len(self.foreign.called("humming")) > 1:
            return
        for expert, (start, end) in enumerate(pairwise(expert_layout)):
            outputs[start:end] = (a[start:end].float() @ self.weight[expert].T * self.scale[expert]).bfloat16()
        outputs.copy_(outputs.roll(self.foreign.faults.row, dims=0))

"""load_moe_weights: loads the experts of one layer from an NVFP4 checkpoint in the format of NVIDIA's ModelOpt.

A projection `p` of expert `e` under the prefix of a layer is four tensors, PREFIX.experts.E.P.*: `weight` u8 [n, k /
2], two e2m1 codes a byte, the first in the low nibble; `weight_scale` e4m3 [n, k / 16]; `weight_scale_2` f32, the
global scale; `input_scale` f32, the global scale of the projection's input. P is gate_proj, up_proj, down_proj, or w1,
w3, w2. Shared experts are PREFIX.shared_experts.P.*; several are stored as one wider expert, as in DeepSeek's models.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Literal

import torch

from megamoe.codec.nvfp4 import SF_VEC_SIZE, interleave, swizzle_scales, swizzled_shape
from megamoe.contract.counted import counted
from megamoe.torch_ops.calls import spec_of
from megamoe.torch_ops.moe import INTERLEAVE, MoeWeights, stay_bf16

PROJECTIONS: Final = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
"""gate, up and down in the two common naming schemes."""
INDEX: Final = "model.safetensors.index.json"
MAX_NAMED: Final = 5
"""Names that a message lists at most."""
NOT_A_SCALE: Final = 0x7F
"""e4m3 codes from here on are NaN or have a sign."""
SHARED: Final = -1
"""Stands for the expert number in names of shared experts."""
_NAME: Final = re.compile(
    r"^(?:(?P<prefix>.+)\.)?(?:experts\.(?P<expert>\d+)|shared_experts)\.(?P<projection>\w+)\.(?P<part>\w+)$"
)


def load_moe_weights(
    checkpoint: str | Path | Mapping[str, torch.Tensor],
    prefix: str | None = None,
    *,
    experts: Sequence[int] | range | None = None,
    device: torch.device | str = "cpu",
    shared: bool = False,
    activations: Literal["nvfp4", "bf16"] = "nvfp4",
) -> MoeWeights:
    """Loads the experts of one layer.

    `checkpoint`: a safetensors file, a folder of them, or tensors by name. `prefix`: the layer's, such as
    "model.layers.3.mlp"; None if only one layer has experts. `experts`: those that this rank holds, None for all.
    `shared`: load the shared experts too. `activations`: with "bf16", no `input_scale` is read or needed.

    Raises ValueError, with the tensor's name, for a tensor that is missing, has another shape or dtype, or is not a
    number, and for other `activations`; FileNotFoundError if there is no such checkpoint; ImportError without
    safetensors.
    """
    calibrated = not stay_bf16(activations)
    with ExitStack() as stack:
        source = _Tensors(checkpoint) if isinstance(checkpoint, Mapping) else _Files(Path(checkpoint), stack)
        layer = _Layer.found(source, prefix)
        return layer.weights(layer.chosen(experts), torch.device(device), shared, calibrated)


class _Tensors:
    """Tensors by name, in memory."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors, self.said = tensors, "the checkpoint"
        self.names = tuple(tensors)

    def get(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def shape(self, name: str) -> list[int]:
        return list(self._tensors[name].shape)


class _Files:
    """The tensors of a file, or of all files in a folder, read on demand."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        if find_spec("safetensors") is None:
            raise ImportError("the package safetensors is not installed; the extra `models` of megamoe has it")
        if not path.exists():
            raise FileNotFoundError(f"there is no checkpoint {path}")
        self.said = str(path)
        self._holder: dict[str, Any] = {}
        for file in _shards(path):
            opened = stack.enter_context(_opened(file))
            for name in opened.keys():  # noqa: SIM118 (a safetensors file is no mapping)
                if name in self._holder:
                    raise ValueError(f"{path}: the tensor {name} is in two files, {file.name} the second")
                self._holder[name] = opened
        self.names = tuple(self._holder)

    def get(self, name: str) -> torch.Tensor:
        return self._holder[name].get_tensor(name)

    def shape(self, name: str) -> list[int]:
        """Reads only the file's header, no element."""
        return self._holder[name].get_slice(name).get_shape()


def _shards(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    index = path / INDEX
    if not index.is_file():
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(f"the folder {path} holds no *.safetensors")
        return files
    try:
        named = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is no index of safetensors: {type(error).__name__}: {error}") from None
    for name in named:
        if not isinstance(name, str) or Path(name).name != name:
            raise ValueError(f"{index} names the file {name!r}; its files lie beside it")
        if not (path / name).is_file():
            raise FileNotFoundError(f"{index} names {name}, which is not there")
    return [path / name for name in named]


def _opened(file: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is no file of safetensors: {error}") from None


@dataclass(frozen=True)
class _Layer:
    """The experts under one prefix. `names`: (expert, projection, part) -> name."""

    source: _Tensors | _Files
    prefix: str
    names: Mapping[tuple[int, str, str], str]

    @classmethod
    def found(cls, source: _Tensors | _Files, prefix: str | None) -> _Layer:
        layers: dict[str, dict[tuple[int, str, str], str]] = {}
        for name in source.names:
            if match := _NAME.match(name):
                expert = SHARED if match["expert"] is None else int(match["expert"])
                key = (expert, match["projection"], match["part"])
                names = layers.setdefault(match["prefix"] or "", {})
                if key in names:
                    raise ValueError(f"{source.said}: {names[key]} and {name} are one tensor by two names")
                names[key] = name
        layers = {name: names for name, names in layers.items() if any(expert != SHARED for expert, _, _ in names)}
        known = ", ".join(sorted(layers)[:MAX_NAMED]) + (", ..." if len(layers) > MAX_NAMED else "")
        if not layers:
            raise ValueError(f"{source.said} has no tensor named PREFIX.experts.NUMBER.PROJECTION.weight")
        if prefix is None and len(layers) > 1:
            raise ValueError(
                f"{source.said} has {counted(len(layers), 'layer')} with experts; name one with prefix=: {known}"
            )
        wanted = next(iter(layers)) if prefix is None else prefix
        if wanted not in layers:
            raise ValueError(f"{source.said} has no experts under the prefix {wanted!r}; it has them under: {known}")
        return cls(source, wanted, layers[wanted])

    def chosen(self, experts: Sequence[int] | range | None) -> list[int]:
        """The numbers of the experts to load: those requested, or all from 0 to the highest."""
        held = {expert for expert, _, _ in self.names if expert != SHARED}
        if experts is None:
            return list(range(max(held) + 1))
        absent = [expert for expert in experts if expert not in held]
        if absent or not experts:
            raise ValueError(f"{self._said} has no expert {absent[:1] or 'chosen'}; it has {min(held)} to {max(held)}")
        return list(experts)

    @property
    def _said(self) -> str:
        return f"{self.source.said}: the layer {self.prefix!r}"

    @cached_property
    def _projections(self) -> tuple[str, str, str]:
        seen = {projection for expert, projection, _ in self.names if expert != SHARED}
        fitting = [names for names in PROJECTIONS if seen & set(names)]
        if len(fitting) != 1:
            known = " or ".join(", ".join(names) for names in PROJECTIONS)
            raise ValueError(f"{self._said} has the projections {', '.join(sorted(seen))}; they must be {known}")
        return fitting[0]

    def weights(self, experts: list[int], device: torch.device, shared: bool, calibrated: bool) -> MoeWeights:
        """Stacks the weights expert by expert, so that no tensor exists twice. `calibrated`: with input scales."""
        hidden, intermediate = self._sizes(experts[0])
        sharing = self._sharing(intermediate) if shared else 0
        count = len(experts) + sharing
        scales = count if calibrated else 0
        made = MoeWeights(
            w1_codes=torch.empty(count, 2 * intermediate, hidden // 2, dtype=torch.uint8, device=device),
            w1_sf=_empty_scales(count, 2 * intermediate, hidden, device),
            w1_gs=torch.empty(count, device=device),
            w2_codes=torch.empty(count, hidden, intermediate // 2, dtype=torch.uint8, device=device),
            w2_sf=_empty_scales(count, hidden, intermediate, device),
            w2_gs=torch.empty(count, device=device),
            a2_gs=torch.empty(scales, device=device),
            x_gs=torch.zeros(1 if calibrated else 0, device=device),
            shared=sharing,
        )
        largest_x = 0.0
        wanted = [(expert, 1) for expert in experts] + ([(SHARED, sharing)] if sharing else [])
        parts = (
            part for expert, many in wanted for part in self._parts(expert, many, hidden, intermediate, calibrated)
        )
        for index, (one, two, three) in enumerate(parts):
            made.w1_codes[index] = interleave(one.codes, two.codes, INTERLEAVE)
            made.w1_sf[index] = swizzle_scales(interleave(one.sf, two.sf, INTERLEAVE))
            made.w2_codes[index], made.w2_sf[index] = three.codes, swizzle_scales(three.sf)
            made.w1_gs[index], made.w2_gs[index] = one.gs, three.gs
            if calibrated:
                made.a2_gs[index] = three.input_gs
            largest_x = max(largest_x, one.input_gs, two.input_gs)
        # x is quantised once for all experts, so its scale must cover the largest input of each.
        made.x_gs.fill_(largest_x)
        return made

    def _parts(
        self, expert: int, many: int, hidden: int, intermediate: int, calibrated: bool
    ) -> Iterator[tuple[_Projection, _Projection, _Projection]]:
        """gate, up and down of an expert, or of each of `many` experts that are stored as one."""
        gate, up, down = self._projections
        width = many * intermediate
        one, two = (self._projection(expert, name, width, hidden, calibrated) for name in (gate, up))
        three = self._projection(expert, down, hidden, width, calibrated)
        if one.gs != two.gs:
            who = "the shared experts" if expert == SHARED else f"expert {expert}"
            raise ValueError(
                f"{self._said}: weight_scale_2 of {who} is {one.gs:g} for {gate} and {two.gs:g} for {up}; the two are "
                f"one GEMM here and must have one global scale"
            )
        for first in range(0, width, intermediate):
            last = first + intermediate
            yield one.rows(first, last), two.rows(first, last), three.columns(first, last)

    def _sharing(self, intermediate: int) -> int:
        """The number of experts that the shared tensors hold."""
        if not any(expert == SHARED for expert, _, _ in self.names):
            raise ValueError(f"{self._said} has no shared_experts")
        rows, _ = self._matrix(SHARED)
        if not rows or rows % intermediate:
            raise ValueError(
                f"{self._said} has shared_experts of {rows} rows; they must be as wide as some of its experts, which "
                f"have {intermediate}"
            )
        return rows // intermediate

    def _matrix(self, expert: int) -> tuple[int, int]:
        """Number of rows of gate's codes, and bytes per row."""
        name = self._held(expert, self._projections[0], "weight")
        shape = self.source.shape(name)
        if len(shape) != 2:
            raise ValueError(f"{name} has shape {shape}, not [n, k / 2]")
        return shape[0], shape[1]

    def _sizes(self, expert: int) -> tuple[int, int]:
        """hidden and intermediate. Raises ValueError if the kernels do not support such a layer."""
        intermediate, bytes_ = self._matrix(expert)
        hidden = 2 * bytes_
        axes = {"hidden": hidden, "intermediate": intermediate, "num_experts": 1, "tokens": 1}
        if (reason := spec_of("nvfp4_moe").admits(axes)) is not None:
            raise ValueError(f"{self._said} has experts of {intermediate} x {hidden}: {reason}")
        return hidden, intermediate

    def _projection(self, expert: int, projection: str, n: int, k: int, calibrated: bool) -> _Projection:
        codes = self._tensor(expert, projection, "weight", torch.uint8, (n, k // 2))
        sf = self._tensor(expert, projection, "weight_scale", torch.float8_e4m3fn, (n, k // SF_VEC_SIZE))
        scales = sf.view(torch.uint8)
        if bool((scales >= NOT_A_SCALE).any()):
            raise ValueError(f"{self._named(expert, projection, 'weight_scale')} holds a NaN or a negative scale")
        return _Projection(
            codes,
            scales,
            self._scalar(expert, projection, "weight_scale_2"),
            self._scalar(expert, projection, "input_scale") if calibrated else 0.0,
        )

    def _scalar(self, expert: int, projection: str, part: str) -> float:
        tensor = self._tensor(expert, projection, part)
        if tensor.numel() != 1 or tensor.dtype != torch.float32:
            said = f"{tensor.dtype} {list(tensor.shape)}"
            raise ValueError(f"{self._named(expert, projection, part)} is {said}; it must be one torch.float32")
        value = float(tensor)
        if not 0.0 < value < float("inf"):
            raise ValueError(f"{self._named(expert, projection, part)} is {value:g}; it must be finite and above 0")
        return value

    def _tensor(
        self,
        expert: int,
        projection: str,
        part: str,
        dtype: torch.dtype | None = None,
        shape: tuple[int, ...] | None = None,
    ) -> torch.Tensor:
        name = self._held(expert, projection, part)
        tensor = self.source.get(name)
        if dtype is not None and (tensor.dtype != dtype or tuple(tensor.shape) != shape):
            raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}; it must be {dtype} {list(shape or ())}")
        return tensor

    def _held(self, expert: int, projection: str, part: str) -> str:
        name = self.names.get((expert, projection, part))
        if name is None:
            raise ValueError(f"{self.source.said} lacks {self._named(expert, projection, part)}")
        return name

    def _named(self, expert: int, projection: str, part: str) -> str:
        start = f"{self.prefix}." if self.prefix else ""
        return f"{start}{'shared_experts' if expert == SHARED else f'experts.{expert}'}.{projection}.{part}"


@dataclass(frozen=True, slots=True)
class _Projection:
    """`codes` u8 [n, k / 2], `sf` u8 [n, k / 16], and the two global scales."""

    codes: torch.Tensor
    sf: torch.Tensor
    gs: float
    input_gs: float

    def rows(self, first: int, last: int) -> _Projection:
        """Rows `first` to `last` - 1."""
        return replace(self, codes=self.codes[first:last], sf=self.sf[first:last])

    def columns(self, first: int, last: int) -> _Projection:
        """Columns `first` to `last` - 1."""
        sf = self.sf[:, first // SF_VEC_SIZE : last // SF_VEC_SIZE]
        return replace(self, codes=self.codes[:, first // 2 : last // 2], sf=sf)


def _empty_scales(count: int, rows: int, k: int, device: torch.device) -> torch.Tensor:
    return torch.empty(count, *swizzled_shape(rows, k // SF_VEC_SIZE), dtype=torch.uint8, device=device)

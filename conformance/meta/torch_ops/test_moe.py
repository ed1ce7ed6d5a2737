"""megamoe.moe on a CPU, its weights from checkpoints, and what a call on a device does the first time and later."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import megamoe
from conformance.fakes.device_on_machine import LoadedOnMachine, MachineDevice, device_on_machine
from megamoe.codec.nvfp4 import global_scale, quantise, swizzle_scales, unswizzle_scales
from megamoe.ops import reference
from megamoe.ops.nvfp4_moe.inputs import input_names
from megamoe.torch_ops import checkpoint as checkpoints
from megamoe.torch_ops import moe as module
from megamoe.torch_ops.calls import DeviceCall, spec_of

EXPERTS, HIDDEN, INTERMEDIATE = 2, 128, 128
Tensors = dict[str, torch.Tensor]
LayerOnDevice = tuple[megamoe.MoeWeights, MachineDevice, Callable[..., list[tuple[object, ...]]]]


@pytest.fixture(scope="module")
def numbers() -> Tensors:
    source = torch.Generator().manual_seed(0)
    gate, up = torch.randn(2, EXPERTS, INTERMEDIATE, HIDDEN, generator=source) / math.sqrt(HIDDEN)
    down = torch.randn(EXPERTS, HIDDEN, INTERMEDIATE, generator=source) / math.sqrt(INTERMEDIATE)
    return {"gate": gate, "up": up, "down": down}


@pytest.fixture(scope="module")
def weights(numbers: Tensors) -> megamoe.MoeWeights:
    return megamoe.MoeWeights.quantised(**numbers, largest_activation=torch.tensor([3.0, 4.0]), largest_input=4.0)


def tokens(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(count)
    x = torch.randn(count, HIDDEN, generator=source).bfloat16()
    ids = torch.stack([torch.randperm(EXPERTS, generator=source) for _ in range(count)])
    return x, ids, torch.randn(count, EXPERTS, generator=source).softmax(dim=1)


def oracle(weights: Any, x: torch.Tensor, ids: torch.Tensor, w: torch.Tensor, **axes: Any) -> tuple[Any, Any, Tensors]:
    """The harness's own answer for the same layer: the case, its reference and its inputs."""
    gs = weights.x_gs.expand(len(x)).contiguous() if len(weights.x_gs) else global_scale(x, per=1)
    codes, sf = quantise(x, gs)
    stacks = {name: getattr(weights, name) for name in module.STACKS}
    inputs = {"x": x, "x_codes": codes, "x_sf": swizzle_scales(sf), "x_gs": gs, **stacks}
    inputs |= {"topk_ids": ids.to(torch.int32), "topk_weights": w}
    sizes = {"hidden": HIDDEN, "intermediate": INTERMEDIATE, "num_experts": len(weights.w1_gs), "tokens": len(x)}
    case = spec_of("nvfp4_moe").case(topk=ids.shape[1], **sizes, **axes)
    return case, reference("nvfp4_moe"), {name: inputs[name] for name in input_names(case)}


@pytest.mark.parametrize("option", ["plain", "clamp, before, -1, scales of tokens"])
def test_it_is_what_the_oracle_says(weights: megamoe.MoeWeights, option: str) -> None:
    x, ids, w = tokens(3)
    axes: dict[str, Any] = {}
    if option != "plain":
        axes = {"clamp": 0.5, "weight": "before"}
        ids[1, 0], ids[2] = -1, -1
        weights = replace(weights, x_gs=torch.empty(0))
    y = megamoe.moe(x, weights, ids, w, **axes)
    case, op, inputs = oracle(weights, x, ids, w, **axes)
    expected = op.oracle(case, inputs)
    settled = op.latitude(case, inputs, {"y": y}, expected).oracle["y"]
    assert (y.double() - settled).abs().max() <= 2e-2 * settled.abs().max(), "y"
    assert option == "plain" or not y[2].any(), "a token without an expert here has y = 0"


@pytest.mark.parametrize("activations", ["nvfp4", "bf16"])
def test_every_token_has_its_shared_expert(weights: megamoe.MoeWeights, activations: str) -> None:
    """The last expert of the stacks is shared: it has weight 1, whatever the choices."""
    if activations == "bf16":
        weights = replace(weights, a2_gs=torch.empty(0), x_gs=torch.empty(0))
    x, _, w = tokens(1)
    ids, w = torch.tensor([[0 if activations == "nvfp4" else -1]]), w[:, :1]
    y = megamoe.moe(x, replace(weights, shared=1), ids, w, activations=activations)  # pyright: ignore[reportArgumentType]
    both = torch.cat((ids, torch.ones_like(ids)), dim=1), torch.cat((w, torch.ones_like(w)), dim=1)
    case, op, inputs = oracle(weights, x, *both, activations=activations)
    expected = op.oracle(case, inputs)
    settled = op.latitude(case, inputs, {"y": y}, expected).oracle.get("y", expected["y"])
    assert (y.double() - settled).abs().max() <= 2e-2 * settled.abs().max(), "y"


def test_it_is_an_operator_as_torch_wants_it(weights: megamoe.MoeWeights, monkeypatch: pytest.MonkeyPatch) -> None:
    # These tests exercise the operator. The kernels would run a dozen times.
    monkeypatch.setattr(
        module, "_made", lambda *given: lambda inputs: [inputs[-1][:, :1].expand(-1, HIDDEN).bfloat16()]
    )
    x, ids, w = tokens(3)
    options = (8, None, False, None, 1, True)
    torch.library.opcheck(torch.ops.megamoe.moe.default, (x, ids[:, :1] * 0, w[:, :1], weights.tensors(), *options))

    def step(x: torch.Tensor) -> torch.Tensor:
        return megamoe.moe(x * 0.5, weights, ids, w) + 1

    assert torch.equal(torch.compile(step, backend="aot_eager", fullgraph=True)(x), step(x))


@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        (lambda x, i, w: (x.float(), i, w), ValueError, "x is torch.float32"),
        (lambda x, i, w: (x[:, :64], i, w), ValueError, "for x of"),
        (lambda x, i, w: (x[0], i, w), ValueError, r"x is \[tokens, hidden\]"),
        (lambda x, i, w: (x, i.float(), w), ValueError, "topk_ids are torch.float32"),
        (lambda x, i, w: (x, i, w[:1]), ValueError, "topk_weights is torch.float32"),
        (lambda x, i, w: (x.repeat(3000, 1), i.repeat(3000, 1), w.repeat(3000, 1)), ValueError, "tokens=9000"),
        (lambda x, i, w: (x.repeat(2700, 1), i.repeat(2700, 1), w.repeat(2700, 1)), ValueError, "takes small sizes"),
        (lambda x, i, w: (x.requires_grad_(), i, w), RuntimeError, "has no backward"),
        (lambda x, i, w: (x, i.tolist(), w), ValueError, "topk_ids is .*; it must be a tensor"),
    ],
)
def test_what_it_does_not_do_is_said(
    weights: megamoe.MoeWeights,
    change: Callable[..., Any],
    error: type[Exception],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, ids, w = change(*tokens(3))
    monkeypatch.setattr(module, "MAX_MACHINE_WORK", 1 << 18)
    with pytest.raises(error, match=sentence):
        megamoe.moe(x, weights, ids, w)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("wants", ["x", "topk_weights", "w1_gs", "tangent"])
def test_a_derivative_is_refused_however_it_is_asked_for(weights: megamoe.MoeWeights, wants: str) -> None:
    x, ids, w = tokens(3)
    if wants == "w1_gs":
        weights = replace(weights, w1_gs=weights.w1_gs.clone().requires_grad_())
    x, w = x.requires_grad_(wants == "x"), w.requires_grad_(wants == "topk_weights")
    for op in (
        lambda x: megamoe.moe(x, weights, ids, w),
        lambda x: torch.ops.megamoe.moe(x, ids, w, weights.tensors()),
    ):
        with pytest.raises(RuntimeError, match="has no backward, and no forward derivative"):
            _ = torch.func.jvp(op, (x,), (x,)) if wants == "tangent" else op(x)


def test_tokens_of_any_strides_and_ids_of_64_bits_are_read(weights: megamoe.MoeWeights) -> None:
    x, ids, w = tokens(3)
    ids[0, 0] = -1
    wanted = megamoe.moe(x, weights, ids, w)
    strided = [one.mT.contiguous().mT for one in (x, ids, w)]
    far = torch.where(ids == -1, -(1 << 32), ids)
    assert torch.equal(megamoe.moe(strided[0], weights, *strided[1:]), wanted), "strides"
    assert torch.equal(megamoe.moe(x, weights, far, w), wanted), "-2**32 is another expert's number"


@pytest.mark.parametrize("beyond", [EXPERTS, 1 << 32, (1 << 32) + 1])
def test_an_expert_that_is_not_there_is_an_error_on_a_cpu(weights: megamoe.MoeWeights, beyond: int) -> None:
    x, ids, w = tokens(3)
    ids[1, 0] = beyond
    with pytest.raises(ValueError, match=rf"topk_ids of token 1 are \[{beyond}, .*; experts are 0 to {EXPERTS - 1}"):
        megamoe.moe(x, weights, ids, w)
    shared = replace(weights, shared=1)
    with pytest.raises(ValueError, match=r"topk_ids of token 0 are .*; experts are 0 to 0"):
        megamoe.moe(x, shared, torch.full_like(ids[:, :1], EXPERTS - 1), w[:, :1])


def test_numbers_that_are_cut_are_told_on_a_cpu(numbers: Tensors, weights: megamoe.MoeWeights) -> None:
    x, ids, w = tokens(3)
    largest = torch.stack([weights.swiglu(x, one).abs().max() for one in range(EXPERTS)])
    calibrated = megamoe.MoeWeights.quantised(**numbers, largest_activation=largest)
    wanted = megamoe.moe(x, calibrated, ids, w)
    guessed = megamoe.MoeWeights.quantised(**numbers, largest_activation=largest / torch.tensor([1.0, 50.0]))
    with pytest.warns(RuntimeWarning, match="GEMMs of expert 1 reaches .*, and largest_activation says"):
        cut = megamoe.moe(x, guessed, ids, w)
    far = (cut.float() - wanted.float()).norm() / wanted.float().norm()
    assert far > 0.1, f"a guess that is 50 times too small changes y by {far:.2%}, so there is nothing to warn of"
    with pytest.warns(RuntimeWarning, match="GEMMs of expert 1 reaches"):
        megamoe.moe(x, replace(guessed, shared=1), ids[:, :1] * 0, w[:, :1])
    broken = x.clone()
    broken[0, 0] = torch.nan
    with pytest.warns(RuntimeWarning, match="GEMMs of expert 1 reaches"):
        megamoe.moe(broken, guessed, ids, w)
    megamoe.moe(x, guessed, ids, w / 100, weight="before")
    narrow = megamoe.MoeWeights.quantised(**numbers, largest_activation=largest, largest_input=0.1)
    with pytest.warns(RuntimeWarning, match="x reaches .*, and largest_input says 0.1"):
        megamoe.moe(x, narrow, ids, w)


def test_no_tokens_have_an_empty_output(weights: megamoe.MoeWeights) -> None:
    x, ids, w = (one[:0] for one in tokens(3))
    y = megamoe.moe(x, weights, ids, w)
    assert (y.shape, y.dtype) == (x.shape, torch.bfloat16)
    with pytest.raises(ValueError, match="clamp is 'x'; it must be a number or None"):
        megamoe.moe(x, weights, ids, w, clamp="x")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="clamp"):
        megamoe.moe(x, weights, ids, w, clamp=-1.0)


@pytest.mark.parametrize("odd", ["x", "topk_weights", "weights"])
def test_tensors_of_several_devices_are_no_fakes(weights: megamoe.MoeWeights, odd: str) -> None:
    x, ids, w = tokens(3)
    x, w = x.to("meta") if odd == "x" else x, w.to("meta") if odd == "topk_weights" else w
    held = weights.to("meta") if odd == "weights" else weights
    for call in (
        lambda: megamoe.moe(x, held, ids, w),
        lambda: torch.ops.megamoe.moe(x, ids, w, held.tensors()),
        lambda: torch.ops.megamoe.moe(x, ids, w, [*weights.tensors()[:-1], held.x_gs.to("meta")]),
    ):
        with pytest.raises(ValueError, match="must be on one device; they are on"):
            call()
    fakes = [one.to("meta") for one in weights.tensors()]
    with pytest.raises(ValueError, match="w2_gs is"):
        torch.ops.megamoe.moe(*(one.to("meta") for one in tokens(3)), [*fakes[:5], fakes[5][:1], *fakes[6:]])


def test_a_device_brings_weights_into_its_layout_once_and_again_when_they_change(weights: megamoe.MoeWeights) -> None:
    mine = replace(weights, **{name: getattr(weights, name).clone() for name in module.STACKS})
    x, ids, w = tokens(1)
    with device_on_machine() as device:
        given = (x, ids, w, *mine.tensors())
        shapes, dtypes = tuple(one.shape for one in given), tuple(one.dtype for one in given)
        call = module._made.__wrapped__(shapes, dtypes, (0,), (8, None, False, "ptx"))
        assert isinstance(call, DeviceCall)

        def y() -> torch.Tensor:
            _, _, inputs = oracle(mine, x, ids, w)
            tensors = [inputs[name] for name in module.INPUTS]
            for one in tensors:
                device.know(one)
            return call(tensors)[0]

        first = y()
        assert torch.equal(y(), first)
        assert device.done == {"prepared": 1, "launched": 2}, "the same weights were prepared twice"
        mine.w2_codes.copy_(mine.w2_codes.flip(0))
        mine.w2_sf.copy_(mine.w2_sf.flip(0))
        device.capturing = True
        with pytest.raises(RuntimeError, match="the weights are new or have changed"):
            y()
        device.capturing = False
        assert not torch.equal(y(), first), "the layout of the old weights was used"
        assert device.done["prepared"] == 2


@pytest.fixture
def layer_on_device(weights: megamoe.MoeWeights, monkeypatch: pytest.MonkeyPatch) -> Iterator[LayerOnDevice]:
    """A layer whose programs do nothing but note their stream."""
    monkeypatch.setattr(LoadedOnMachine, "_run", lambda *given: None)
    mine = replace(weights, **{name: getattr(weights, name).clone() for name in module.STACKS})
    x, ids, w = tokens(1)
    _, _, inputs = oracle(mine, x, ids, w)
    with device_on_machine() as device:
        given = (x, ids, w, *mine.tensors())
        shapes, dtypes = tuple(one.shape for one in given), tuple(one.dtype for one in given)
        call = module._made.__wrapped__(shapes, dtypes, (0,), (8, None, False, "ptx"))

        def done(stream: int, weights: megamoe.MoeWeights = mine) -> list[tuple[object, ...]]:
            device.stream = stream
            device.order.clear()
            call([getattr(weights, name, inputs[name]) if name != "x_gs" else inputs[name] for name in module.INPUTS])
            return list(device.order)

        yield mine, device, done


def test_streams_share_a_layout_in_order(layer_on_device: LayerOnDevice) -> None:
    mine, device, done = layer_on_device
    assert done(1) == [("prepare", 1), ("keep", 1), ("launch", 1)]
    assert done(1) == [("launch", 1)], "a warm call on one stream does more than launch"
    device.capturing = True
    assert done(3) == [("launch", 3)], "a graph cannot wait for what is outside of it"
    device.capturing = False
    for stream in (2, 3):
        assert done(stream) == [("wait", stream, 1), ("keep", stream), ("launch", stream)], (
            "another stream may read a layout that is not made, or lose its block"
        )
        assert done(stream) == [("launch", stream)]
    mine.w2_codes.copy_(mine.w2_codes)
    again = [("synchronize",), ("prepare", 2), ("keep", 2), ("launch", 2)]
    assert done(2) == again, "a layout that another stream reads is overwritten"
    assert done(1)[0] == ("wait", 1, 2), "the stream that made the first layout does not wait for the second"


def test_weights_that_changed_unseen_are_prepared_again_when_it_is_said(layer_on_device: LayerOnDevice) -> None:
    mine, device, done = layer_on_device
    done(0)
    layout = len(module.INPUTS) + 1
    block = device.given[layout]
    mine.w2_codes.data.zero_()
    assert ("prepare", 0) not in done(0), "torch counts what is done to .data: then this method can go"
    mine.changed()
    device.capturing = True
    with pytest.raises(RuntimeError, match="the weights are new or have changed"):
        done(0)
    device.capturing = False
    assert ("prepare", 0) in done(0)
    assert device.given[layout] == block, "the layout moved from where a captured graph reads it"
    mine.experts(0, 1).changed()
    assert ("prepare", 0) in done(0), "a view of the weights said so"
    assert ("prepare", 0) not in done(0)


def test_weights_of_any_strides_are_prepared_once(layer_on_device: LayerOnDevice) -> None:
    mine, device, done = layer_on_device
    strided = replace(mine, w2_codes=mine.w2_codes.mT.contiguous().mT, w2_gs=torch.ones(2 * EXPERTS)[::2])
    shifted = replace(
        mine, w1_codes=torch.cat((torch.zeros(1), mine.w1_codes.flatten())).byte()[1:].view_as(mine.w1_codes)
    )
    for weights in (strided, shifted):
        device.know(*weights.tensors())
        assert ("prepare", 0) in done(0, weights)
        assert done(0, weights) == [("launch", 0)], "each call prepares a copy"
        assert all(torch.equal(*both) for both in zip(weights.tensors()[3:5], mine.tensors()[3:5], strict=True))
    view = mine.experts(1, 1)
    assert all(
        getattr(view, name).untyped_storage().data_ptr() == getattr(mine, name).untyped_storage().data_ptr()
        for name in module.STACKS
    ), "the experts of a rank are copies"


@pytest.mark.skipif(find_spec("triton") is None, reason="tokens are quantised by a Triton kernel")
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("own_scales", [True, False])
def test_the_kernel_that_quantises_tokens_has_the_bits_of_the_codec(own_scales: bool) -> None:
    import megamoe.triton
    from megamoe.torch_ops.quantise import quantised_tokens

    source = torch.Generator().manual_seed(0)
    magnitude = torch.randn(3, HIDDEN // 16, generator=source).mul(4).exp().repeat_interleave(16, dim=1)
    x = (torch.randn(3, HIDDEN, generator=source) * magnitude).bfloat16()
    x[0, :64], x[1] = 0, 0
    x_gs = torch.empty(0) if own_scales else torch.tensor([0.01])
    megamoe.triton.install("sm_90a")
    try:
        codes, sf, gs = quantised_tokens(x, x_gs)
    finally:
        megamoe.triton.uninstall()
    wanted_gs = global_scale(x, per=1) if own_scales else x_gs.expand(3).contiguous()
    wanted, wanted_sf = quantise(x, wanted_gs)
    assert torch.equal(gs, wanted_gs), "global scales"
    assert torch.equal(unswizzle_scales(sf, 3, HIDDEN // 16), wanted_sf), "block scales"
    assert torch.equal(codes, wanted), "codes"
    assert torch.equal(quantise(x, wanted_gs, check=False)[0], wanted), "without the check the codec rounds otherwise"


# Checkpoints

NAMES = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
MIXTRAL = {"w1": "gate", "w3": "up", "w2": "down"}
PREFIX = "model.layers.3.mlp"


def checkpoint(numbers: Tensors, names: Mapping[str, str] = NAMES) -> Tensors:
    """The layer of `weights`, stored as ModelOpt does."""
    found: Tensors = {}
    both = global_scale(torch.cat((numbers["gate"], numbers["up"]), dim=1), per=1)
    scales = {"gate": both, "up": both, "down": global_scale(numbers["down"], per=1)}
    inputs = {"gate": (4.0, 3.0), "up": (2.0, 4.0), "down": (3.0, 4.0)}
    for expert in range(EXPERTS):
        for projection, name in names.items():
            start, gs = f"{PREFIX}.experts.{expert}.{projection}", scales[name][expert]
            codes, sf = quantise(numbers[name][expert], gs)
            found[f"{start}.weight"], found[f"{start}.weight_scale"] = codes, sf.view(torch.float8_e4m3fn)
            found[f"{start}.weight_scale_2"] = gs.clone()
            found[f"{start}.input_scale"] = global_scale(torch.tensor(inputs[name][expert]))
    return found


def same(one: megamoe.MoeWeights, other: megamoe.MoeWeights) -> list[str]:
    """The fields in which the two differ."""
    return [name for name in (*module.STACKS, "x_gs") if not torch.equal(getattr(one, name), getattr(other, name))]


@pytest.mark.parametrize("names", [NAMES, MIXTRAL], ids=["gate_proj", "w1"])
def test_a_checkpoint_is_read_as_it_was_quantised(
    weights: megamoe.MoeWeights, numbers: Tensors, names: Mapping[str, str], tmp_path: Path
) -> None:
    tensors = checkpoint(numbers, names) | {"model.norm.weight": torch.ones(HIDDEN)}
    assert same(megamoe.load_moe_weights(tensors), weights) == [], "in memory"
    if find_spec("safetensors") is None:
        pytest.skip("safetensors is not installed")
    from safetensors.torch import save_file

    ordered = sorted(tensors)
    shards = {"a.safetensors": ordered[:7], "b.safetensors": ordered[7:]}
    for file, held in shards.items():
        save_file({name: tensors[name] for name in held}, tmp_path / file)
    assert same(megamoe.load_moe_weights(tmp_path), weights) == [], "two files"
    index = {"weight_map": {name: file for file, held in shards.items() for name in held}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "stray.safetensors").write_bytes(b"no")
    assert same(megamoe.load_moe_weights(str(tmp_path), PREFIX), weights) == [], "two files by their index"
    one = megamoe.load_moe_weights(tmp_path, experts=[1])
    assert same(one, replace(weights.experts(1, 1), x_gs=one.x_gs)) == [], "one rank's expert"


def with_shared(numbers: Tensors, count: int) -> Tensors:
    """A checkpoint whose shared experts all equal expert 1, stored as one wider expert."""
    held = checkpoint(numbers)
    for projection, name in NAMES.items():
        gs = held[f"{PREFIX}.experts.1.{projection}.weight_scale_2"]
        wide = torch.cat([numbers[name][1]] * count, dim=1 if name == "down" else 0)
        start = f"{PREFIX}.shared_experts.{projection}"
        codes, sf = quantise(wide, gs)
        held |= {f"{start}.weight": codes, f"{start}.weight_scale": sf.view(torch.float8_e4m3fn)}
        held |= {f"{start}.weight_scale_2": gs.clone(), f"{start}.input_scale": global_scale(torch.tensor(3.0))}
    return held


@pytest.mark.parametrize("count", [1, 2])
def test_shared_experts_of_a_checkpoint_are_the_last(weights: megamoe.MoeWeights, numbers: Tensors, count: int) -> None:
    """Two shared experts are stored as one of twice the width."""
    held = with_shared(numbers, count)
    assert same(megamoe.load_moe_weights(held), weights) == [], "shared experts nobody asked for"
    found = megamoe.load_moe_weights(held, shared=True)
    assert (found.shared, found.num_experts, len(found.w1_gs)) == (count, EXPERTS, EXPERTS + count)
    assert same(found.experts(0, EXPERTS), weights) == [], "the others"
    for index in range(EXPERTS, EXPERTS + count):
        for one, other in zip(found.dequantised(index), weights.dequantised(1), strict=True):
            assert torch.equal(one, other), f"shared expert {index - EXPERTS}"
    with pytest.raises(ValueError, match="has no shared_experts"):
        megamoe.load_moe_weights(checkpoint(numbers), shared=True)
    narrow = _with("shared_experts.gate_proj.weight", lambda one: one[:64])(held)
    with pytest.raises(ValueError, match="shared_experts of 64 rows; they must be as wide as some"):
        megamoe.load_moe_weights(narrow, shared=True)


def test_each_tensor_of_a_checkpoint_is_read_once(
    numbers: Tensors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before that, only the shapes of the tensors that give the layer's size are read."""
    save_file = pytest.importorskip("safetensors.torch").save_file
    save_file(held := with_shared(numbers, 2), tmp_path / "a.safetensors")
    read, get = list[str](), checkpoints._Files.get

    def counted(self: checkpoints._Files, name: str) -> torch.Tensor:
        read.append(name)
        return get(self, name)

    monkeypatch.setattr(checkpoints._Files, "get", counted)
    megamoe.load_moe_weights(tmp_path, shared=True)
    assert sorted(read) == sorted(held)


def test_scales_of_inputs_are_not_read_for_bf16_activations(weights: megamoe.MoeWeights, numbers: Tensors) -> None:
    held = _without("input_scale")(checkpoint(numbers))
    found = megamoe.load_moe_weights(held, activations="bf16")
    assert same(found, replace(weights, a2_gs=torch.empty(0), x_gs=torch.empty(0))) == []
    x, ids, w = tokens(1)
    with pytest.raises(ValueError, match=r"a2_gs is torch.float32 \[0\]"):
        megamoe.moe(x, found, ids, w)
    with pytest.raises(ValueError, match="activations is 'fp8'"):
        megamoe.moe(x, found, ids, w, activations="fp8")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="activations is 'fp8'"):
        megamoe.load_moe_weights(held, activations="fp8")  # pyright: ignore[reportArgumentType]


def _without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda held: {key: value for key, value in held.items() if not key.endswith(name)}


def _with(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], Tensors]:
    return lambda held: {key: change(value) if key.endswith(name) else value for key, value in held.items()}


def _poisoned(scales: torch.Tensor) -> torch.Tensor:
    bits = scales.view(torch.uint8).clone()
    bits[3, 1] = 0x7F
    return bits.view(torch.float8_e4m3fn)


FAULTS: list[tuple[Callable[[Tensors], Tensors], str]] = [
    (_without("experts.1.up_proj.weight"), r"lacks model.layers.3.mlp.experts.1.up_proj.weight$"),
    (_without("input_scale"), "lacks .*input_scale"),
    (_with("1.down_proj.weight", lambda one: one[:, :-8]), r"it must be torch.uint8 \[128, 64\]"),
    (_with("0.gate_proj.weight", lambda one: one[:, :-8]), "hidden=112 is outside of its limits"),
    (_with("0.gate_proj.weight", lambda one: one.flatten()), r"not \[n, k / 2\]"),
    (_with("0.up_proj.weight", lambda one: one.view(torch.int8)), "is torch.int8"),
    (_with("0.up_proj.weight_scale", _poisoned), "holds a NaN or a negative scale"),
    (_with("1.up_proj.weight_scale_2", lambda one: 2 * one), "must have one global scale"),
    (_with("1.down_proj.input_scale", lambda one: 0 * one), "is 0; it must be finite and above 0"),
    (_with("1.down_proj.input_scale", lambda one: one.double()), "must be one torch.float32"),
    (lambda held: {"a": torch.ones(1)}, "has no tensor named"),
    (lambda held: held | {"l.experts.0.w1.weight": torch.ones(1)}, "2 layers with experts"),
    (lambda held: held | {f"{PREFIX}.experts.0.w1.weight": torch.ones(1)}, "has the projections"),
    (lambda held: held | {f"{PREFIX}.experts.00.up_proj.weight": torch.ones(1)}, "one tensor by two names"),
]


@pytest.mark.parametrize(("fault", "sentence"), FAULTS)
def test_a_checkpoint_that_cannot_be_used_is_said(
    numbers: Tensors, fault: Callable[[Tensors], Tensors], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        megamoe.load_moe_weights(fault(checkpoint(numbers)))


def test_a_place_that_holds_no_checkpoint_is_said(numbers: Tensors, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    with pytest.raises(FileNotFoundError, match="there is no checkpoint"):
        megamoe.load_moe_weights(tmp_path / "none")
    with pytest.raises(FileNotFoundError, match=r"holds no \*\.safetensors"):
        megamoe.load_moe_weights(tmp_path)
    (tmp_path / "x.safetensors").write_bytes(b"\xff" * 40)
    with pytest.raises(ValueError, match="is no file of safetensors"):
        megamoe.load_moe_weights(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    for text, sentence in (("{}", "is no index"), ('{"weight_map": {"a": "../b"}}', "lie beside it")):
        index.write_text(text)
        with pytest.raises(ValueError, match=sentence):
            megamoe.load_moe_weights(tmp_path)
    index.write_text('{"weight_map": {"a": "gone.safetensors"}}')
    with pytest.raises(FileNotFoundError, match=r"names gone\.safetensors"):
        megamoe.load_moe_weights(tmp_path)
    with pytest.raises(ValueError, match="no experts under the prefix 'x'"):
        megamoe.load_moe_weights(checkpoint(numbers), "x")
    with pytest.raises(ValueError, match="has no expert"):
        megamoe.load_moe_weights(checkpoint(numbers), experts=[7])

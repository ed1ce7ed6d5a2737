"""How each peer is called, and how its own results get into the outputs.

A recipe is the way a peer was measured; without it a baseline would be unfair. `collect` stores the results of the last
run, in a graph or not, or NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

from backends.peers import PEERS
from backends.peers.peer import OwnResults, Peer
from conformance.fakes.peers_on_cpu import Foreign, install
from conformance.kernels.laws.law import spec_of
from conformance.kernels.peers.test_peers import (
    BY_NAME,
    CAUSAL,
    CAUSAL_GQA,
    DECODE,
    GQA,
    L2,
    NO_LSE,
    OPEN_WINDOW,
    POISONED,
    WIDE_WINDOW,
    judged,
)
from megamoe.judge.arena import layouts_of

WIDE_MQA = "fmha:hd=512,t=1,s_k=128,heads=64"


def calls(monkeypatch: pytest.MonkeyPatch, peer: str, case: str) -> Foreign:
    """Notes of the foreign calls of a judged run."""
    foreign = install(monkeypatch)
    record = judged(BY_NAME[peer], case)
    assert record.status == "passed", f"{peer} on {case}: {record.sentence}"
    return foreign


@pytest.mark.parametrize(("case", "packed"), [(GQA, True), (CAUSAL_GQA, True), (DECODE, True), (CAUSAL, None)])
def test_fa3_may_split_the_cache_and_has_a_plan(
    case: str, packed: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign = calls(monkeypatch, "fa3", case)
    plans, attends = foreign.called("fa3.plan"), foreign.called("fa3")
    assert len(plans) == 1, "the plan is prepared, not timed"
    assert len(attends) > 1, "every replay calls the kernel"
    for call in attends:
        assert call["scheduler_metadata"] is not None, "without its metadata splits are not balanced"
        for key, value in {"num_splits": 0, "pack_gqa": packed, "lengths": plans[0]["lengths"]}.items():
            assert call[key] == value, f"fa3 must be called with {key}={value}, not {call[key]}"
        for key in ("num_splits", "pack_gqa", "causal"):
            assert call[key] == plans[0][key], f"the plan was made for {key}={plans[0][key]}, the call has {call[key]}"


def test_fa4_packs_gqa_and_counts_its_window_without_the_query_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {call["pack_gqa"] for call in calls(monkeypatch, "flash-attn-4", GQA).called("fa4")} == {True}
    call = calls(monkeypatch, "flash-attn-4", OPEN_WINDOW).called("fa4")[0]
    assert call["window_size"] == (63, None), f"a window of 64 keys is 63 to the left: {call}"
    assert call["num_splits"] == 1, "flash-attention 4 does not split the cache on sm_90"


def test_heads_that_share_keys_are_folded_where_the_kernel_would_read_them_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert calls(monkeypatch, "torch-sdpa-flash", GQA).called("flash")[0]["max"] == (16, 128)
    assert calls(monkeypatch, "torch-sdpa-flash", CAUSAL_GQA).called("flash")[0]["max"] == (4, 257)
    assert calls(monkeypatch, "torch-sdpa-cudnn-folded", GQA).called("cudnn")[0]["q"] == (1, 2, 16, 64)
    assert calls(monkeypatch, "torch-sdpa-cudnn", GQA).called("cudnn")[0]["q"] == (1, 8, 4, 64)
    assert calls(monkeypatch, "cudnn-frontend", WIDE_MQA).called("cudnn-frontend")[0]["q"] == (1, 1, 64, 512)
    assert calls(monkeypatch, "cudnn-frontend", WIDE_WINDOW).called("cudnn-frontend")[0]["q"] == (1, 4, 4, 512)


def test_the_memory_efficient_kernel_counts_from_the_last_key(monkeypatch: pytest.MonkeyPatch) -> None:
    assert calls(monkeypatch, "torch-sdpa-efficient", CAUSAL).called("efficient")[0]["mask"] == 2
    assert calls(monkeypatch, "torch-sdpa-efficient", DECODE).called("efficient")[0]["mask"] == 0


def test_lse_is_asked_for_where_the_case_has_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert calls(monkeypatch, "torch-sdpa-cudnn", DECODE).called("cudnn")[0]["lse"] is True
    assert calls(monkeypatch, "torch-sdpa-cudnn", NO_LSE).called("cudnn")[0]["lse"] is False


def test_the_window_of_cudnn_frontend_is_a_distance(monkeypatch: pytest.MonkeyPatch) -> None:
    call = calls(monkeypatch, "cudnn-frontend", WIDE_WINDOW).called("cudnn-frontend")[0]
    assert call["window"] == 129, f"130 keys, the query's own included, reach 129 back: {call}"


@pytest.mark.parametrize("case", [L2, POISONED])
def test_humming_gets_rows_sorted_by_expert_with_nothing_between(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    environment: dict[str, str] = {}
    monkeypatch.setattr("backends.peers.grouped_gemm.os", SimpleNamespace(environ=environment))
    foreign = calls(monkeypatch, "humming", case)
    layer, call = foreign.called("humming.layer")[0], foreign.called("humming")[-1]
    assert layer["weight_config"] == {"quant_method": "modelopt", "quant_algo": "nvfp4"}
    layout = call["layout"]
    assert isinstance(layout, list)
    assert layout[0] == 0, f"offsets begin at 0: {layout}"
    assert layout[-1] == call["rows"] == call["valid_shape_m"], f"offsets end at the number of rows: {layout}"
    assert layout == sorted(layout), f"offsets never fall: {layout}"
    assert call["compute_config"] == {"gemm_type": "grouped_contiguous"}
    # 40 rows, but at most 32 of a slice.
    tuned = {"for": ("transformed", "grouped_contiguous"), "block_m": 16 if case == L2 else 8}
    assert call["tuning_config"] == tuned, f"its own tiles for {call['rows']} rows, and no others"
    assert environment == {"HUMMING_DISABLE_PARALLEL_BUILD": "1"}, "it is called as it was measured"


@pytest.mark.parametrize(("low", "high"), [(8, 64), (0, 39)])
def test_humming_without_tiles_for_one_row_and_for_all_of_them_is_an_error(
    low: int, high: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign = install(monkeypatch)
    tune = import_module("humming.tune")
    monkeypatch.setattr(tune, "get_heuristics_config", lambda *_, **__: [[low, high, {}]], raising=True)
    record = judged(BY_NAME["humming"], L2)
    assert foreign.called("humming"), "the layer must be called"
    assert record.status == "error", f"40 rows with tiles for {low} < rows <= {high} cannot pass: {record.status}"
    assert "shape_m is not within any range" in record.sentence


@pytest.mark.parametrize(
    "peer", [peer for peer in PEERS if peer.name.startswith("torch-sdpa")], ids=lambda peer: peer.name
)
def test_operators_of_the_installed_torch_take_the_call_and_give_the_shapes(peer: Peer) -> None:
    """Tensors without memory: torch's own shape functions answer, even for cases that are too large for this
    machine."""
    spec = spec_of(peer.op)
    cases = [case for name in ("edges", "decode") if name in spec.matrices for case in spec.cases(name)]
    served = [case for case in cases if peer.limits.refusal(case) is None]
    assert served, f"{peer.name} serves none of {len(cases)} cases"
    for case in served:
        tensors = {
            name: torch.empty(layout.shape, dtype=layout.dtype, device="meta")
            for name, layout in layouts_of(spec, case).items()
        }
        call = peer.prepare(case, tensors)
        call.enqueue()
        call.collect()


Results = Sequence[torch.Tensor]


@dataclass
class Device:
    """A device with graph capture: a graph replays by writing to the results of its captured launch."""

    capture: int = 0
    value: float = 1.0
    placed: list[float] = field(default_factory=list)
    graphs: dict[int, Results] = field(default_factory=dict)

    def launch(self) -> Results:
        results = (torch.full((2, 3), self.value).bfloat16(), torch.full((2,), self.value))
        if self.capture:
            for result in results:
                result.fill_(float("nan"))
            self.graphs[self.capture] = results
        return results

    def place(self, results: Results) -> None:
        assert len({float(value) for result in results for value in result.flatten() if value == value}) <= 1
        self.placed.append(float(results[0][0, 0]))

    def replay(self, graph: int, value: float) -> None:
        for result in self.graphs[graph]:
            result.fill_(value)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr("backends.peers.peer.current_capture", lambda: made.capture)
    return made


def captured(device: Device, call: OwnResults, graph: int, launches: int = 1) -> None:
    device.capture = graph
    for _ in range(launches):
        call.enqueue()
    device.capture = 0


def test_what_ran_last_is_placed_whichever_way_it_ran(device: Device) -> None:
    call = OwnResults(device.launch, device.place)
    captured(device, call, 7)
    captured(device, call, 8, launches=5)
    turns = [("at once", 2.0), (8, 3.0), (8, 4.0), ("at once", 5.0), (7, 6.0), (8, 7.0), (7, 8.0)]
    for way, value in turns:
        if isinstance(way, int):
            device.replay(way, value)
        else:
            device.value = value
            call.enqueue()
        call.collect()
    assert device.placed == [value for _, value in turns], f"turns {turns} left {device.placed}"


def test_a_graph_of_one_launch_before_one_of_many_is_outlived_by_it(device: Device) -> None:
    call = OwnResults(device.launch, device.place)
    captured(device, call, 7)
    captured(device, call, 8)
    call.enqueue()
    call.collect()
    device.replay(7, 2.0)
    device.replay(8, 3.0)
    call.collect()
    assert device.placed[-1] == 3.0, "the hot sample is the graph of many launches, captured last"


@pytest.mark.parametrize("graph", [None, 7])
def test_a_replay_that_computes_nothing_leaves_nan(device: Device, graph: int | None) -> None:
    call = OwnResults(device.launch, device.place)
    if graph is not None:
        captured(device, call, graph)
        device.replay(graph, 1.0)
    else:
        call.enqueue()
    call.collect()
    assert device.placed == [1.0]
    call.collect()
    assert device.placed[1] != device.placed[1], "stale results must not be placed a second time"


def test_what_the_first_launch_computed_is_never_placed(device: Device) -> None:
    call = OwnResults(device.launch, device.place)
    call.collect()
    assert device.placed[0] != device.placed[0], "the launch that compiles is none that was asked for"

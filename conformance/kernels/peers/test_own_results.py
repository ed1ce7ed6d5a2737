"""Results in a peer's own memory: what `collect` brings into place is what ran last, in a graph or not, or NaN."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch

from backends.peers.own_results import OwnResults

Results = Sequence[torch.Tensor]


@dataclass
class Device:
    """A device that captures: a graph replays by writing to the results of its last launch."""

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
    monkeypatch.setattr("backends.peers.own_results.current_capture", lambda: made.capture)
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

"""`megamoe explain`: roles, maps, the Perfetto trace, registers of an accumulator, and one sentence for bad input.

`problems` finds events that ui.perfetto.dev would silently drop or draw wrongly.
"""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from io import StringIO
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from backends.vm.tensor.tmem_layout import register_map
from conformance.fakes import backends as fake_backends
from megamoe.cli.main import main
from megamoe.cli.show import styled
from megamoe.cli.terminal import Terminal
from megamoe.contract import AnyProgram, Execution, Row, RunOptions, Target
from megamoe.contract.assembly import assembled
from megamoe.contract.trace import CtaTrace
from megamoe.explain.explain import ExplainError, Explanation, explain, write_files
from megamoe.explain.perfetto import MAX_SLICES, perfetto
from megamoe.explain.registers import AccumulatorTile, accumulator_tile, fragment
from megamoe.explain.roles import ranges, role_name, roles
from megamoe.explain.svg import round_ticks
from megamoe.explain.tables import regions
from megamoe.explain.tmem import TmemMap, tmem_map
from megamoe.spec.load import load_specs
from megamoe.spec.selection import SelectionError

Event = Mapping[str, object]
Track = tuple[object, object]


def _track(event: Event) -> Track:
    return event["pid"], event["tid"]


def _number(event: Event, key: str) -> float:
    value = event.get(key)
    return float(value) if isinstance(value, int | float) else float("nan")


def problems(events: Sequence[Event]) -> Iterator[str]:
    """A sentence for each wrong event: unnamed tracks, overlapping slices, arrows without an end."""
    slices: dict[Track, list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "X":
            begins, lasts = _number(event, "ts"), _number(event, "dur")
            if not lasts >= 0:
                yield f"slice {event['name']!r} lasts {event.get('dur')}"
            slices.setdefault(_track(event), []).append((begins, begins + lasts))
    named = {_track(event) for event in events if event["ph"] == "M" and event["name"] == "thread_name"}
    processes = {event["pid"] for event in events if event["ph"] == "M" and event["name"] == "process_name"}
    for track, pieces in slices.items():
        if track not in named or track[0] not in processes:
            yield f"track {track} has slices but no name"
        for (begins, ends), (next_begins, _) in pairwise(sorted(pieces)):
            if next_begins < ends:
                yield f"track {track}: a slice begins at {next_begins} inside {begins}..{ends}"
    yield from _arrow_problems(events, slices)


def _arrow_problems(events: Sequence[Event], slices: Mapping[Track, Sequence[tuple[float, float]]]) -> Iterator[str]:
    arrows: dict[object, dict[object, list[Event]]] = {}
    for event in events:
        if event["ph"] in ("s", "f"):
            arrows.setdefault(event["id"], {}).setdefault(event["ph"], []).append(event)
    for number, ends in arrows.items():
        if sorted(map(str, ends)) != ["f", "s"] or any(len(found) != 1 for found in ends.values()):
            yield f"arrow {number} has not one beginning and one end"
            continue
        (start,), (finish,) = ends["s"], ends["f"]
        if _number(start, "ts") > _number(finish, "ts"):
            yield f"arrow {number} goes back from {start['ts']} to {finish['ts']}"
        for event in (start, finish):
            if not any(begins <= _number(event, "ts") <= end for begins, end in slices.get(_track(event), ())):
                yield f"arrow {number} touches no slice of track {_track(event)} at {event['ts']}"


CASE = "fmha:hd=64,t=128,s_k=512"
SCHEDULES = ["eager", "lazy", "random:3"]


@cache
def _found(schedule: str, case: str = CASE) -> Explanation:
    return explain(load_specs(None)["fmha"], Row(case, "ptx", "sm_100a", "vm", schedule))


def _cta(schedule: str) -> CtaTrace:
    return _found(schedule).trace.launches[0].ctas[0]


def _map(schedule: str) -> TmemMap:
    found = tmem_map(_cta(schedule), _found(schedule).trace.steps)
    assert found is not None, "the FMHA has tensor memory"
    return found


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_roles_of_the_raw_ptx_fmha(schedule: str) -> None:
    assert _found(schedule).violation is None
    found = {role.name: role.warps for role in roles(_cta(schedule).warps)}
    softmax = (0, 1, 2, 3)
    assert found.pop("softmax") == softmax
    assert found.pop("MMA issuer") == (8,)
    assert found.pop("TMA producer") == (9,)
    assert found.pop("idle") == (10, 11)
    ((name, warps),) = found.items()
    assert "epilogue" in name
    assert warps == (4, 5, 6, 7)


def test_registers_come_from_setmaxnreg() -> None:
    given = {role.name: role.registers for role in roles(_cta("lazy").warps)}
    assert given["softmax"] == 224
    assert given["MMA issuer"] == 96


@pytest.mark.parametrize(
    ("opcodes", "name"),
    [
        ({"tcgen05.ld": 4, "tcgen05.st": 4, "ex2": 2}, "correction"),
        ({"tcgen05.ld": 4, "tcgen05.st": 4, "ex2": 200}, "softmax"),
        ({"tcgen05.ld": 4, "st.global": 4}, "epilogue"),
        ({"wgmma.mma_async": 4, "ex2": 200, "st.global": 1}, "MMA, softmax"),
        ({"cp.async.bulk.tensor.shared.global": 1}, "TMA producer"),
        ({"cp.async.bulk.prefetch.tensor.global": 1}, "idle"),
        ({"mbarrier.init": 1}, "set-up"),
        ({}, "idle"),
    ],
)
def test_role_by_opcodes(opcodes: dict[str, int], name: str) -> None:
    assert role_name(opcodes) == name


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_tensor_memory_map_of_the_raw_ptx_fmha(schedule: str) -> None:
    holdings = _map(schedule).holdings
    tiles = 4
    found = {name: sorted(one.columns for one in holdings if one.name == name) for name in ("S", "P", "O")}
    assert found["S"] == [(0, 127)] * 2 + [(128, 255)] * 2, f"two S buffers of 128 columns, {tiles} tiles"
    assert found["P"] == [(0, 63)] * 2 + [(128, 191)] * 2, "P lies over the S that it came from"
    assert set(found["O"]) == {(256, 319)}, "O has hd columns behind the S buffers"
    for one in holdings:
        assert one.last_read is not None, f"{one.name} in {one.columns} is never read"
        assert one.begins <= one.landed <= one.last_read, f"{one.name} is read before it is written"


def test_a_rescaled_accumulator_is_three_things_in_turn() -> None:
    found = _found("lazy", "fmha:hd=128,t=128,s_k=384,inputs=large_logits")
    cta = found.trace.launches[0].ctas[0]
    assert role_name(cta.warps[4].opcodes) == "correction, epilogue"
    map_ = tmem_map(cta, found.trace.steps)
    assert map_ is not None
    names = [one.name for one in map_.holdings if one.columns == (256, 383)]
    assert names == ["O", "rescaled O", "O", "rescaled O", "O"], "large logits move the maximum at every tile"
    rescaled = [one for one in map_.holdings if one.name == "rescaled O"]
    assert all(one.warps == {4, 5, 6, 7} for one in rescaled)
    assert all(read.of_accumulator for one in rescaled for read in one.reads if read.by == "tcgen05.mma")


def test_one_accumulator_stays_one_over_many_tiles() -> None:
    found = _found("eager", "fmha:hd=64,t=128,s_k=1024")
    map_ = tmem_map(found.trace.launches[0].ctas[0], found.trace.steps)
    assert map_ is not None
    assert [one.columns for one in map_.holdings if one.name == "S"].count((0, 127)) == 4
    adders = [one for one in map_.holdings if one.columns == (256, 319) and one.by == "tcgen05.mma"]
    stores = [one for one in map_.holdings if one.columns == (256, 319) and one.by == "tcgen05.st"]
    assert len(adders) == 1 + len(stores), "an accumulator is a new thing only after it was stored over"


def test_shared_memory_regions() -> None:
    cta = _cta("lazy")
    found = regions(cta)
    assert all(a.behind <= b.first for a, b in pairwise(found)), "regions overlap"
    filled = [one for one in found if any("TMA" in writer for writer in one.writers)]
    assert sum(one.behind - one.first for one in filled) == 16384 * 9, "Q and eight stages of K and V, 16 KiB each"
    barriers = [one for one in found if one.writers == ("mbarriers",)]
    assert sum(one.behind - one.first for one in barriers) == 8 * len(cta.mbarriers)


def test_mbarriers_are_named_by_the_comment_that_initialises_them() -> None:
    found = _found("lazy")
    names = " ".join(found.barrier_names(found.trace.launches[0]).values())
    assert all(name in names for name in ("q_full", "ring_empty 3", "s_full 1"))


def _events(schedule: str) -> list[Event]:
    events = perfetto(_found(schedule).trace, CASE)["traceEvents"]
    assert isinstance(events, list)
    return json.loads(json.dumps(events))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_perfetto_trace_is_sound(schedule: str) -> None:
    events = _events(schedule)
    assert list(problems(events)) == []
    tracks = [event["args"] for event in events if event["name"] == "thread_name"]
    for wanted in ("warp 9: TMA producer", "warp 8: MMA issuer", "tensor core", "TMA copies 0"):
        assert {"name": wanted} in tracks
    assert sum(event["ph"] == "s" for event in events) >= 20, "waits have arrows from what releases them"


def _without(events: list[Event], kind: str, name: str = "") -> list[Event]:
    victim = next(event for event in events if event["ph"] == kind and str(event["name"]).startswith(name))
    return [event for event in events if event is not victim]


def _changed(events: list[Event], kind: str, key: str, value: object) -> list[Event]:
    victim = next(event for event in events if event["ph"] == kind and event.get(key) not in (None, 0))
    return [{**event, key: value} if event is victim else event for event in events]


@pytest.mark.parametrize(
    ("planted", "sentence"),
    [
        (lambda events: _without(events, "f"), "has not one beginning and one end"),
        (lambda events: _without(events, "M", "thread_name"), "no name"),
        (lambda events: _without(events, "M", "process_name"), "no name"),
        (lambda events: _changed(events, "X", "dur", -1), "lasts -1"),
        (lambda events: _changed(events, "X", "dur", 10_000), "inside"),
        (lambda events: _changed(events, "s", "ts", 10_000), "goes back"),
        (lambda events: _changed(events, "f", "tid", 77), "touches no slice"),
    ],
)
def test_the_checker_catches(planted: Callable[[list[Event]], list[Event]], sentence: str) -> None:
    said = list(problems(planted(_events("lazy"))))
    assert any(sentence in one for one in said), f"a planted fault was not caught: {said}"


def test_too_many_slices_are_left_out_and_said() -> None:
    trace = _found("lazy").trace
    many = replace(trace, launches=trace.launches * (MAX_SLICES // 100))
    out = perfetto(many, CASE)
    events, notes = out["traceEvents"], out["otherData"]
    assert isinstance(events, list)
    assert isinstance(notes, dict)
    assert sum(event["ph"] == "X" for event in events) <= MAX_SLICES
    assert notes["events left out"] > 0
    assert list(problems(events)) == [], "arrows of slices that were left out must go too"


def test_files(tmp_path: Path) -> None:
    files = {path.name: path for path in write_files(_found("lazy"), tmp_path)}
    assert set(files) == {"kernel.ptx", "trace.perfetto.json", "tmem.svg", "registers.svg"}
    assert json.loads(files["trace.perfetto.json"].read_text())["otherData"]["clock"].endswith("no time of a GPU")
    picture = ElementTree.parse(files["tmem.svg"]).getroot()
    words = " ".join(text.text or "" for text in picture.iter("{http://www.w3.org/2000/svg}text"))
    for wanted in (CASE, "tensor memory column", "VM steps", "P: tcgen05.st of warps 0-3", "S: tcgen05.mma of warp 8"):
        assert wanted in words, f"the picture does not say {wanted!r}"


def test_what_an_assembler_refuses_is_a_sentence() -> None:
    (one, *_) = assembled("this is no PTX\nnor is this", "sm_100a")
    assert one.sentence, "PTX that no assembler takes must end in a sentence"
    assert "\n" not in one.sentence, f"it has several lines: {one.sentence!r}"
    assert not one.numbers


class _Careless:
    """An executor whose trace is not the contract's."""

    name = "careless"

    def unavailable(self, target: Target) -> str | None:
        return None

    def run(self, program: AnyProgram, tensors: Mapping[str, torch.Tensor], options: RunOptions) -> Execution:
        return Execution(trace={"launches": 3})  # type: ignore[arg-type]


CARELESS = _Careless()


def test_a_trace_of_another_form_is_refused() -> None:
    spec = load_specs(None)["fmha"]
    row = Row(spec.parse_case(CASE).id, "ptx", "sm_100a", f"{__name__}:CARELESS", "lazy")
    with pytest.raises(ExplainError, match="a dict as its trace"):
        explain(spec, row)


def test_numbers_in_words() -> None:
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    assert ranges([3]) == "3"
    assert ranges([]) == ""


@pytest.mark.parametrize(("low", "high"), [(0, 1), (35, 729), (0, 100_000), (5, 5)])
def test_ticks_are_few_round_and_inside(low: int, high: int) -> None:
    found = list(round_ticks(low, high, 12))
    assert 1 <= len(found) <= 13
    assert all(low <= tick <= high for tick in found)
    if len(found) > 1:
        assert str(found[1] - found[0]).rstrip("0") in ("1", "2", "5")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([CASE, "--backend", "pxt"], "there is no backend named 'pxt'"),
        ([CASE, "--backend", "ptx", "--target", "sm_80"], "there is no target 'sm_80'"),
        ([CASE, "--backend", "ptx", "--executor", "nothing"], "there is no executor named 'nothing'"),
        ([CASE, "--backend", "fa3", "--target", "sm_100a"], "has fmha for sm_90a, not sm_100a"),
        ([CASE, "--backend", "ptx", "--schedule", "soon"], "schedule 'soon' is not"),
        ([CASE, "--backend", "ptx", "--schedule", "random:0-3"], "one schedule is explained at a time"),
        (["fhma:hd=64", "--backend", "ptx"], "there is no op 'fhma'"),
        (["fmha:hd=65,t=1,s_k=1", "--backend", "ptx"], "65"),
        (
            [CASE, "--backend", f"{fake_backends.__name__}:WORKS", "--executor", f"{fake_backends.__name__}:EXECUTOR"],
            "leaves no trace",
        ),
        ([CASE, "--backend", "ptx", "--output", "taken"], "cannot write the explanation taken"),
        ([CASE, "--backend", f"{fake_backends.__name__}:RAISES"], "cannot be explained: "),
    ],
)
def test_bad_input_is_a_sentence(
    arguments: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").write_text("a file, not a folder")
    assert main(["explain", *arguments]) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert "Traceback" not in said


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["explain", "fmha:hd=64,t=1,s_k=128", "--backend", "ptx", "--schedule", "eager"]) == 0
    said = capsys.readouterr().out
    words = ("grid", "warp roles", "TMA producer", "who arrives", "MMA FLOPs issued", "ui.perfetto.dev", "tmem.svg")
    for wanted in words:
        assert wanted in said
    (folder,) = (tmp_path / "results" / "explain").iterdir()
    assert {"report.txt", "kernel.ptx", "trace.perfetto.json", "tmem.svg", "registers.svg"} == {
        file.name for file in folder.iterdir()
    }


def test_a_kernel_that_broke_a_rule_is_explained_and_ends_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["explain", "fmha:hd=64,t=1,s_k=128", "--backend", "conformance.fakes.broken_kernels:BROKEN_PTX"]) == 1
    assert "tmem-store-not-waited" in capsys.readouterr().out


SWIGLU = "nvfp4_moe:hidden=128,intermediate=128,num_experts=1,tokens=128,stage=l1"


@cache
def _swiglu(case: str = SWIGLU) -> Explanation:
    row = Row(case, "ptx", "sm_100a", "vm", "eager")
    return explain(load_specs(None)[row.op], row)


def _tile(case: str = SWIGLU, interleave: int | None = 8) -> AccumulatorTile:
    found = _swiglu(case)
    for launch in found.trace.launches:
        tile = accumulator_tile(launch.ctas[0], found.ptx, found.trace.steps, interleave)
        if tile is not None:
            return tile
    raise AssertionError("no launch loads an accumulator")


@pytest.mark.parametrize("shape", ["32x32b", "16x64b", "16x128b", "16x256b"])
@pytest.mark.parametrize("num", [1, 4, 32])
def test_fragment_is_that_of_the_machine(shape: str, num: int) -> None:
    """The ISA's figures are written down twice, independently, so that a mistake in one shows."""
    layout = register_map(shape, num)
    machine = {
        (int(layout.lanes[register, thread]), int(layout.columns[register, thread])): (thread, register)
        for register in range(len(layout.lanes))
        for thread in range(32)
    }
    assert fragment(shape, num) == machine


def test_swiglu_tile_is_taken_once_and_whole() -> None:
    tile = _tile()
    cells = [cell for load in tile.loads for cell in load.cells]
    assert len(cells) == len(set(cells)), "a cell is loaded into two registers"
    assert set(cells) == {(m, n) for m in range(128) for n in range(tile.columns)}, "a cell is loaded into none"
    assert tile.turns == 8, "gate and up take turns of the case's interleave where exponentials are computed"


@pytest.mark.parametrize(("m", "n", "thread", "register"), [(0, 0, 0, 0), (77, 8, 77 % 32, 8), (127, 21, 31, 21)])
def test_register_of_a_cell(m: int, n: int, thread: int, register: int) -> None:
    """The same cells as conformance/kernels/ptx/test_moe_layer.py finds by zeroing registers."""
    holders = [load.cells[m, n] for load in _tile().loads if (m, n) in load.cells and load.warp == m // 32]
    assert holders == [(thread, register)]


def test_no_turns_without_exponentials() -> None:
    assert _tile("nvfp4_moe:hidden=128,intermediate=128,num_experts=1,tokens=3,stage=l2").turns is None


def test_picture_names_thread_and_register(tmp_path: Path) -> None:
    pictures = [path for path in write_files(_swiglu(), tmp_path) if path.name.startswith("registers")]
    assert pictures, "the launch that loads an accumulator has no picture of it"
    words = {node.text for node in ElementTree.parse(pictures[0]).iter() if node.tag.endswith(("text", "title"))}
    assert {"t0 r0", "t31 r19", "M 31", "N 19", "gate, 8 columns a turn"} <= words
    assert "M 3, N 12: thread 3, register 12" in words


def test_the_page_of_a_runner_has_its_colours_and_nothing_else_of_a_terminal() -> None:
    pieces = [["title", "bold red"], ["\x1b[2Jcleared", "dim"], ["here", "link https://example.org"], ["plain", ""]]
    text = styled(pieces)
    assert text.plain == "title\\x1b[2Jclearedhereplain", "control characters of foreign text are escaped"
    assert [str(span.style) for span in text.spans] == ["bold red", "dim"], "a link is no colour"
    shown = StringIO()
    Terminal(file=shown, force_terminal=True, color_system="standard", width=100).print(text)
    assert "\x1b[1;31mtitle" in shown.getvalue(), "a terminal shows the colours again"
    assert "\x1b[2J" not in shown.getvalue()
    for nonsense in ("text", [["one"]], [[1, 2]], None):
        with pytest.raises(SelectionError, match="answered no report"):
            styled(nonsense)

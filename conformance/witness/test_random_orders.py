"""Public kernels under random orders: a race that the run in order hides is told, and a kernel without one is not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conformance.kernels.mutants.unmutated import OTHERS, Watch, Watched, told
from conformance.witness import public, random_orders
from conformance.witness.__main__ import main
from conformance.witness.public import Checkout, Header, PublicCase, cases
from conformance.witness.public_record import PublicRow, read_rows
from conformance.witness.random_orders import MAX_SECONDS, RIGHT, Turn, planned, watch, watched

HERE = Checkout("someone/kernels", "0" * 40, "numpy")
ORDERS = range(24)
# Warp 0 asks once whether warp 1 has raised the flag, and reads the value only then.
_TEXT = """
.version 8.7
.target sm_90a
.address_size 64
.visible .entry hand_over(.param .u64 cells)
{{
    .reg .pred p;
    .reg .b32 t, v;
    .reg .b64 c;
    ld.param.u64 c, [cells];
    mov.u32 t, %tid.x;
    mov.b32 v, 7;
    setp.eq.u32 p, t, 0;
    @p bra reader;
    setp.ne.u32 p, t, 32;
    @p bra done;
    st.global.b32 [c + 4], v;
    st.{release}.gpu.global.b32 [c], 1;
    bra done;
reader:
    ld.{acquire}.gpu.global.b32 t, [c];
    setp.eq.u32 p, t, 0;
    @p bra late;
    ld.global.b32 v, [c + 4];
late:
    st.global.b32 [c + 8], v;
done:
    ret;
}}
"""


def _launch(kernels: Header, wanted: int) -> None:
    cells = np.zeros(3, np.int32)
    kernels.device.launch((kernels.folder / kernels.name).read_text(), "hand_over", 1, 64, cells)
    assert cells[2] == wanted, f"it leaves {cells[2]}"


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a checkout of two kernels: one that orders what it hands over, and one that does not."""
    monkeypatch.setattr(public, "_open_doors", lambda case, device: None)
    folder = tmp_path / "sources" / "kernels"
    folder.mkdir(parents=True)
    (folder / "ordered.ptx").write_text(_TEXT.format(release="release", acquire="acquire"))
    (folder / "racing.ptx").write_text(_TEXT.format(release="relaxed", acquire="relaxed"))
    return folder.parent


def _case(name: str, wanted: int = 7) -> PublicCase:
    return PublicCase("Kernels", HERE, name, "sm_90a", "hand_over", {"wanted": wanted}, _launch)


def test_a_race_that_the_run_in_order_hides_is_told(checkout: Path) -> None:
    assert public.judged(_case("racing.ptx"), str(checkout)).status == "ok", "the run in order shows the race"
    line = watched(_case("racing.ptx"), str(checkout), ORDERS)
    assert line.rows == len(ORDERS)
    assert line.errors, "no order shows the race"
    assert all(one.startswith("random:") and "global-race at " in one for one in line.errors), line.errors
    assert len(line.errors) < len(ORDERS), "an order in which warp 0 is first shows a race"


def test_a_kernel_without_a_race_is_silent(checkout: Path) -> None:
    line = watched(_case("ordered.ptx"), str(checkout), ORDERS)
    assert (line.rows, line.errors, line.argued) == (len(ORDERS), (), {}), f"{line}"
    assert line.text, "its file has no digest"


def test_a_wrong_result_is_told(checkout: Path) -> None:
    line = watched(_case("ordered.ptx", wanted=8), str(checkout), range(2))
    assert [one.partition(", ")[0] for one in line.errors] == ["eager: wrong", "random:0: wrong", "random:1: wrong"]
    assert "it leaves 7" in line.errors[0]


def test_what_is_argued_is_counted(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (checkout / "argued.yaml").write_text(
        "- rule: global-race\n  kernel: hand_over\n  reason: A defect of the kernel.\n"
    )
    monkeypatch.setattr(public, "ARGUED", checkout / "argued.yaml")
    line = watched(_case("racing.ptx"), str(checkout), ORDERS)
    assert not line.errors, f"{line.errors}"
    ((finding, rows),) = line.argued.items()
    assert finding.startswith("global-race at "), finding
    assert 0 < rows < len(ORDERS), f"{line.argued}"
    record = Watch(checkout / "others.jsonl")
    record.append(line)
    assert f"argued, by rule, each site in each row: `global-race` {rows}." in "\n".join(told(record, others=True))


def test_a_call_goes_on_where_its_record_ends(checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class InThisProcess:
        def __init__(self, *_: object, **__: object) -> None: ...

        def __enter__(self) -> InThisProcess:
            return self

        def __exit__(self, *_: object) -> None: ...

        def schedule(self, function: Any, args: tuple[Any, ...], timeout: float) -> InThisProcess:
            self.line: Watched = function(*args)
            return self

        def result(self) -> Watched:
            return self.line

    monkeypatch.setattr(random_orders, "ProcessPool", InThisProcess)
    plan = [
        Turn(_case("ordered.ptx"), range(2)),
        Turn(_case("racing.ptx"), range(2, 4), "more than 2 s in order"),
        Turn(_case("gone.ptx"), range(4, 6)),
    ]
    record = Watch(tmp_path / "others.jsonl")
    assert not list(watch(record, checkout, plan, seconds=-1.0)), "a call began after its time"
    assert sorted(one.left_out for one in record.results) == ["more than 2 s in order", "the checkout has no gone.ptx"]
    (line,) = watch(record, checkout, plan)
    record.close()
    size = record.path.stat().st_size
    again = Watch(record.path)
    assert not list(watch(again, checkout, plan)), "a line without an error was run again"
    assert record.path.stat().st_size == size, "a line was written again"
    said = "\n".join(told(again, others=True))
    assert "2 rows: 1 call, under random orders; 0 with an error." in said, said
    assert "Left out: 1 (more than 2 s in order), 1 (the checkout has no gone.ptx)." in said, said
    assert "| Kernels sm_90a | 2 |" in said, said
    for wanting in (replace(line, errors=("a race",)), replace(line, text="another"), replace(line, rows=1)):
        again.append(wanting)
        (renewed,) = watch(again, checkout, plan)
        assert replace(renewed, seconds=line.seconds) == line
    again.close()


def test_the_plan_follows_the_record_of_public_kernels() -> None:
    rows = {row.name: row for row in read_rows(public.RECORD.read_text("utf-8"))}
    plan = planned(3)
    assert [turn.case.name for turn in plan] == [case.name for case in cases()]
    seeds = [seed for turn in plan for seed in turn.seeds]
    assert len(set(seeds)) == len(seeds), "two calls have an order in common"
    for turn in plan:
        row: PublicRow = rows[turn.case.name]
        assert (turn.left_out == "") == (row.status in RIGHT and row.cpu_seconds <= MAX_SECONDS), f"{turn}"


def test_an_unusable_call_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--orders", "3"]) == 2
    assert "--sources" in capsys.readouterr().out
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"my": "data"}) + "\n")
    assert main(["--sources", str(tmp_path), "--orders", "1", "--record", str(other)]) == 2
    assert "is no line of a Watched" in capsys.readouterr().out


def test_the_recorded_rows_have_no_error() -> None:
    wrong = [f"{one.case} on {one.target}: {one.errors[0]}" for one in Watch(OTHERS).wrong]
    assert not wrong, f"the machine blames public kernels, or one has a defect to argue: {wrong}"

"""The gate's findings on run sets that are incomplete or do not fit together."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from conformance.fakes.results import CASE, OTHER, header, record
from megamoe.contract import Row
from megamoe.gate.shards import Absent, absent_shards, shards_twice
from megamoe.records.lines import RunHeader, Shard
from megamoe.records.shards import Nth, cut
from megamoe.spec.selection import Selection

ROWS = [Row(f"fmha:hd=64,t={t},s_k=128", "ptx", "sm_90a", "vm", "eager") for t in range(1, 13)]
COSTS: Mapping[Row, float] = dict.fromkeys(ROWS, 1.0)
WHOLE = cut(ROWS, 3, COSTS)


def _header(index: int, run: str = "", owed: int | None = None, **changes: object) -> RunHeader:
    shard = WHOLE.shard(Nth(index, 3), Selection(), {}).model_copy(update=changes)
    owed = len(WHOLE.shards[index - 1]) if owed is None else owed
    made = header(run or f"run-{index}", owed_rows=owed, selection=Selection().kept)
    return made.model_copy(update={"shard": shard})


def _absent(*headers: RunHeader, rows: list[Row] = ROWS, recorded: frozenset[Row] = frozenset()) -> Absent:
    return absent_shards(
        [(one, rows) for one in headers], recorded, lambda rows, count: cut(rows, count, COSTS), _again
    )


def _again(header: RunHeader, index: str) -> str:
    assert header.shard is not None
    return f"again {index}/{header.shard.count}"


def _sentences(*headers: RunHeader, rows: list[Row] = ROWS) -> list[str]:
    return [finding.sentence for finding in _absent(*headers, rows=rows).findings]


def test_a_whole_run_set_and_runs_without_shards_are_fine() -> None:
    assert _sentences(_header(1), _header(2), _header(3)) == []
    assert _sentences(_header(3), _header(1), _header(2), _header(2, "resumed")) == [], "a shard may take two runs"
    assert _sentences(header()) == []


@pytest.mark.parametrize("index", [1, 2, 3])
def test_a_missing_shard_is_named_once_and_speaks_for_its_rows(index: int) -> None:
    found = _absent(*(_header(one) for one in (1, 2, 3) if one != index))
    (finding,) = found.findings
    assert f"shard {index}/3 of run set" in finding.sentence
    assert f"{len(WHOLE.shards[index - 1])} rows" in finding.sentence
    assert finding.sentence.endswith(f"Run it: again {index}/3"), "it says how to make it"
    assert finding.closes
    assert found.rows == frozenset(WHOLE.shards[index - 1]), "rows of shards that are there answer for themselves"


def test_a_row_with_a_record_answers_for_itself() -> None:
    row = WHOLE.shards[2][0]
    assert row not in _absent(_header(1), _header(2), recorded=frozenset({row})).rows


def test_a_missing_shard_of_other_rows_than_todays_speaks_for_all_that_is_missing() -> None:
    fewer = ROWS[:-1]
    found = _absent(_header(1), _header(2), rows=fewer, recorded=frozenset(WHOLE.shards[0]))
    assert len(found.findings) == 1
    assert found.rows == frozenset(fewer) - frozenset(WHOLE.shards[0]), "nobody knows which rows were in it"


@pytest.mark.parametrize(
    ("headers", "sentence"),
    [
        ([_header(1), _header(2), _header(3, run_set="another")], "shard 1/3 of run set another is in no file"),
        ([_header(1), _header(2), _header(3, plan="0" * 16)], "were cut differently"),
        ([_header(1), _header(2), _header(2, count=2)], "were cut differently"),
        ([_header(1), _header(2), _header(3, owed=9)], "its selection holds 12 now"),
        ([_header(1), _header(2), _header(2, "again")], "shard 3/3 of run set"),
    ],
    ids=["another run set", "another plan", "another count", "other rows", "a shard twice"],
)
def test_what_does_not_fit_closes_the_gate(headers: list[RunHeader], sentence: str) -> None:
    found = _absent(*headers).findings
    assert any(sentence in one.sentence for one in found), f"{sentence!r} is not said: {[str(one) for one in found]}"
    assert all(one.closes for one in found)


def test_a_shard_of_another_selection_does_not_count() -> None:
    other = _header(3).model_copy(update={"selection": Selection("full").kept})
    assert any("were cut differently" in sentence for sentence in _sentences(_header(1), _header(2), other))


TREE = {"specs": "1" * 64, "expected": "2" * 64, "code": "3" * 64}
TREES = {
    "revision": {"git_revision": "def"},
    "no revision": {"git_revision": None},
    "no digests": {"digests": {}},
    **{name: {"digests": {**TREE, name: "4" * 64}} for name in TREE},
}


@pytest.mark.parametrize("change", TREES)
def test_shards_of_two_trees_close_the_gate(change: str) -> None:
    of_one = [_header(index).model_copy(update={"digests": TREE}) for index in (1, 2, 3)]
    assert _sentences(*of_one) == []
    found = _absent(*of_one[:2], of_one[2].model_copy(update=TREES[change])).findings
    assert any("are of two trees" in one.sentence and "run-3" in one.sentence for one in found), f"{change} is not said"
    assert all(one.closes for one in found)


def test_a_row_of_one_shard_in_two_runs_is_said_and_a_resumed_run_is_not() -> None:
    again = [_header(1), _header(1, "again"), _header(2)]
    first = record(case=CASE, run="run-1")
    (finding,) = shards_twice(again, [first, record(case=CASE, run="again")])
    assert finding.closes
    assert "run-1 and again are both shard 1/3 of run set" in finding.sentence
    assert shards_twice(again, [first, record(case=OTHER, run="again")]) == [], "each has rows of its own"
    assert shards_twice(again, [first, first]) == [], "one run, copied, is one run"


def test_many_missing_shards_are_one_sentence() -> None:
    (finding,) = _absent(_header(1, count=1000)).findings
    assert "999 of the 1000 shards of run set" in finding.sentence
    assert len(finding.sentence) < 400, "nobody reads a thousand numbers"
    assert finding.sentence.endswith("Run them: for index in $(seq 2 1000); do again $index/1000; done")
    assert "for index in $(seq 3 20); do" in _sentences(_header(1, count=20), _header(2, count=20))[0]
    assert "for index in 2 $(seq 4 20); do" in _sentences(_header(1, count=20), _header(3, count=20))[0]
    with pytest.raises(ValueError, match="less than or equal to 1000"):
        Shard(index=1, count=10**6, run_set="nightly", plan="0" * 16)

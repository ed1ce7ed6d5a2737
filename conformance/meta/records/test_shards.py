"""A run cut into shards: no row is lost or doubled, costs are even, a new row moves few, jobs need not communicate."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from conformance.fakes.results import header, record, write
from megamoe.contract import Row
from megamoe.records.lines import RunHeader
from megamoe.records.shards import SLACK, UNKNOWN_S, Cut, Nth, cost_of, cut
from megamoe.spec.selection import Selection, SelectionError

CASES = [f"fmha:hd=64,t={t},s_k={s_k}" for t in range(1, 21) for s_k in (128, 256, 384)]
ROWS = [
    Row(case, backend, "sm_90a", "vm", name) for case in CASES for backend in ("a", "b") for name in ("eager", "lazy")
]
# From 0.05 to 8 s, as in the smoke profile.
COSTS: Mapping[Row, float] = {row: 0.05 * 160 ** random.Random(str(row)).random() for row in ROWS}


def _load(shard: Sequence[Row]) -> float:
    return sum(COSTS[row] for row in shard)


def _where(found: Cut) -> dict[Row, int]:
    return {row: index for index, shard in enumerate(found.shards) for row in shard}


@pytest.mark.parametrize("count", [1, 2, 3, 8, 60])
def test_every_row_is_in_one_shard_beside_its_group(count: int) -> None:
    found = cut(ROWS, count, COSTS)
    assert len(found.shards) == count
    assert all(found.shards), "an empty shard would prove nothing"
    assert sorted(row for shard in found.shards for row in shard) == sorted(ROWS), "a row is lost, or twice"
    where = _where(found)
    for case in CASES:
        assert len({where[row] for row in ROWS if row.case == case}) == 1, f"the backends of {case} never meet"
    assert all([*shard] == [row for row in ROWS if row in shard] for shard in found.shards), "long rows start first"


@pytest.mark.parametrize("count", [2, 4, 8])
def test_shards_cost_about_the_same(count: int) -> None:
    loads = [_load(shard) for shard in cut(ROWS, count, COSTS).shards]
    assert max(loads) <= SLACK * _load(ROWS) / count * 1.05, f"the dearest of {count} shards waits alone: {loads}"


def test_a_row_dearer_than_all_others_has_a_shard_to_itself() -> None:
    costs = {**COSTS, ROWS[0]: 10 * _load(ROWS)}
    (alone,) = [shard for shard in cut(ROWS, 4, costs).shards if ROWS[0] in shard]
    assert {row.case for row in alone} == {ROWS[0].case}, "nothing waits behind a row that takes longer than the rest"


@pytest.mark.parametrize("count", [2, 4, 8])
def test_a_new_row_moves_few_others(count: int) -> None:
    before = _where(cut(ROWS, count, COSTS))
    moved: list[float] = []
    for case in CASES[::6]:
        fewer = [row for row in ROWS if row.case != case]
        after = _where(cut(fewer, count, COSTS))
        moved.append(sum(after[row] != before[row] for row in fewer) / len(fewer))
    assert sum(moved) / len(moved) < 0.2, f"adding one case to {len(CASES)} moves so many of the others: {moved}"


def test_the_order_of_the_rows_does_not_matter() -> None:
    assert cut(ROWS, 4, COSTS).plan == cut(ROWS[::-1], 4, COSTS).plan
    assert cut(ROWS, 4, COSTS).plan != cut(ROWS[:-1], 4, COSTS).plan, "a plan names its rows"
    assert cut(ROWS, 4, COSTS).plan != cut(ROWS, 3, COSTS).plan


def test_a_run_set_is_named_by_what_it_runs() -> None:
    found, digests = cut(ROWS, 2, COSTS), {"code": "c", "specs": "s"}
    names = [found.shard(Nth(index, 2), Selection(), digests).run_set for index in (1, 2)]
    assert names[0] == names[1], "two jobs of one tree are one run set without talking"
    others = [
        found.shard(Nth(1, 2), Selection(), {**digests, "code": "d"}),
        found.shard(Nth(1, 2), Selection("full"), digests),
        cut(ROWS[4:], 2, COSTS).shard(Nth(1, 2), Selection(), digests),
    ]
    assert names[0] not in {one.run_set for one in others}, "other code, another profile or other rows are another set"
    assert found.shard(Nth(1, 2, "nightly-7"), Selection(), digests).run_set == "nightly-7"


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "1/0", "a/b", "1/2/3", "-1/2", "1/100000", " 1/2", "1/1\n"])
def test_what_is_no_shard_is_a_sentence(text: str) -> None:
    with pytest.raises(SelectionError, match="shard"):
        Nth.parse(text)


def test_more_shards_than_rows_are_refused() -> None:
    with pytest.raises(SelectionError, match="give at most 1"):
        cut(ROWS[:4], 2, COSTS)


def test_the_newest_record_says_what_a_row_costs(tmp_path: Path) -> None:
    def run(name: str, day: int) -> RunHeader:
        return header(name).model_copy(update={"started": f"2026-11-{day:02}T00:00:00+00:00"})

    def took(run: str, case: str, seconds: float | None) -> object:
        return record(case=case, run=run).model_copy(update={"judge_host_seconds": seconds})

    # The newer run is in the file that is read first.
    write(tmp_path / "a.jsonl", run("new", 2), took("new", CASES[0], 4.0), took("new", CASES[1], None))  # pyright: ignore[reportArgumentType]
    write(tmp_path / "b.jsonl", run("old", 1), took("old", CASES[0], 9.0), took("old", CASES[2], 2.0))  # pyright: ignore[reportArgumentType]
    known = record(case=CASES[0]).row
    costs = cost_of([known._replace(case=case) for case in (*CASES[:3], "other:x=1")], tmp_path)
    assert list(costs.values()) == [4.0, 3.0, 2.0, 3.0], "newest record, median of the op, a record, median of all"
    assert set(cost_of(ROWS, tmp_path / "nowhere").values()) == {UNKNOWN_S}, "without records all rows are alike"

"""Cuts a run into shards: which rows each shard has, and what its header says.

The cut depends only on the rows and the tracked records, so that jobs of one commit agree without communicating. A
group of rows prefers the shards in an order of its own (rendezvous hashing) and goes to the first with room for its
cost: a shard may cost SLACK times its fair share. A new row therefore moves few others, and an added shard takes some
from each.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Final, TypeVar

from megamoe import CHECKOUT
from megamoe.contract import Row
from megamoe.contract.counted import counted
from megamoe.records.files import newest_records, read_records, record_files_of
from megamoe.records.lines import MAX_NAME, MAX_SHARDS, Shard
from megamoe.spec.selection import Selection, SelectionError

SLACK: Final = 1.1
UNKNOWN_S: Final = 1.0
"""The cost of each row if no record knows any."""
TRACKED: Final = CHECKOUT / "results" / "records"
_NTH = re.compile(r"([0-9]{1,6})/([0-9]{1,6})")
_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class Nth:
    """One of `count` shards; `index` starts at 1. `run_set`: a name common to all of them, "" to derive it from what
    they run."""

    index: int
    count: int
    run_set: str = ""

    @classmethod
    def parse(cls, text: str, run_set: str = "") -> Nth:
        """Parses "2/3" as the second of three. Raises SelectionError for anything else."""
        match = _NTH.fullmatch(text)
        if not match:
            raise SelectionError(f"shard {text[:40]!r} is not of the form INDEX/COUNT, such as 1/4")
        index, count = int(match[1]), int(match[2])
        if not 1 <= index <= count <= MAX_SHARDS:
            raise SelectionError(
                f"there is no shard {text}: the index goes from 1 to the count, and the count to {MAX_SHARDS}"
            )
        if len(run_set) > MAX_NAME or not run_set.isprintable():
            raise SelectionError(f"--run-set has at most {MAX_NAME} characters, all of them printable")
        return cls(index, count, run_set)

    def of(self, items: Iterable[_Item]) -> list[_Item]:
        """Every `count`-th item, starting with the `index`-th."""
        return list(items)[self.index - 1 :: self.count]


WHOLE: Final = Nth(1, 1)
"""The only shard of an uncut run."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Rows in shards: `shards[0]` has the first shard's rows, in the given order."""

    shards: tuple[tuple[Row, ...], ...]

    @property
    def plan(self) -> str:
        """A digest of the assignment of rows to shards. Shards with different plans do not belong together."""
        placed = sorted(f"{row}\0{index}" for index, shard in enumerate(self.shards) for row in shard)
        return hashlib.sha256("\n".join(placed).encode()).hexdigest()[:16]

    def shard(self, nth: Nth, selection: Selection, digests: Mapping[str, str]) -> Shard:
        """What the header of a shard says. `digests`: the specs', the expected failures' and the code's."""
        what = json.dumps([selection.kept, sorted(digests.items()), nth.count, self.plan])
        run_set = nth.run_set or hashlib.sha256(what.encode()).hexdigest()[:12]
        return Shard(index=nth.index, count=nth.count, run_set=run_set, plan=self.plan)


def cut(rows: Sequence[Row], count: int, seconds: Mapping[Row, float]) -> Cut:
    """`rows` in `count` shards of about equal cost, none of them empty. `seconds`: the cost of each row.

    Rows of one case, target and executor stay together: one run compares backends and times them in turns, and
    schedules share an oracle. Raises SelectionError if there are fewer such groups than shards.
    """
    costs: dict[str, float] = {}
    for row in dict.fromkeys(rows):
        costs[_group(row)] = costs.get(_group(row), 0.0) + seconds[row]
    if len(costs) < count:
        what = "groups of rows of one case, target and executor" if len(costs) < len(rows) else "rows"
        raise SelectionError(
            f"{len(costs)} {what} cannot be cut into {counted(count, 'shard')}: give at most {len(costs)}"
        )
    capacity = _fair_share(sorted(costs.values(), reverse=True), count) * SLACK
    loads, placed = [0.0] * count, dict[str, int]()
    for group in sorted(costs, key=lambda group: (-costs[group], group)):
        preferred = sorted(range(count), key=lambda index: _rank(group, index))
        roomy = (index for index in preferred if loads[index] + costs[group] <= capacity)
        chosen = next(roomy, None)
        if chosen is None:
            chosen = min(preferred, key=loads.__getitem__)
        placed[group], loads[chosen] = chosen, loads[chosen] + costs[group]
    for index in set(range(count)) - set(placed.values()):
        # The cheapest groups are placed last and may all fit elsewhere. Move one here from the most crowded shard.
        crowded = max(range(count), key=lambda one: sum(where == one for where in placed.values()))
        placed[min((one for one in placed if placed[one] == crowded), key=lambda one: _rank(one, index))] = index
    return Cut(tuple(tuple(row for row in dict.fromkeys(rows) if placed[_group(row)] == one) for one in range(count)))


def _group(row: Row) -> str:
    return f"{row.case} {row.target} {row.executor}"


def cut_now(rows: Sequence[Row], count: int) -> Cut:
    """`rows` in `count` shards, with costs from the tracked records. Raises what `cut` raises."""
    return cut(rows, count, cost_of(rows))


def _fair_share(costs: Sequence[float], count: int) -> float:
    """The cost of a shard if all shards are equal, except groups that cost more and get a shard to themselves.

    `costs`: in descending order.
    """
    left = sum(costs)
    for alone, cost in enumerate(costs[: count - 1]):
        if cost * (count - alone) <= left:
            return left / (count - alone)
        left -= cost
    return left


def _rank(group: str, index: int) -> bytes:
    return hashlib.sha256(f"{group}\0{index}".encode()).digest()


def cost_of(rows: Iterable[Row], folder: Path = TRACKED) -> dict[Row, float]:
    """Host seconds of each row, from its newest record in `folder`.

    A row without a record gets the median of its op; an op without one gets the overall median, or UNKNOWN_S.
    """
    known = _recorded(folder)
    by_op: dict[str, list[float]] = {}
    for row, seconds in known.items():
        by_op.setdefault(row.op, []).append(seconds)
    typical = {op: median(seconds) for op, seconds in by_op.items()}
    of_any = median(known.values()) if known else UNKNOWN_S
    return {row: known.get(row, typical.get(row.op, of_any)) for row in rows}


@cache
def _recorded(folder: Path) -> dict[Row, float]:
    """Host seconds of every row that has a record in `folder`; the newest record counts."""
    files = map(read_records, record_files_of(folder))
    found = newest_records(files, lambda record: bool(record.judge_host_seconds) and record.status == "passed")
    return {row: record.judge_host_seconds or 0.0 for row, record in found.items()}

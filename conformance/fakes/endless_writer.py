"""A process that writes records until it is killed. It is spawned, so this file imports little."""

from __future__ import annotations

import itertools
from pathlib import Path

from megamoe.contract import Row
from megamoe.records.files import RecordWriter
from megamoe.records.lines import AnyLine, record_of


def append_for_ever(path: Path, row: Row, filler: AnyLine) -> None:
    """Appends records of `row`, of many lengths, with `filler` between them."""
    with RecordWriter(path) as writer:
        for number in itertools.count():
            writer.append(record_of("r", row, "failed", "x" * (number * 997 % 9000)))
            writer.append(filler)

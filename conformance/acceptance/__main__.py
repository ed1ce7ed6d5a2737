"""Asks ptxas anew: `python -m conformance.acceptance` writes results/acceptance.json.gz and results/acceptance.md.

It takes a minute. `--table` writes only the table, from the committed answers. Use it after adding a form that ptxas
has already been asked about.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from conformance.acceptance.answers import TABLE, as_markdown, asked, compared, read_answers, write_answers


def main(arguments: Sequence[str]) -> int:
    """Writes both files. Returns 2 for unknown arguments."""
    if arguments not in ([], ["--table"]):
        print(f"acceptance: {' '.join(arguments)!r} is not understood; it takes nothing or --table", file=sys.stderr)
        return 2
    if not arguments:
        write_answers(asked())
    answers = read_answers()
    TABLE.write_text(as_markdown(answers, compared(answers)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

"""Asks ptxas about new spellings: `python -m conformance.acceptance` writes results/acceptance.json.gz and .md.

It keeps the answers that the same ptxas gave before. With another ptxas, or with `--anew`, it asks about every
spelling. `--table` asks nothing and writes only the table.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from conformance.acceptance.answers import TABLE, as_markdown, asked, compared, read_answers, write_answers
from conformance.acceptance.spellings import questions


def main(arguments: Sequence[str]) -> int:
    """Writes both files. Returns 2 for unknown arguments."""
    if arguments not in ([], ["--anew"], ["--table"]):
        told = f"{' '.join(arguments)!r} is not understood; it takes nothing, --anew or --table"
        print(f"acceptance: {told}", file=sys.stderr)
        return 2
    answers = read_answers()
    if arguments != ["--table"]:
        answers = asked(questions(), answers if not arguments else None)
        write_answers(answers)
    TABLE.write_text(as_markdown(answers, compared(answers)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

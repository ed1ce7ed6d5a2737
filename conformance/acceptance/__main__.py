"""Ask ptxas anew: `python -m conformance.acceptance` writes results/acceptance.json.gz and results/acceptance.md.

It takes a minute. `--table` writes the table alone, from the answers that are there: what to do after a form was added
for which ptxas has been asked already.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from conformance.acceptance.answers import TABLE, as_markdown, asked, compared, read_answers, write_answers


def main(arguments: Sequence[str]) -> int:
    """Write both files; the exit code is 2 for arguments that mean nothing."""
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

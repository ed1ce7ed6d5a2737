"""The options of the tool, parsed before anything that takes a second to import."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

ABOUT = "Run mutants of programs, or write a table of them. A call that is repeated goes on where the record ends."
RUNS = Path("results/mutants/campaign.jsonl")
"""Where a campaign writes without `--record`."""


def parsed(given: list[str]) -> argparse.Namespace:
    """Parses the options. SystemExit with status 2 for an unknown option."""
    parser = argparse.ArgumentParser(prog="nox -s mutants --", description=ABOUT)
    parser.add_argument("--profile", default="smoke", help="the cases: a profile of the specs")
    for name in ("op", "case", "where", "backend", "target", "schedule"):
        parser.add_argument(f"--{name}", action="append", help="as of megamoe run; may be repeated")
    parser.add_argument("--program", action="append", metavar="TEXT", help="only programs with TEXT in their name")
    parser.add_argument("--sync", type=_count, default=10, metavar="N", help="mutants of synchronisation, or `all`")
    parser.add_argument("--others", type=_count, default=10, metavar="N", help="mutants of other classes, or `all`")
    parser.add_argument("--seed", type=int, default=0, help="which are drawn")
    parser.add_argument(
        "--shard", default="1/1", metavar="i/n", help="every n-th mutant, from the i-th on; each to a record of its own"
    )
    parser.add_argument("--seconds", type=_seconds, help="processor time after which no mutant begins; of one hunt")
    parser.add_argument(
        "--record",
        action="append",
        type=Path,
        help=f"JSON lines, by default {RUNS}; several for shards, of which the first is written to. --table, --smoke "
        "and --forget take results/mutants.jsonl unless --backend names one of your own",
    )
    parser.add_argument("--again", action="store_true", help="run what lived, of those drawn, once more")
    parser.add_argument("--holes", action="store_true", help="as --again, but none that is equivalent")
    parser.add_argument("--smoke", action="store_true", help="ask what rows of the profile smoke kill, of the record")
    parser.add_argument("--forget", action="store_true", help="leave programs that are built no more out of the record")
    parser.add_argument(
        "--id", help="run this mutant alone, of a --case and --backend that build its program, and say what kills it"
    )
    parser.add_argument("--text", help="run the mutants of the instructions with TEXT alone, as tcgen05.wait::st")
    parser.add_argument("--drops", action="store_true", help="write results/mutations.md: two programs, run now")
    parser.add_argument("--search", type=int, metavar="N", help="draw up to N cases to kill a hole of the record")
    parser.add_argument("--unmutated", type=int, metavar="N", help="N rows of programs as they are, in random orders")
    parser.add_argument("--table", action="store_true", help="write the record's table beside it")
    return parser.parse_args(given)


def _count(text: str) -> int | None:
    if text != "all" and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor `all`")
    return None if text == "all" else int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not seconds >= 0.0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds")
    return seconds

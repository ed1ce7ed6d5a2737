"""The options of the tool, parsed before anything that takes a second to import."""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path
from typing import NoReturn

from megamoe.runner.limits import MAX_JOBS

ABOUT = """Change one thing in a program and see whether a check notices: docs/mutants.md. Without an option of "instead
of a campaign" it runs mutants of the programs that the cases build, until a check kills each. A call that is repeated
goes on where the record ends."""
RUNS = Path("results/mutants/campaign.jsonl")
"""Where a campaign writes without `--record`; not among the runs of `megamoe run`, which it is none of."""
_OF_RECORD = ("op", "backend", "target", "program")
_OF_SPECS = ("op", "case", "where", "backend", "target")
READS = {
    "table": _OF_RECORD,
    "smoke": (*_OF_RECORD, "packed", "seconds", "jobs", "again"),
    "forget": _OF_RECORD,
    "argued": _OF_RECORD,
    "drops": (),
    "unmutated": ("seconds",),
    "pack": (*_OF_SPECS, "profile"),
    "id": (*_OF_SPECS, "profile", "schedule", "packed"),
    "text": (*_OF_SPECS, "profile", "schedule", "packed", "program"),
    "search": (*_OF_SPECS, "profile", "schedule", "program", "seconds"),
}
"""Options of a campaign, by what is done instead of one and reads only these."""
TOGETHER = (("smoke", "forget"), ("id", "search"))
"""What is done in one call: the last of them says which options are read."""
CAMPAIGN = ("packed", *_OF_SPECS, "program", "profile", "schedule", "sync", "others", "seed", "shard", "seconds",
            "jobs", "excused", "again", "holes")  # fmt: skip
PACKED_HAS = ("profile", *_OF_SPECS)
"""Options that choose what is packed."""


class _Parser(argparse.ArgumentParser):
    """Says what is wrong with an option in one sentence: the usage of two dozen options would hide it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"mutants: {message}; --help lists the options\n")


def parsed(given: list[str]) -> argparse.Namespace:
    """Parses the options. SystemExit with status 2 for one that is unknown, or that another one does not read."""
    parser = _Parser(prog="nox -s mutants --", description=ABOUT, epilog="Exit status: 1 if a mutant that a campaign, "
                     "--id or --text has run lives without an excuse; 2 for unusable options; 130 after Ctrl-C; 0 "
                     "otherwise. --table, --smoke, --search and --forget are reports, and end with 0 whatever lives. "
                     "--unmutated ends with 1 for an error, --argued for a wrong argument.")  # fmt: skip
    _add_selection(parser.add_argument_group("which programs and cases"))
    _add_draws(parser.add_argument_group("which mutants of them"))
    _add_record(parser.add_argument_group("the record"))
    _add_others(parser.add_argument_group("instead of a campaign"))
    options = parser.parse_args(given)

    def is_given(name: str) -> bool:
        return getattr(options, name) != parser.get_default(name)

    given_ones, modes = [one for one in CAMPAIGN if is_given(one)], [one for one in READS if is_given(one)]
    if len(modes) > 1 and tuple(modes) not in TOGETHER:
        parser.error(f"--{modes[0]} and --{modes[1]} are two calls; give one of them")
    for mode in modes[-1:]:
        read = READS[mode]
        idle = [one for one in given_ones if one not in read]
        if idle:
            these = f"only --{', --'.join(read)}" if read else "none of a campaign's options"
            parser.error(f"--{mode} reads {these}, so --{idle[0]} would do nothing")
    if modes == ["id"] and not options.backend and not options.packed:
        parser.error("--id runs one mutant of one program, and nothing says who builds that: --backend is missing, as "
                     "in --id 1a2b3c4d5e6f/drop/79.0 --backend ptx --case fmha:hd=64,t=1,s_k=1")  # fmt: skip
    # With --smoke they select mutants of the record.
    idle = [one for one in given_ones if one in PACKED_HAS and not (options.smoke and one in READS["smoke"])]
    if options.packed and idle:
        parser.error(f"--packed has its programs and cases already, so --{idle[0]} would do nothing")
    return options


_Group = argparse._ArgumentGroup  # pyright: ignore[reportPrivateUsage]


def _add_selection(group: _Group) -> None:
    group.add_argument("--profile", default="smoke", metavar="NAME", help="The cases of this profile of the specs. "
                       "`full` has more of them: use it for what survives smoke. [default: smoke]")  # fmt: skip
    for name, metavar, about in (
        ("op", "OP", "Only the cases of this op."),
        ("case", "ID", "Only this case, as `megamoe list` prints it; it need not be in the profile. Use a small one to "
         "learn something in a minute."),
        ("where", "AXIS=VALUE", "Only cases with these values, as in `megamoe run`: hd=64|128,t=1."),
        ("backend", "NAME", "Only this backend; module:ATTRIBUTE for one of your own."),
        ("target", "TARGET", "Only programs for this target, as sm_90a."),
        ("schedule", "NAME", "Run under this schedule, not the five of a campaign. One is faster and kills less."),
    ):  # fmt: skip
        group.add_argument(f"--{name}", action="append", metavar=metavar, help=f"{about} May be repeated.")
    group.add_argument("--packed", type=Path, metavar="FOLDER", help="Programs that --pack has written, in place of "
                       "those that options select: use it on a host that cannot build them. The files are pickles: "
                       "take only your own.")  # fmt: skip
    group.add_argument("--program", action="append", metavar="TEXT", help="Only programs with TEXT in their name, "
                       "which the table has: use it to come back to one of many. May be repeated.")  # fmt: skip


def _add_draws(group: _Group) -> None:
    group.add_argument("--sync", type=_count, default=10, metavar="N", help="How many mutants of synchronisation are "
                       "drawn of each program, or `all`. Start with all: they are what the machine is for. "
                       "[default: 10]")  # fmt: skip
    group.add_argument("--others", type=_count, default=10, metavar="N", help="How many mutants of the other classes, "
                       "or `all`. There are thousands, so draw 20 to 40. [default: 10]")  # fmt: skip
    group.add_argument("--seed", type=int, default=0, metavar="N", help="Another seed draws other mutants: use it to "
                       "widen a sample. [default: 0]")  # fmt: skip
    group.add_argument("--shard", default="1/1", metavar="i/n", help="Every n-th mutant, from the i-th on: use it for "
                       "n processes or hosts, each with a --record of its own. [default: 1/1]")  # fmt: skip
    group.add_argument("--seconds", type=_seconds, metavar="S", help="Processor time after which no mutant begins; "
                       "with --search, the time for each hole. Use it to try out a call.")  # fmt: skip
    group.add_argument("--jobs", type=_jobs, default=os.cpu_count() or 1, metavar="N", help="Processes that run "
                       "mutants, one a core if this is not given.")  # fmt: skip
    group.add_argument("--excused", type=_seconds, metavar="S", help="Further turns of a mutant that an argument "
                       "excuses: as many as the unchanged program runs in S seconds; with --again all of them. Use "
                       "more to doubt the arguments. [default: 2]")  # fmt: skip
    group.add_argument("--again", action="store_true", help="Run what lived, of those drawn, once more, whatever "
                       "excuses it, in every turn: use it after a change of the machine or of the checks.")  # fmt: skip
    group.add_argument("--holes", action="store_true", help="As --again, but none that is equivalent: use it after a "
                       "new row or a fix.")  # fmt: skip


def _add_record(group: _Group) -> None:
    group.add_argument("--record", action="append", type=Path, metavar="FILE", help="Where results are written and "
                       "read: JSON lines. Several are shards, of which the first is written to; one that ends in "
                       ".xz is only read. --table and --argued take results/mutants.jsonl.xz unless --backend names "
                       f"one of your own. [default: {RUNS}]")  # fmt: skip
    group.add_argument("--forget", action="store_true", help="Leave programs that are built no more out of the record: "
                       "use it after a change of a kernel.")  # fmt: skip


def _add_others(group: _Group) -> None:
    group.add_argument("--table", action="store_true", help="Write the record as a page of Markdown beside it. --op, "
                       "--backend, --target and --program choose a part.")  # fmt: skip
    group.add_argument("--smoke", action="store_true", help="Ask which mutants of the record the rows of the profile "
                       "smoke kill: use it to learn what CI alone would notice.")  # fmt: skip
    group.add_argument("--argued", action="store_true", help="Run the survivors of the record that survivors.yaml says "
                       "leave the same bits, and compare: use it after a change of an argument.")  # fmt: skip
    group.add_argument("--pack", type=Path, metavar="FOLDER", help="Write the programs that are selected to FOLDER: "
                       "use it before --packed.")  # fmt: skip
    group.add_argument("--id", metavar="ID", help="Run one mutant, of the --case and --backend that build its program, "
                       "and say what kills it. Nothing is recorded: use it while you write a check.")  # fmt: skip
    group.add_argument("--text", metavar="TEXT", help="Run all mutants of the instructions with TEXT, as "
                       "tcgen05.wait::st. Nothing is recorded: use it to ask whether one instruction is "
                       "tested.")  # fmt: skip
    group.add_argument("--search", type=_positive, metavar="N", help="For each hole of the record draw up to N cases "
                       "from the ranges of the spec, and print the rows that kill it: use it to find a missing "
                       "row. With --id, for that hole only.")  # fmt: skip
    group.add_argument("--drops", action="store_true", help="Write results/mutations.md, about two programs of ours: "
                       "use it after a change of a rule of the machine.")  # fmt: skip
    group.add_argument("--unmutated", type=_positive, metavar="N", help="Run N rows of our programs as they are, "
                       "under random schedules: use it to look for false alarms.")  # fmt: skip


def _count(text: str) -> int | None:
    if text != "all" and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor `all`")
    return None if text == "all" else int(text)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 on")
    return int(text)


def _jobs(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MAX_JOBS:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of processes from 1 to {MAX_JOBS}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not seconds >= 0.0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds")
    return seconds

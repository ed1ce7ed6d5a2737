"""The table of what the machine implements, generated from the registry: `python -m backends.vm.coverage [--json]`."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from functools import cache
from itertools import groupby
from pathlib import Path

from backends.vm import isa  # noqa: F401  (registers every instruction family)
from backends.vm.bind.forms import Form, all_forms, find
from backends.vm.ptx.ast import Instruction

WITNESSED = Path(__file__).parents[2] / "results" / "witness_opcodes.json"
"""By package: the opcodes that its kernels executed while they computed the same as torch."""

MEASURED = Path(__file__).parents[2] / "conformance" / "vm" / "isa" / "witnessed.json"
"""By data file under conformance/silicon: the opcodes that a GPU executed to produce its contents."""

NOT_ASKED = {
    "brkpt": "It ends the context.",
    "trap": "It ends the context.",
    "multimem.": "It needs a multicast object, which is memory of several GPUs.",
    "cvta{.to}.<space>.u32": "ptxas makes no machine code for 32-bit addresses for sm_90 and later.",
    "st.async{.weak}{.shared::cluster}.mbarrier": "It is from PTX 9.2, and the device's toolkit has PTX 9.0.",
    "mov.<vec>": "ptxas makes of it one mov for each element, and those ran.",
    "call{.uni}": "Direct calls run in random programs, and only hashes of those are kept.",
}
"""Why a form that ptxas takes for sm_90a has no witness on hardware, keyed by the beginning of its spelling."""

_MOST_LISTED = 1500

ISA_EDITION = "9.1"
"""The edition of the PTX ISA that the section numbers of the forms refer to."""


def family_of(form: Form) -> str:
    """The module of backends.vm.isa that implements a form."""
    return form.bind.__module__.rpartition(".")[2]


def _ran(file: Path) -> dict[Form, dict[str, list[str]]]:
    """The opcodes of each form by who ran them, read from a JSON file that lists opcodes by who ran them.

    Raises UnknownInstructionError for an opcode that fits no form.
    """
    found: dict[Form, dict[str, list[str]]] = {}
    for who, opcodes in json.loads(file.read_text("utf-8")).items() if file.exists() else ():
        for opcode in opcodes:
            form, _ = find(Instruction(tuple(opcode.split(".")), (), None, 0, opcode))
            found.setdefault(form, {}).setdefault(who, []).append(opcode)
    return found


@cache
def second_kernels() -> dict[Form, tuple[str, ...]]:
    """Packages whose kernels witness a form."""
    return {form: tuple(sorted(packages)) for form, packages in _ran(WITNESSED).items()}


@cache
def hardware() -> dict[Form, dict[str, list[str]]]:
    """The opcodes of each form that ran on a GPU, by the file with the results."""
    return _ran(MEASURED)


def _witness(form: Form) -> str:
    return "hardware" if form in hardware() else "document"


def _forms() -> list[Form]:
    def order(form: Form) -> tuple[str, str, str]:
        return family_of(form), form.spelling, form.section

    return sorted(all_forms(), key=order)


def as_json() -> str:
    """One object per form: family, spelling, slot words, PTX ISA section, witnesses, measured opcodes by file."""
    rows = [
        {
            "family": family_of(form),
            "form": form.spelling,
            "words": {slot.name: sorted(slot.choices) for slot in form.slots if slot.choices != {slot.name}},
            "section": form.section,
            "witness": _witness(form),
            "measured": hardware().get(form, {}),
            "second_kernels": second_kernels().get(form, ()),
        }
        for form in _forms()
    ]
    return json.dumps({"ptx_isa": ISA_EDITION, "forms": rows}, indent=1)


def as_markdown() -> str:
    """One table per family, in the notation of the ISA: `{}` is optional, `<slot>` stands for one of its words."""
    forms, seconds = _forms(), second_kernels()
    lines = [
        "# What the PTX virtual machine implements",
        "",
        "`python -m backends.vm.coverage > results/coverage.md` generates this page from the registry; a test keeps it",
        f"current. Sections are those of PTX ISA {ISA_EDITION}. Witness `hardware`: the form ran on a GPU, with the",
        "words listed at the end, and its results are test data here. Witness `document`: tests hold the form to the",
        "text of the ISA. Second kernel: packages by others whose kernels executed the form and computed the same as",
        "torch (witness.md).",
        "",
        f"{len(forms)} forms in {len({family_of(form) for form in forms})} families; "
        f"{sum(form in hardware() for form in forms)} are witnessed by hardware, "
        f"{sum(form in seconds for form in forms)} by a second kernel.",
    ]
    for family, members in groupby(forms, key=family_of):
        lines += ["", f"## {family}", "", "| form | PTX ISA | witness | second kernel |", "|---|---|---|---|"]
        lines += [
            f"| `{form.spelling}` | {form.section} | {_witness(form)} | {', '.join(seconds.get(form, ()))} |"
            for form in members
        ]
    lines += ["", "## What ptxas accepts for sm_90a and no GPU ran", "", "| forms | why not |", "|---|---|"]
    lines += [f"| `{begin}` | {why} |" for begin, why in NOT_ASKED.items()]
    lines += ["", "## What ran on a GPU", "", "Files are under conformance/silicon.", ""]
    lines += ["| data | opcodes |", "|---|---|"]
    files: dict[str, list[str]] = {}
    for measured in hardware().values():
        for file, opcodes in measured.items():
            files.setdefault(file, []).extend(opcodes)
    lines += [f"| {file} | {_listed(files[file])} |" for file in sorted(files)]
    return "\n".join(lines) + "\n"


def _listed(opcodes: Sequence[str]) -> str:
    """The opcodes, or how many there are of each first word where a page of them would hide the other files."""
    if len(opcodes) <= _MOST_LISTED:
        return ", ".join(f"`{one}`" for one in sorted(opcodes))
    counts = Counter(one.partition(".")[0] for one in opcodes)
    words = ", ".join(f"`{word}` {count}" for word, count in sorted(counts.items()))
    return f"{len(opcodes)} opcodes, which {MEASURED.name} lists: {words}"


def main(arguments: Sequence[str]) -> int:
    """Print the table. Returns exit code 2 for arguments it does not understand."""
    if arguments not in ([], ["--json"]):
        print(f"coverage: {' '.join(arguments)!r} is not understood; it takes nothing or --json", file=sys.stderr)
        return 2
    print(as_json() if arguments else as_markdown(), end="")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

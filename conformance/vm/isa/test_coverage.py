"""The coverage table is current, its sections exist and describe the opcode, and it covers all that CuTeDSL emits."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from backends.vm import coverage
from backends.vm.bind.forms import all_forms, find
from backends.vm.coverage import MEASURED, as_json, as_markdown, main
from backends.vm.faults import UnknownInstructionError
from backends.vm.ptx.ast import Instruction
from conformance import ROOT, SILICON

HERE = Path(__file__).parent
TABLE = ROOT / "results" / "coverage.md"


def lines_of(name: str) -> list[str]:
    return [line for line in (HERE / name).read_text().splitlines() if line and not line.startswith("#")]


SECTIONS = {line.split()[0]: line.split()[1:] for line in lines_of("isa_sections.txt")}
EMITTED = lines_of("emitted_spellings.txt")


def test_the_committed_table_is_current() -> None:
    assert TABLE.read_text() == as_markdown(), "regenerate it: python -m backends.vm.coverage > results/coverage.md"


def test_the_json_has_a_row_for_every_form() -> None:
    rows = json.loads(as_json())["forms"]
    assert len(rows) == len(all_forms())
    assert all(row["witness"] in ("hardware", "document") for row in rows)


def test_every_data_file_says_what_ran() -> None:
    """witnessed.json lists exactly the files of results."""
    files = {
        str(file.relative_to(SILICON))
        for folder in ("lanewise", "numerics", "movement", "whole")
        for file in (SILICON / folder).rglob("*")
        if file.suffix in (".npz", ".json") and file.name not in ("programs.json", "drawn.npz", "least.json")
    }
    assert files == set(json.loads(MEASURED.read_text())), "witnessed.json must list the opcodes behind each data file"


@pytest.mark.parametrize("name", ["approx_specials", "binary", "cvt_f32", "half"])
def test_arrays_named_after_an_opcode_are_listed(name: str) -> None:
    file = f"numerics/{name}.npz"
    arrays = [key for key in np.load(SILICON / file).files if "." in key]
    assert json.loads(MEASURED.read_text())[file] == sorted(arrays)


def test_a_form_is_witnessed_for_the_words_that_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two forms spelt alike, only the one whose words ran has the witness. An opcode without a form is refused."""
    file = tmp_path / "witnessed.json"
    monkeypatch.setattr(coverage, "MEASURED", file)
    for opcode, known in (("setp.ne.b32", True), ("setp.nobody.knows", False)):
        file.write_text(json.dumps({"some.npz": [opcode]}))
        coverage.hardware.cache_clear()
        try:
            if known:
                form, _ = find(instruction(opcode))
                assert coverage.hardware() == {form: {"some.npz": [opcode]}}
                assert sum(row["witness"] == "hardware" for row in json.loads(as_json())["forms"]) == 1
            else:
                with pytest.raises(UnknownInstructionError, match="setp"):
                    coverage.hardware()
        finally:
            coverage.hardware.cache_clear()


def test_bad_arguments_are_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--yaml"]) == 2
    assert "takes nothing or --json" in capsys.readouterr().err


def speaks_of(title: str, spelling: str) -> bool:
    """Whether the opcode in a section's heading begins the spelling, or all its parts occur in it."""
    plain = spelling.replace("{", "").replace("}", "").replace("::", ".").split("<")[0]
    parts, wanted = plain.strip(".").split("."), title.split(".")
    return parts[: len(wanted)] == wanted or all(part in parts for part in wanted)


def test_the_section_of_every_form_exists_and_speaks_of_it() -> None:
    wrong: list[str] = []
    for form in all_forms():
        if form.section not in SECTIONS:
            wrong.append(f"{form.spelling}: no section {form.section} of the PTX ISA 9.1 is listed in isa_sections.txt")
        elif not any(speaks_of(title, form.spelling) for title in SECTIONS[form.section]):
            wrong.append(f"{form.spelling}: section {form.section} is about {', '.join(SECTIONS[form.section])}")
    assert not wrong, "\n".join(wrong)


def test_a_wrong_section_would_be_noticed() -> None:
    assert not any(speaks_of(title, "st{.<space>}.<type>") for title in SECTIONS["9.7.9.8"])


def instruction(spelling: str) -> Instruction:
    return Instruction(tuple(spelling.split(".")), (), None, 1, spelling)


def test_every_spelling_that_cutedsl_emits_is_known() -> None:
    unknown: list[str] = []
    for spelling in (line for line in EMITTED if not line.startswith("-")):
        try:
            find(instruction(spelling))
        except UnknownInstructionError as error:
            unknown.append(str(error))
    assert len(EMITTED) > 300, "the list of spellings has shrunk"
    assert not unknown, "\n".join(unknown)


def test_spellings_left_out_have_a_reason_and_are_refused() -> None:
    left_out = [line[2:].split(": ", 1) for line in EMITTED if line.startswith("-")]
    for spelling, reason in left_out:
        assert len(reason) > 10, f"{spelling} has no reason"
        with pytest.raises(UnknownInstructionError, match=spelling.split(".")[0]):
            find(instruction(spelling))

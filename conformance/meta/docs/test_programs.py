"""Page programs on a GPU: what is launched matches the pages, and results are reported as they are."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import megamoe.vm
from conformance.fakes.patient import patient
from conformance.meta.docs import on_device, programs_on_device, programs_record
from conformance.meta.docs.pages import Trial, outcome
from conformance.meta.docs.programs_on_device import Program, answered, filler, summary, tried
from conformance.meta.docs.programs_record import complaints, happened, paragraphs, renewed, right, table
from megamoe.vm import KernelFault

PACKED = programs_on_device.pack()
LATE = [one for one in PACKED if one["name"].endswith(" late")]


@pytest.mark.parametrize("size", [4096, 4100, 9216])
def test_the_filler_stays_inside_the_shared_memory_of_a_cta(size: int, tmp_path: Path) -> None:
    """Regression: with a size that was no multiple of 4096, the filler accessed an illegal address in every program."""
    (tmp_path / "dirt.ptx").write_text(filler(size), "utf-8")
    machine = megamoe.vm.Device("sm_90a")
    machine.launch(str(tmp_path / "dirt.ptx"), "dirt", 1, 1024, smem=size)
    with pytest.raises(KernelFault, match="out-of-bounds"):
        machine.launch(str(tmp_path / "dirt.ptx"), "dirt", 1, 1024, smem=size - 4)


@pytest.mark.parametrize("program", LATE, ids=lambda one: one["name"])
def test_a_late_party_changes_no_finding(program: Program, tmp_path: Path) -> None:
    """Under the page's schedule the defect is found, and the mended kernel is clean and right."""
    (plain,) = (one for one in PACKED if f"{one['name']} late" == program["name"])
    assert program["kernel"] != plain["kernel"], "nothing is late"
    found = outcome(Trial(program["kernel"], program["python"], ""), tmp_path)
    assert (f"[{program['rule']}]" in found) if program["rule"] else not found, found


def test_every_wait_has_an_end_and_changes_nothing_before_it(tmp_path: Path) -> None:
    for one in PACKED:
        waits = one["kernel"].count("mbarrier.try_wait")
        assert patient(one["kernel"]).count("@%patience_spent exit;") == waits, f"{one['name']}: {waits} waits"
    (ring,) = (one for one in PACKED if one["name"] == "rules/mbarrier 2")
    assert patient(ring["kernel"]) != ring["kernel"]
    assert outcome(Trial(patient(ring["kernel"]), ring["python"], ""), tmp_path) == ""


TWO_ENTRIES = """.version 8.7
.target sm_90a
.address_size 64
.visible .entry idle()
{
  ret;
}
.visible .entry kernel(.param .u64 out)
{
  .shared .align 8 .b64 never;
  .reg .b64 %rd;
  .reg .pred P1;
  ld.param.u64 %rd, [out];
  mbarrier.init.shared::cta.b64 [never], 1;
  {
  LAB_WAIT:
  mbarrier.try_wait.parity.shared.b64 P1, [never], 0, 10000000;
  @P1 bra.uni DONE;
  bra.uni LAB_WAIT;
  DONE:
  }
  st.global.b32 [%rd], 7;
  ret;
}
"""


def test_a_wait_in_vain_ends_its_thread(tmp_path: Path) -> None:
    """Holds in any entry, and for any form of the loop."""
    given = patient(TWO_ENTRIES, 0)
    assert given.partition(".visible .entry kernel")[0].count("%patience") == 0, "an entry without waits is changed"
    (tmp_path / "kernel.ptx").write_text(given, "utf-8")
    out = np.zeros(1, np.uint32)
    megamoe.vm.Device("sm_90a").launch(str(tmp_path / "kernel.ptx"), "kernel", 1, 1, out)
    assert not out[0], "the thread went on"


def test_wrong_elements_are_counted_launch_by_launch() -> None:
    python = (
        "import numpy as np\nimport megamoe.vm\nout = np.zeros(4)\nvm = megamoe.vm.Device('sm_90a')\n"
        "vm.launch('kernel.ptx', 'kernel', 1, 4, out)\nassert (out == np.arange(4)).all()\n"
    )
    calls = list[int]()

    def launch(_file: str, _entry: str, _grid: int, _block: int, out: np.ndarray) -> None:
        calls.append(1)
        if len(calls) == 4:
            raise RuntimeError("CUDA_ERROR_LAUNCH_FAILED")
        out[:] = (0, 1, 2, 3) if len(calls) == 2 else (0, 9, 9, 3)

    expected = {"wrong": 2, "elements": 8, "launches": 2, "launches_with_wrong": 1, "error": ""}
    assert tried(python, launch, 2, 60) == expected
    assert tried(python, launch, 9, 60) == {
        **expected, "elements": 4, "launches": 1, "error": "CUDA_ERROR_LAUNCH_FAILED",
    }, "a launch that fails is none"  # fmt: skip


@pytest.mark.parametrize(
    ("log", "errors", "says"),
    [
        ("========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n", 0, ""),
        ("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n", 0, ""),
        (
            "========= COMPUTE-SANITIZER\n========= Potential WAR hazard\n=========     at kernel+0xd0\n"
            + 9000 * "=========         Host Frame: _start\n"
            + "========= RACECHECK SUMMARY: 3 hazards displayed (387 errors, 372 warnings)\n",
            759,
            "Potential WAR hazard",
        ),
        (
            "========= Divergent\n========= ERROR SUMMARY: 16 errors\n"
            "========= ERROR SUMMARY: 13 errors were not printed.\n",
            16,
            "Divergent",
        ),
        ("========= COMPUTE-SANITIZER\n", -1, ""),
        ("", -1, ""),
    ],
)
def test_a_log_is_counted_to_its_end(log: str, errors: int, says: str) -> None:
    assert summary(log) == {"errors": errors, "says": says}


def test_a_child_that_does_not_end_takes_its_children_along() -> None:
    """A sanitizer's program holds its pipes, so the caller would wait for it."""
    began = time.monotonic()
    assert answered(["sh", "-c", "sleep 30 & sleep 30"], 0.2)["error"] == "it did not end"
    assert time.monotonic() - began < 15, "its child was waited for"
    assert "no-such-program" in answered(["no-such-program"], 5)["error"]
    assert "exit 3" in answered([sys.executable, "-c", "raise SystemExit(3)"], 30)["error"]


def test_a_host_without_a_gpu_says_so(tmp_path: Path) -> None:
    (tmp_path / "programs.json").write_text(json.dumps(PACKED[:1]), "utf-8")
    answer = programs_on_device.run(tmp_path / "programs.json", tmp_path / "logs", dirty=True)
    assert not answer["dirt"], "a filler that fails is left out"
    (one,) = answer["programs"].values()
    assert one["launches"] == 0
    assert one["error"]
    assert {tool["errors"] for tool in one["sanitizer"].values()} == {-1}
    assert len(complaints(answer["programs"])) == len(one["sanitizer"])


def test_every_kernel_of_many_ctas_has_its_question(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: one kernel had no question, and those after it did not run."""
    for size in ("ROUNDS", "COLD_BYTES"):
        monkeypatch.setattr(on_device, size, 4)
    assert set(on_device.pack()) == set(on_device.questions("cpu"))


def _answer(rule: str, wrong: int = 0, error: str = "", **tools: int) -> Mapping[str, Any]:
    said = {tool: {"launches": 3, "error": "", "errors": errors, "says": ""} for tool, errors in tools.items()}
    return {"rule": rule, "wrong": wrong, "elements": 6000, "launches": 2000, "launches_with_wrong": min(wrong, 1),
            "error": error, "gave_up": 0, "sanitizer": said}  # fmt: skip


RECORD = {
    "found/one 1": _answer("race", 7, racecheck=771, memcheck=0, synccheck=0),
    "found/one 1 late": _answer("race", 9),
    "found/one 2": _answer("", racecheck=0, synccheck=0),
    "rules/two 1": _answer("global-race", memcheck=0, racecheck=0, synccheck=0),
    "rules/two 3": _answer("ended-cta", error="CUDA_ERROR_LAUNCH_FAILED", memcheck=1),
    "rules/two 4": _answer(""),
    "control/misaligned 1": _answer("misaligned", memcheck=2),
}


def test_a_paragraph_tells_every_answer_of_its_page() -> None:
    told = paragraphs(RECORD)
    assert set(told) == {"found/one", "rules/two"}
    assert told["found/one"].startswith(
        "On an H200, 7 of 6,000 values were wrong, in 1 of 2,000 launches; with one side delayed, 9 of 6,000 values "
        "were wrong, in 1 of 2,000 launches. With the fix, all 2,000 launches were right. "
        "In compute-sanitizer, `racecheck` reports `race`. Record: "
    )
    assert "`global-race`: none of 6,000 values was wrong in 2,000 launches. " in told["rules/two"]
    assert "`ended-cta`: launch 2,001 failed with `CUDA_ERROR_LAUNCH_FAILED`. " in told["rules/two"]
    assert "`memcheck`, `racecheck` and `synccheck` do not report `global-race`" in told["rules/two"]
    wrong = {**RECORD, "found/one 2": _answer("", 5)}
    assert "With the fix, 5 of 6,000 values were wrong" in paragraphs(wrong)["found/one"]
    assert not complaints(RECORD)
    assert complaints(wrong) == ["found/one 2 is mended, and 5 of 6,000 values were wrong, in 1 of 2,000 launches"]


def test_the_table_counts_what_went_wrong_and_what_was_reported() -> None:
    page = table(RECORD)
    assert "2 went wrong. compute-sanitizer reports 2." in " ".join(page.split())
    assert "It also reports 0 of 2 correct programs: none." in " ".join(page.split())
    assert page.count("\n| [") == 3, "one line a program with a defect, none of a control"
    alarmed = {**RECORD, "found/one 2": _answer("", racecheck=3)}
    assert "1 of 2 correct programs: found/one 2 (racecheck)." in " ".join(table(alarmed).split())


def test_a_tool_that_launched_nothing_found_nothing_and_missed_nothing() -> None:
    nothing = {"launches": 0, "error": "exit 1: no device", "errors": 0, "says": ""}
    record = {"found/one 1": {**_answer("race"), "sanitizer": {"racecheck": nothing}}}
    assert complaints(record) == ["found/one 1: racecheck saw no launch"]
    assert "not known" in table(record)


def test_what_happened_to_a_launch() -> None:
    assert happened(_answer("race", error="it did not end")) == "a launch did not end"
    assert happened({**_answer(""), "gave_up": 64}) == "64 waits timed out in 2,000 launches"
    assert happened({**_answer(""), "elements": 0}) == "2,000 launches ended without an error"
    for bad in ({"error": "x"}, {"wrong": 1}, {"gave_up": 1}, {"launches": 0}):
        assert not right({**_answer(""), **bad}), bad


def test_a_paragraph_takes_the_place_of_the_last_one_or_of_no_knowledge() -> None:
    first = "On an H200 all was right. Record: x, made by conformance/meta/docs/programs_on_device.py."
    second = first.replace("right", "wrong")
    page = "# Page\n\n## What silicon does\n\nNot run. A load takes longer.\n"
    told = renewed(page, first)
    assert told == f"# Page\n\n## What silicon does\n\n{first}\n\nA load takes longer.\n"
    assert renewed(told, second) == told.replace("right", "wrong")
    rule = "It is late. What silicon does with the\nkernels of this page was not measured.\n\n## Next\n\nText.\n"
    assert renewed(rule, first) == f"It is late.\n\n{first}\n\n## Next\n\nText.\n"
    with pytest.raises(ValueError, match="neither"):
        renewed("# Page\n", first)


def test_every_page_of_a_found_defect_can_take_its_paragraph() -> None:
    """Or it has its own record from on_device.py."""
    own = {stem for stem, _ in on_device.report()}
    told = paragraphs({one["name"]: _answer(one["rule"], memcheck=0) for one in PACKED})
    for page, paragraph in told.items():
        folder, _, stem = page.partition("/")
        if folder == "found" and stem not in own:
            text = (programs_record.ROOT / "docs" / f"{page}.md").read_text("utf-8")
            assert " ".join(paragraph.split()) in " ".join(renewed(text, paragraph).split())

"""Findings at the doors: which ones raise in which profile, suppressions, the four formats, one finding per site."""

from __future__ import annotations

import json
import logging
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jsonschema_rs
import numpy as np
import pytest

from megamoe.cli.main import main
from megamoe.export.findings import CheckedRun, Complaint, form_of, read_findings, rendered
from megamoe.findings import PROFILES, CollidingAccess, KernelFinding, Ledger, Profile, SourceLine, Suppression
from megamoe.spec.marked_yaml import SpecError
from megamoe.vm import Device, KernelFault

HEAD = ".version 8.7\n.target sm_100a\n.address_size 64\n"
BODY = """.visible .entry kernel(.param .u64 y)
{
  .reg .pred %p<4>;
  .reg .u64 %rd<4>;
  .reg .u32 %r<6>;
  .shared .align 4 .b8 cell[128];
  .shared .align 8 .b64 mbar;
  ld.param.u64 %rd1, [y];
  mov.u32 %r1, %tid.x;
  mov.u32 %r2, cell;
  and.b32 %r3, %r1, 31;
  shl.b32 %r3, %r3, 2;
  add.u32 %r2, %r2, %r3;
  setp.ne.u32 %p1, %r3, 0;
STEP
  st.relaxed.gpu.global.u32 [%rd1], %r3;
  ret;
}
"""
# Both warps write; warp 1's values differ from warp 0's.
RACE = "  st.shared.u32 [%r2], %r1;"
TWICE = "  @!%p1 mbarrier.init.shared::cta.b64 [mbar], 1;"
"""Both warps initialise it."""
UNSPECIFIED = "  mov.u32 %r4, 0;\n  rem.u32 %r5, %r1, %r4;"
CLEAN = "  bar.sync 0;"
BEYOND = "  st.global.u32 [%rd1+4096], %r1;"
STEPS = {"error": RACE, "portability": TWICE, "note": UNSPECIFIED}
RULES = {"error": "race", "portability": "mbarrier-reinitialised", "note": "unspecified-result"}


def kernel(*steps: str) -> str:
    return HEAD + BODY.replace("STEP", "\n".join(steps))


def launched(device: Device, *steps: str, grid: int = 1) -> KernelFault | None:
    try:
        device.launch(kernel(*steps), "kernel", grid, 64, np.zeros(4, np.uint32))
    except KernelFault as fault:
        return fault
    return None


class Lines(logging.Handler):
    """Keeps log records. pytest's own plugin would do the same for every test, at 0.4 ms each."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text += f"{record.getMessage()}\n"


@pytest.fixture(autouse=True)
def logged() -> Iterator[Lines]:
    logger, lines = logging.getLogger("megamoe"), Lines()
    before = logger.level, logger.propagate
    logger.setLevel(logging.WARNING)
    logger.propagate = False
    logger.addHandler(lines)
    try:
        yield lines
    finally:
        logger.removeHandler(lines)
        logger.setLevel(before[0])
        logger.propagate = before[1]


def finding(**changes: object) -> KernelFinding:
    """A finding with the given fields changed."""
    values: dict[str, Any] = {
        "rule": "race",
        "grade": "error",
        "detail": "this 4-byte word is overwritten",
        "kernel": "attention_fwd",
        "line": 40,
        "text": "st.shared.u32 [%r1], %r2;",
        "source": (SourceLine("/home/me/kernels/attention.py", 12, 5), SourceLine("/home/me/kernels/attention.py", 90)),
        "where": "CTA (0, 0, 0), warp 1",
        "mend": "Put a barrier between the two accesses.",
        "section": "8.7",
    }
    return KernelFinding(**{**values, **changes})


# Profiles


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("grade", STEPS)
def test_a_grade_counts_in_its_profiles(grade: str, profile: Profile, logged: Lines) -> None:
    device = Device("sm_100a", profile=profile)
    fault = launched(device, STEPS[grade])
    (one,) = device.findings
    assert (one.rule, one.grade) == (RULES[grade], grade)
    assert (fault is not None) == (grade in PROFILES[profile]), f"{grade} under {profile}: {fault}"
    if fault is None:
        assert one.rule in logged.text, "what does not count is logged"
    else:
        assert (fault.rule, fault.findings) == (one.rule, (one,))
        assert one.sentence in str(fault)


def test_a_clean_kernel_has_no_findings() -> None:
    device = Device("sm_100a", profile="strict")
    assert launched(device, CLEAN) is None
    assert device.findings == []


def test_a_launch_that_ends_raises_in_every_profile() -> None:
    """A launch that ended early has no results, whatever the profile."""
    for profile in PROFILES:
        device = Device("sm_100a", profile=profile)
        fault = launched(device, RACE, CLEAN, BEYOND)
        assert fault is not None
        assert fault.rule == ("out-of-bounds" if profile == "lenient" else "race"), "what came first is said first"
        assert "[out-of-bounds]" in str(fault), "what ended the launch is said"
        assert [(one.rule, one.ends) for one in device.findings] == [("race", False), ("out-of-bounds", True)]
        assert launched(device, CLEAN) is None, "the device goes on after"


def test_the_text_of_a_fault_says_how_to_mend_it_and_that_the_launch_ended() -> None:
    for step, ends in ((BEYOND, True), (RACE, False)):
        device = Device("sm_100a")
        fault = launched(device, step)
        (one,) = device.findings
        ending = ["  the launch ends here"] if ends else []
        told = [f"  mend: {one.mend}", f"  read more: {one.page}", *ending]
        assert str(fault).splitlines()[1:] == told, fault
        assert "\n".join(told[:2]) in str(one), "the report says something else"
        assert not ends or "; the launch ends here" in str(one), "the report says something else"


def test_a_traceback_has_no_frames_of_the_machine() -> None:
    for step in (BEYOND, RACE, f"{RACE}\n{CLEAN}\n{BEYOND}"):
        fault = launched(Device("sm_100a"), step)
        assert fault is not None
        shown = "".join(traceback.format_exception(fault))
        assert "backends" not in shown, f"frames of the machine say nothing about the kernel: {shown}"
        assert shown.count("Traceback") == 1, f"the fault is told more than once: {shown}"
        if BEYOND in step:
            fault.__suppress_context__ = False
            shown = "".join(traceback.format_exception(fault))
            assert "backends" in shown, "pytest's --full-trace would not show the machine's frames"


def test_the_tally_counts_in_words() -> None:
    for steps, profile, said in (
        ((RACE,), "default", "1 finding, which counts in the profile default"),
        ((RACE,), "lenient", "1 finding, which does not count in the profile lenient"),
        ((RACE, CLEAN, BEYOND), "default", "2 findings, 2 of them count in the profile default"),
        ((RACE, CLEAN, BEYOND), "lenient", "2 findings, 1 of them counts in the profile lenient"),
    ):
        device = Device("sm_100a", profile=profile)
        launched(device, *steps)
        assert device.ledger.tally == said


def test_a_profile_that_is_none_is_said() -> None:
    with pytest.raises(ValueError, match="no profile 'loose'; there are strict, default, lenient"):
        Device("sm_100a", profile="loose")


def test_launches_and_ctas_repeat_a_finding_and_do_not_add_one() -> None:
    device = Device("sm_100a", profile="lenient")
    for _ in range(3):
        launched(device, RACE, TWICE, grid=8)
    assert {one.rule: one.times for one in device.findings} == {"race": 24, "mbarrier-reinitialised": 24}
    race = device.findings[0]
    assert race.other is not None
    assert race.other.line == race.line, "both warps are at the same line"
    assert race.place.file == "kernel.ptx", "PTX of no file has the kernel's name"
    for part in ("other access: warp", "missing: ", "mend: ", "read more: docs/rules/races.md",
                 "found 24 times under eager; the launch goes on", "PTX ISA 8.7"):  # fmt: skip
        assert part in str(race), f"{part!r} is not said: {race}"


def test_a_launch_that_never_began_has_no_findings_of_the_one_before() -> None:
    device = Device("sm_100a", profile="lenient")
    launched(device, RACE)
    before = device.findings
    for sizes in ("x", (1, 2, 3, 4), (-1,)):
        with pytest.raises(ValueError):  # noqa: PT011 - whatever refuses the launch
            device.launch(kernel(RACE), "kernel", sizes, 64, np.zeros(4, np.uint32))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError), device.watched(kernel(RACE)):
        raise RuntimeError("the door itself fails, before the machine is asked")
    assert device.findings == before, "nothing ran, and nothing is counted again"


def test_two_modules_with_the_same_kernel_and_lines_have_findings_of_their_own() -> None:
    device = Device("sm_100a", profile="lenient")
    launched(device, RACE)
    launched(device, RACE.replace("%r1", "%r1 "))
    assert [one.times for one in device.findings] == [1, 1]
    variants = [finding(module=one, source=source) for one in "ab" for source in ((), (SourceLine("/a.py", 3),))]
    ledger = Ledger()
    between = finding(origin="one.cu", other=CollidingAccess("warp 0 of CTA (1, 0, 0)", "wrote", 9, elsewhere=True))
    within = finding(origin="one.cu", other=CollidingAccess("warp 1", "wrote", 9))
    ledger.take([*device.findings, *variants, between, within, finding(origin="two.cu")])
    assert sorted(one.times for one in ledger.findings) == [1, 1, 1, 1, 1, 1, 1, 2], "of one source line: one finding"
    results = json.loads(rendered(CheckedRun(ledger), "sarif"))["runs"][0]["results"]
    prints = {one["partialFingerprints"]["site/v2"] for one in results}
    assert len(prints) == len(results), f"a code host merges results of one fingerprint: {sorted(prints)}"


PARTIAL = "_Z7partialILi128EfEvPT0_Pj"
"""partial<128, float>, mangled."""


def test_a_kernel_of_c_plus_plus_has_its_name_in_the_source() -> None:
    source = (SourceLine("/cuda/include/atomics.hpp", 84, 3, "_Z4loadIiEiv"), SourceLine("/home/me/a.cu", 10, 3))
    other = CollidingAccess("warp 0", "wrote", 4, source)
    ledger = Ledger()
    ledger.take([finding(kernel=PARTIAL, detail="byte 0 of `_ZZ1kILi3EEvPfE3buf`", source=source, other=other)])
    said = rendered(CheckedRun(ledger), "text")
    assert "_Z" not in said, said
    for part in ("[race] kernel partial<128, float>, /cuda", "84:3 in load<int>", "`k<3>(float*)::buf`"):
        assert part in said, f"{part!r} is not in {said}"
    other_access = said.partition("  other access: warp 0 wrote it at /cuda/include/atomics.hpp:84:3")[2]
    assert other_access.splitlines()[1:2] == ["    called from: /home/me/a.cu:10:3"], said
    assert 'classname="megamoe.partial&lt;128, float&gt;"' in rendered(CheckedRun(ledger), "junit")
    (one,) = json.loads(rendered(CheckedRun(ledger), "json"))["findings"]
    assert (one["kernel"], one["kernel_name"]) == (PARTIAL, "partial<128, float>")
    document = json.loads(rendered(CheckedRun(ledger), "sarif"))
    jsonschema_rs.Draft202012Validator(SARIF).validate(document)
    (result,) = document["runs"][0]["results"]
    function = {"name": "partial<128, float>", "kind": "function", "decoratedName": PARTIAL}
    assert result["locations"][0]["logicalLocations"] == [function]
    last = result["relatedLocations"][-1]
    assert last["message"]["text"] == "the other access is called from here"
    assert last["physicalLocation"]["artifactLocation"]["uri"] == "file:///home/me/a.cu"


def test_errors_come_before_what_may_follow_from_them(logged: Lines) -> None:
    """Within a grade the order is that of occurrence."""
    device = Device("sm_100a", profile="strict")
    fault = launched(device, UNSPECIFIED, TWICE, CLEAN, RACE)
    assert fault is not None
    assert fault.rule == "race", "the message is about the error"
    rules = ["race", "mbarrier-reinitialised", "unspecified-result"]
    for found in (device.findings, fault.findings):
        assert [one.rule for one in found] == rules
    assert [line.split("]")[0].split("[")[1] for line in rendered(CheckedRun(device.ledger), "text").splitlines()
            if "] kernel" in line] == rules  # fmt: skip
    ledger, order = Ledger(), ["note", "error", "portability", "error"]
    ledger.take([finding(grade=grade, line=line) for line, grade in enumerate(order, 1)])
    assert [one.line for one in ledger.findings] == [2, 4, 3, 1]


# Suppressions


@pytest.mark.parametrize(
    ("entry", "speaks"),
    [
        ({"place": "attention.py"}, True),
        ({"place": "kernels/attention.py:12"}, True),
        ({"place": "attention.py:10-20"}, True),
        ({"place": "attention.py:88-95"}, True),
        ({"place": "attention.py:13"}, False),
        ({"place": "tention.py"}, False),
        ({"place": "attention.py:40"}, False),
        ({"place": "fwd.cu:40"}, False),
        ({"place": "fwd.cu"}, True),
        ({"place": "*"}, False),
        ({"kernel": "attention_*"}, True),
        ({"kernel": "matmul"}, False),
        ({"kernel": "*partial*"}, True),
        ({"kernel": "partial<*>"}, True),
        ({"kernel": "partial<128, float>"}, True),
        ({"kernel": "partial<128, double>"}, False),
        ({"place": "attention.py:12", "kernel": "matmul"}, False),
        ({"place": "attention.py", "rule": "global-race"}, False),
    ],
)
def test_a_suppression_speaks_about_a_rule_at_a_place(entry: dict[str, str], speaks: bool) -> None:
    kernel = PARTIAL if "partial" in entry.get("kernel", "") else "attention_fwd"
    about = finding(origin="fwd.cu", kernel=kernel)
    assert Suppression(**{"rule": "race", "reason": "looked at", **entry}).matches(about) == speaks


def test_a_ptx_line_is_suppressed_in_the_file_that_the_finding_names() -> None:
    for about in (finding(source=()), finding(origin="a/attention_fwd.ptx"), finding(source=(), origin="fwd.cu")):
        for line, speaks in ((40, True), (41, False)):
            one = Suppression("race", "looked at", f"attention_fwd.ptx:{line}")
            assert one.matches(about) == speaks, f"{one} and {about.ptx_place}"


def test_a_suppressed_finding_does_not_count_and_a_stale_suppression_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "suppress.yaml"
    file.write_text(
        "- {rule: race, kernel: kernel, reason: warps write scratch that nobody reads}\n"
        "- {rule: deadlock, place: old.cu:7, reason: gone since}\n"
    )
    device = Device("sm_100a", suppress=file)
    assert launched(device, RACE) is None
    assert [one.rule for one in device.findings] == ["race"]
    assert [str(one) for one in device.ledger.stale] == [f"{file}, line 2: deadlock at old.cu:7"]
    assert launched(device, RACE, BEYOND) is not None, "another rule is not suppressed"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("rule: race\n", "write a list of suppressions"),
        ("- race\n", "a suppression is a mapping"),
        ("- {rule: race, place: a.py}\n", "has no reason"),
        ("- {reason: because, place: a.py}\n", "has no rule"),
        ("- {rule: race, reason: because}\n", "needs a place"),
        ("- {rule: race, reason: because, line: 3}\n", "line: 3: the keys are"),
        ("- {rule: race, reason: ''}\n", "the keys are"),
        (
            "- {rule: raec, reason: because, kernel: k}\n",
            r"no rule 'raec'; did you mean 'race'\? docs/rules/README.md lists all \d+$",
        ),
        ("- {rule: race, reason: because, place: 'a.cu:9-3'}\n", "FIRST is at most LAST"),
        ("- {rule: race, reason: because, place: 'a.cu:0'}\n", "lines count from 1"),
        ("- {rule: race, reason: because, place: 'a.cu:'}\n", "write FILE, FILE:LINE or FILE:FIRST-LAST"),
        ("- {rule: race, reason: because, place: 'a.cu:12:5'}\n", "write FILE, FILE:LINE or FILE:FIRST-LAST"),
        ("- {rule: race, reason: because, place: '*'}\n", "no glob"),
        ("- {rule: race, reason: because, place: '*.cu:3'}\n", "no glob"),
        ("- {rule: race, reason: because, place: '.'}\n", "write FILE"),
        ("- {rule: race, reason: because, kernel: '*'}\n", "names every kernel"),
    ],
)
def test_a_file_of_suppressions_that_cannot_be_used_is_said(text: str, sentence: str, tmp_path: Path) -> None:
    file = tmp_path / "suppress.yaml"
    file.write_text(text)
    with pytest.raises(SpecError, match=sentence) as caught:
        Device("sm_100a", suppress=file)
    assert str(caught.value).startswith(f"{file}:")


def test_a_fault_that_ends_the_launch_is_not_suppressed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A kernel that never finished has no results to check."""
    file, suppress = tmp_path / "kernel.ptx", tmp_path / "suppress.yaml"
    file.write_text(kernel(BEYOND))
    suppress.write_text("- {rule: out-of-bounds, kernel: kernel, reason: looked at}\n")
    launch = (file, "--entry", "kernel", "--block", "64", "--arg", "u32[4]", "--schedule", "eager")
    for options in ([], ["--profile", "lenient"], ["--suppress", suppress]):
        status, said = _check(capsys, *launch, *options)
        assert (status, "1 finding, which counts in the profile " in said) == (1, True), f"{options}: {said}"
    assert f"suppression without effect: {suppress}, line 1" in said, said
    for form in ("json", "sarif", "junit"):
        status, said = _check(capsys, *launch, "--suppress", suppress, "--format", form)
        assert status == 1, f"{form}: {said}"
        said = said.replace("suppressions_without_effect", "without effect")
        assert "without effect" in said, f"{form}: {said}"


# Formats

# The constraints of the OASIS schema for which code hosts refuse uploads. The schema itself is not ours to copy.
_MESSAGE = {"type": "object", "required": ["text"], "properties": {"text": {"type": "string", "minLength": 1}}}
_LOCATION = {
    "type": "object",
    "required": ["physicalLocation"],
    "properties": {
        "id": {"type": "integer", "minimum": -1},
        "message": _MESSAGE,
        "physicalLocation": {
            "type": "object",
            "required": ["artifactLocation", "region"],
            "additionalProperties": False,
            "properties": {
                "artifactLocation": {
                    "required": ["uri"],
                    "properties": {"uri": {"type": "string", "pattern": r"^[^\s\\]+$"}},
                },
                "region": {
                    "additionalProperties": False,
                    "properties": {
                        "startLine": {"type": "integer", "minimum": 1},
                        "startColumn": {"type": "integer", "minimum": 1},
                    },
                },
            },
        },
        "logicalLocations": {"type": "array", "items": {"required": ["name", "kind"]}},
    },
    "additionalProperties": False,
}
SARIF: dict[str, Any] = {
    "type": "object",
    "required": ["version", "runs", "$schema"],
    "additionalProperties": False,
    "properties": {
        "version": {"const": "2.1.0"},
        "$schema": {"type": "string", "pattern": "sarif-schema-2.1.0.json$"},
        "runs": {
            "minItems": 1,
            "items": {
                "required": ["tool", "results"],
                "additionalProperties": False,
                "properties": {
                    "columnKind": {"enum": ["utf16CodeUnits", "unicodeCodePoints"]},
                    "tool": {
                        "required": ["driver"],
                        "properties": {
                            "driver": {
                                "required": ["name", "version", "rules"],
                                "properties": {
                                    "rules": {
                                        "uniqueItems": True,
                                        "items": {
                                            "required": ["id", "shortDescription", "fullDescription", "help"],
                                            "properties": {
                                                "id": {"pattern": "^[a-z0-9-]+$"},
                                                "shortDescription": _MESSAGE,
                                                "fullDescription": _MESSAGE,
                                                "help": _MESSAGE,
                                            },
                                        },
                                    }
                                },
                            }
                        },
                    },
                    "invocations": {
                        "items": {
                            "required": ["executionSuccessful"],
                            "properties": {
                                "toolExecutionNotifications": {
                                    "items": {
                                        "required": ["message"],
                                        "properties": {"message": _MESSAGE, "level": {"enum": ["error", "warning"]}},
                                    }
                                }
                            },
                        }
                    },
                    "results": {
                        "items": {
                            "required": ["ruleId", "ruleIndex", "level", "message", "locations"],
                            "additionalProperties": False,
                            "properties": {
                                "ruleId": {"type": "string"},
                                "ruleIndex": {"type": "integer", "minimum": 0},
                                "level": {"enum": ["none", "note", "warning", "error"]},
                                "message": _MESSAGE,
                                "locations": {"minItems": 1, "maxItems": 1, "items": _LOCATION},
                                "relatedLocations": {"items": _LOCATION},
                                "occurrenceCount": {"type": "integer", "minimum": 1},
                                "partialFingerprints": {"additionalProperties": {"type": "string"}},
                                "suppressions": {
                                    "items": {
                                        "required": ["kind"],
                                        "properties": {"kind": {"enum": ["inSource", "external"]}},
                                    }
                                },
                            },
                        }
                    },
                },
            },
        },
    },
}


def run_of_all_sorts() -> CheckedRun:
    """Findings of each grade, one suppressed, a stale suppression, and another failure."""
    suppressions = (Suppression("race", "looked at", "attention.py:12", where="suppress.yaml, line 1"),)
    ledger = Ledger("strict", (*suppressions, Suppression("trap", "gone", kernel="old", where="suppress.yaml, line 2")))
    device = Device("sm_100a", profile="lenient")
    device.reported = lambda one: None
    launched(device, RACE, TWICE, UNSPECIFIED)
    ledger.take(device.findings)
    ledger.take([finding(), finding(rule="tmem-leak", source=(), line=0, kernel="an odd <name> & \x01", text="")])
    return CheckedRun(ledger, ["one.ptx: clean"], [Complaint("refused", "two.ptx: no form of add.gremlin")])


def test_json_is_read_back(tmp_path: Path) -> None:
    checked, file = run_of_all_sorts(), tmp_path / "found.json"
    file.write_text(rendered(checked, "json"), "utf-8")
    assert read_findings(file) == checked.ledger.findings
    document = json.loads(file.read_text("utf-8"))
    assert [one["suppressed"] for one in document["findings"] if one["kernel"] == "attention_fwd"] == ["looked at"]
    assert [one["rule"] for one in document["stale_suppressions"]] == ["trap"]
    file.write_text("{}")
    with pytest.raises(ValueError, match="holds no findings of megamoe"):
        read_findings(file)


def test_sarif_is_what_code_hosts_take() -> None:
    document = json.loads(rendered(run_of_all_sorts(), "sarif"))
    jsonschema_rs.Draft202012Validator(SARIF).validate(document)
    (run,) = document["runs"]
    rules = [one["id"] for one in run["tool"]["driver"]["rules"]]
    assert len(set(rules)) == len(rules)
    for result in run["results"]:
        assert rules[result["ruleIndex"]] == result["ruleId"]
    assert {one["level"] for one in run["results"]} == {"error", "warning", "note"}
    (suppressed,) = [one for one in run["results"] if "suppressions" in one]
    place = suppressed["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"] == "file:///home/me/kernels/attention.py"
    assert place["region"] == {"startLine": 12, "startColumn": 5}
    assert suppressed["relatedLocations"][0]["message"]["text"] == "called from here"
    broken = json.loads(json.dumps(document))
    broken["runs"][0]["results"][0]["locations"][0]["physicalLocation"]["region"]["startLine"] = 0
    with pytest.raises(jsonschema_rs.ValidationError):
        jsonschema_rs.Draft202012Validator(SARIF).validate(broken)


@pytest.mark.parametrize(
    ("rule", "step"), [("deadlock", "LOOP: bra LOOP;"), ("runaway", "LOOP: red.global.add.u32 [%rd1], 1;\n bra LOOP;")]
)
def test_a_launch_that_does_not_end_is_at_a_line_of_the_source(rule: str, step: str) -> None:
    text = kernel(f'.file 1 "/home/me/kernels/spin.cu"\n.loc 1 7 3\n{step}')
    # A runaway waits its budget out. A deadlock is found after some thousands of blocks.
    device = Device("sm_100a", step_budget=2_000 if rule == "runaway" else 20_000)
    with pytest.raises(KernelFault):
        device.launch(text, "kernel", 1, 64, np.zeros(4, np.uint32))
    (one,) = device.findings
    assert (one.rule, one.place) == (rule, SourceLine("/home/me/kernels/spin.cu", 7, 3))
    assert "/home/me/kernels/spin.cu:7:3, PTX line" in one.detail, "each warp that is named has its line"
    (run,) = json.loads(rendered(CheckedRun(device.ledger), "sarif"))["runs"]
    (location,) = run["results"][0]["locations"]
    assert location["physicalLocation"]["artifactLocation"]["uri"] == "file:///home/me/kernels/spin.cu"


def test_a_race_of_copies_of_one_element_names_its_cause() -> None:
    """Two warps load a word, and one stores it under a predicate. Without a predicate, the message does not mention
    copies."""
    load, one = "ld.global.u32 %r4, [%rd1];\n add.u32 %r4, %r4, 1;", "setp.eq.u32 %p2, %r1, 0;"
    ended = "\n bar.sync 0;\n ret;"
    for store, copies in (
        ("@%p2 st.global.u32 [%rd1], %r4;", True),
        ("@!%p2 bra END;\n st.global.u32 [%rd1], %r4;\nEND:", False),
    ):
        device = Device("sm_100a", profile="lenient")
        launched(device, f"{load}\n{one}\n{store}{ended}")
        (found,) = device.findings
        assert (found.rule, "copies of one element" in found.detail) == ("global-race", copies), found


def test_an_update_that_two_ctas_lose_is_no_race_of_copies() -> None:
    """Warps of one CTA race at the same two lines, and are said behind the CTAs, without a word about copies."""
    lost = (
        "ld.global.u32 %r4, [%rd1];\n add.u32 %r4, %r4, 1;\n setp.eq.u32 %p2, %r1, 0;\n @%p2 st.global.u32 [%rd1], %r4;"
    )
    of_first = "warp 0 of CTA (0, 0, 0)"
    # The third is of the store with itself.
    for grid, pairs in ((1, ["warp 0"]), (4, [of_first, "warp 0", of_first])):
        device = Device("sm_100a")
        fault = launched(device, f"{lost}\n bar.sync 0;\n ret;", grid=grid)
        assert fault is not None
        said = [one.other.who for one in device.findings if one.other is not None]
        assert said == pairs, device.findings
        assert ("changes no result" in str(fault)) == (grid == 1), fault
        harmless = [one for one in device.findings if "changes no result" in one.detail]
        assert len(harmless) == (grid == 1), harmless


def test_a_file_in_the_folder_of_the_run_has_a_relative_uri(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ledger = Ledger()
    ledger.take([finding(source=(SourceLine(str(tmp_path / "my kernels" / "a.cu"), 3),))])
    (result,) = json.loads(rendered(CheckedRun(ledger), "sarif"))["runs"][0]["results"]
    assert result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "my%20kernels/a.cu"


def test_a_finding_in_an_inlined_header_is_shown_where_the_kernel_calls_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A code host cannot show a line of a toolkit's header."""
    monkeypatch.chdir(tmp_path)
    header = SourceLine("/usr/cuda/bin/../include/atomics.hpp", 84, 3, "atomicAdd")
    called, deeper = SourceLine(str(tmp_path / "a.cu"), 10, 3), SourceLine(str(tmp_path / "a.cu"), 20)
    elsewhere = SourceLine("/home/me/b.cu", 30)
    wheel = SourceLine(str(tmp_path / "env/lib/python3.12/site-packages/nvidia/cu13/include/cuda/barrier"), 84)
    for source, place, others in (
        ((header, called, deeper), "a.cu", ["inlined here", "called from here"]),
        ((called, deeper), "a.cu", ["called from here"]),
        ((header,), "file:///usr/cuda/include/atomics.hpp", []),
        ((header, elsewhere), "file:///home/me/b.cu", ["inlined here"]),
        ((wheel, called), "a.cu", ["inlined here"]),
    ):
        ledger = Ledger()
        ledger.take([finding(source=source, other=None)])
        (result,) = json.loads(rendered(CheckedRun(ledger), "sarif"))["runs"][0]["results"]
        shown = result["locations"][0]["physicalLocation"]
        assert shown["artifactLocation"]["uri"] == place
        line = shown["region"]["startLine"]
        assert line == {"a.cu": 10, "file:///home/me/b.cu": 30}.get(place, 84)
        (case,) = ElementTree.fromstring(rendered(CheckedRun(ledger), "junit")).iter("testcase")
        file = place.rpartition("/")[2]
        assert f"/{file}:{line}" in case.attrib["name"], "JUnit names the same line"
        head = rendered(CheckedRun(ledger), "text").splitlines()[0]
        assert f"/{file}:{line}" in head.partition("(inlines ")[0], head
        assert ("(inlines " in head) == ("inlined here" in others)
        other = str(CollidingAccess("warp 0", "wrote", 3, source))
        assert f"/{file}:{line}" in other.partition("(inlines ")[0], "so does the other access"
        assert [one["message"]["text"] for one in result.get("relatedLocations", [])] == others


def test_junit_counts_nothing_but_findings_and_failures() -> None:
    ledger = Ledger()
    for found, total in ((0, 1), (1, 1), (2, 2)):
        ledger.take([finding(line=number) for number in range(found)])
        cases = list(ElementTree.fromstring(rendered(CheckedRun(ledger), "junit")).iter("testcase"))
        assert len(cases) == total
        assert len([one for one in cases if one.find("failure") is not None]) == found


def test_junit_has_a_failure_for_what_counts() -> None:
    root = ElementTree.fromstring(rendered(run_of_all_sorts(), "junit"))
    cases = list(root.iter("testcase"))
    failed = sorted(one.attrib["type"] for case in cases for one in case.iter("failure"))
    assert failed == ["failure", "mbarrier-reinitialised", "race", "tmem-leak"], "a note does not fail"
    assert [one.attrib["message"] for one in root.iter("skipped")] == ["looked at (suppress.yaml, line 1)"]


def test_text_says_everything_once() -> None:
    said = rendered(run_of_all_sorts(), "text")
    for part in (
        "one.ptx: clean",
        "add.gremlin",
        "suppressed: looked at",
        "stale suppression: suppress.yaml, line 2",
        "5 findings, 3 of them count in the profile strict",
        "called from: /home/me/kernels/attention.py:90",
    ):
        assert said.count(part) == 1, f"{part!r}: {said}"  # fmt: skip
    assert rendered(CheckedRun(Ledger()), "text") == ""


def test_the_name_of_a_file_tells_its_format() -> None:
    known = {".txt": "text", ".json": "json", ".sarif": "sarif", ".xml": "junit"}
    assert {suffix: form_of(Path(f"a{suffix}")) for suffix in known} == known
    with pytest.raises(ValueError, match=r"a\.csv: the name of a file of findings ends in one of"):
        form_of(Path("a.csv"))


# megamoe check


def _check(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    status = main(["check", *map(str, arguments)])
    said = capsys.readouterr()
    return status, said.out + said.err


def test_check_collects_over_schedules(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out, suppress = tmp_path / "kernel.ptx", tmp_path / "found.sarif", tmp_path / "suppress.yaml"
    file.write_text(kernel(RACE, TWICE))
    launch = (file, "--entry", "kernel", "--grid", "8", "--block", "64", "--arg", "u32[4]", "--schedule", "eager",
              "--schedule", "lazy", "--schedule", "random:0")  # fmt: skip
    status, said = _check(capsys, *launch)
    assert (status, said.count("[race]"), said.count("found 24 times")) == (1, 1, 2), said
    assert "2 findings, 1 of them counts in the profile default" in said
    status, _ = _check(capsys, *launch, "--profile", "lenient", "--format", "sarif", "--output", out)
    assert status == 0
    jsonschema_rs.Draft202012Validator(SARIF).validate(json.loads(out.read_text("utf-8")))
    suppress.write_text("- {rule: race, place: kernel.ptx, reason: scratch}\n")
    status, said = _check(capsys, *launch, "--suppress", suppress)
    assert (status, "suppressed: scratch" in said) == (0, True), said
    status, said = _check(capsys, *launch, "--suppress", suppress, "--profile", "strict")
    assert status == 1, said


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--format", "pdf"], "the formats are text, json, sarif, junit"),
        (["--profile", "loose"], "no profile 'loose'"),
        (["--suppress", "none.yaml"], "there is no such file"),
    ],
)
def test_options_that_cannot_be_used_are_said(
    arguments: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "kernel.ptx"
    file.write_text(kernel(CLEAN))
    status, said = _check(capsys, file, *arguments)
    assert (status, sentence in said) == (2, True), said

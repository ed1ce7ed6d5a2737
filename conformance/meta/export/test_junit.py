"""The gate's XML has the form that Ant's and Jenkins's JUnit schemas share, and says what the gate says.

The form below is the common part of the Ant tasks' schema (windyroad/JUnit-Schema) and of Jenkins's junit-10.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from xml.etree import ElementTree

import pytest

from conformance.fakes.results import CASE, COUNTERS, NEIGHBOUR, ROW, compiled, expectation, judged
from megamoe.export.junit import findings_as_junit, write_junit
from megamoe.findings import KernelFinding, Ledger, Suppression
from megamoe.gate.verdict import Finding, Verdict, judge_run
from megamoe.records.lines import RecordError

STARTED = "2026-11-21T18:00:00+00:00"
TOKEN, NUMBER, DECIMAL = r"\S+( \S+)*", r"\d+", r"\d+\.\d{1,3}"
# Element -> attributes with their patterns. All are required except those that end in "?".
ATTRIBUTES = {
    "testsuites": {},
    "testsuite": {
        "name": TOKEN,
        "package": TOKEN,
        "id": NUMBER,
        "timestamp": r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d",
        "hostname": TOKEN,
        "tests": NUMBER,
        "failures": NUMBER,
        "errors": NUMBER,
        "skipped": NUMBER,
        "time": DECIMAL,
    },
    "properties": {},
    "property": {"name": TOKEN, "value": "(?s).*"},
    "testcase": {"name": TOKEN, "classname": TOKEN, "time": DECIMAL},
    "failure": {"type": "(?s).+", "message": "(?s).*"},
    "skipped": {"message": "(?s).*"},
    "system-out": {},
    "system-err": {},
}
# Element -> its children in order, as a pattern over their names.
CHILDREN = {
    "testsuites": r"(testsuite )*",
    "testsuite": r"properties (testcase )*system-out system-err ",
    "properties": r"(property )*",
    "testcase": r"((failure|skipped) )?",
}


def _complaints(element: ElementTree.Element) -> Iterator[str]:
    """Deviations from the schemas."""
    wanted = ATTRIBUTES.get(element.tag)
    if wanted is None:
        yield f"there is no element {element.tag}"
        return
    if set(element.attrib) != set(wanted):
        yield f"{element.tag} has the attributes {sorted(element.attrib)}, not {sorted(wanted)}"
    for name, pattern in wanted.items():
        if not re.fullmatch(pattern, element.get(name, "")):
            yield f"{element.tag} has {name}={element.get(name)!r}"
    children = "".join(f"{child.tag} " for child in element)
    if not re.fullmatch(CHILDREN.get(element.tag, ""), children):
        yield f"{element.tag} has the children {children}"
    if element.tag in CHILDREN and (element.text or "").strip():
        yield f"{element.tag} has text"
    if element.tag == "testsuite":
        for key, tag in (("tests", "testcase"), ("failures", "testcase/failure"), ("skipped", "testcase/skipped")):
            if int(element.get(key, "-1")) != len(element.findall(tag)):
                yield f"{key} is {element.get(key)}, there are {len(element.findall(tag))}"
    for child in element:
        yield from _complaints(child)


def _write(path: Path, verdict: Verdict) -> ElementTree.Element:
    write_junit(path / "gate.xml", verdict, [compiled(ROW)], STARTED)
    root = ElementTree.parse(path / "gate.xml").getroot()
    assert list(_complaints(root)) == []
    return root


def _case_of(root: ElementTree.Element, name: str) -> ElementTree.Element:
    (found,) = (case for case in root.iter("testcase") if case.get("name") == name)
    return found


def test_rows_are_cases_and_counters_and_figures_properties(tmp_path: Path) -> None:
    root = _write(tmp_path, judge_run([ROW, NEIGHBOUR], [judged(ROW), judged(NEIGHBOUR)]))
    (suite,) = root
    assert suite.get("name") == "fmha.ptx.sm_100a.vm"
    assert [case.get("name") for case in suite.iter("testcase")] == [f"{row.case} eager" for row in (ROW, NEIGHBOUR)]
    properties = {one.get("name"): one.get("value") for one in suite.iter("property")}
    assert {name: properties[f"{CASE} eager {name}"] for name in COUNTERS} == {
        name: str(value) for name, value in COUNTERS.items()
    }
    assert properties[f"{CASE} ptxas fmha.registers"] == "168"
    assert suite.get("time") == "2.5", "host seconds of both"
    assert not list(root.iter("failure"))


def test_each_thing_that_closes_the_gate_is_a_failure_of_its_row(tmp_path: Path) -> None:
    gone = ROW._replace(case="fmha:hd=64,t=9,s_k=9")
    verdict = judge_run(
        [ROW, NEIGHBOUR, gone], [judged(ROW), judged(NEIGHBOUR, status="crashed")], stale=["e.yaml: old"]
    )
    verdict = verdict.with_findings(
        [Finding("regressed", "regressed: mma_flops 1 -> 2", ROW, accept="megamoe accept X")]
    )
    root = _write(tmp_path, verdict)
    failures = {case.get("name"): case.find("failure") for case in root.iter("testcase")}
    assert {name: one.get("type") for name, one in failures.items() if one is not None} == {
        f"{ROW.case} eager": "regressed",
        f"{NEIGHBOUR.case} eager": "status",
        f"{gone.case} eager": "missing",
        "1. expectation": "expectation",
    }
    regressed = failures[f"{ROW.case} eager"]
    assert regressed is not None
    assert "Accept it on purpose: megamoe accept X" in (regressed.text or "")
    assert sum(int(suite.get("failures", "0")) for suite in root) == len(verdict.problems)


def test_an_expected_failure_is_skipped_with_its_reason(tmp_path: Path) -> None:
    entry = expectation(expires=date(2026, 12, 24))
    verdict = judge_run([ROW], [judged(ROW, status="failed")], [entry])
    assert verdict.passed
    skipped = _case_of(_write(tmp_path, verdict), f"{CASE} eager").find("skipped")
    assert skipped is not None
    message = skipped.get("message", "")
    assert message.startswith("failed as expected until 2026-12-24: the ring of one stage deadlocks")


def test_what_only_asks_is_said_but_fails_nothing(tmp_path: Path) -> None:
    asked = Finding("renew", "better: mma_flops 2 -> 1", ROW, closes=False)
    root = _write(tmp_path, judge_run([ROW], [judged(ROW)]).with_findings([asked]))
    assert not list(root.iter("failure"))
    assert root.findtext("testsuite/system-out") == "better: mma_flops 2 -> 1"


def test_characters_that_xml_cannot_hold_are_replaced(tmp_path: Path) -> None:
    sentence = "kernel said \x00\x1b[31m <&> ]]> \ud800 \N{GREEK SMALL LETTER LAMDA}"
    root = _write(tmp_path, judge_run([ROW], [judged(ROW)]).with_findings([Finding("status", sentence, ROW)]))
    failure = root.find("testsuite/testcase/failure")
    assert failure is not None
    assert failure.get("message", "").endswith("[31m <&> ]]> \N{REPLACEMENT CHARACTER} \N{GREEK SMALL LETTER LAMDA}")


def test_a_file_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError, match="cannot write JUnit XML to"):
        write_junit(tmp_path / "file" / "gate.xml", judge_run([ROW], []), (), STARTED)


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        (' classname="', ' class="', "testcase has the attributes"),
        ("<properties>", "<properties /><properties>", "testsuite has the children"),
        ('time="1.25"', 'time="fast"', "testsuite has time='fast'"),
        ('failures="1"', 'failures="0"', "failures is 0, there are 1"),
        ("<failure ", "<error /><failure ", "testcase has the children error failure"),
        ("<system-err />", "", "testsuite has the children"),
    ],
)
def test_the_check_of_the_form_catches_a_planted_fault(tmp_path: Path, old: str, new: str, complaint: str) -> None:
    _write(tmp_path, judge_run([ROW], [judged(ROW, {}, status="failed")]))
    text = (tmp_path / "gate.xml").read_text("utf-8")
    planted = text.replace(old, new, 1)
    assert planted != text, "the planted fault must change the file"
    assert complaint in " ".join(_complaints(ElementTree.fromstring(planted)))


def test_findings_of_kernels_have_the_same_form() -> None:
    ledger = Ledger("default", (Suppression("race", "looked at", kernel="quiet", where="suppress.yaml, line 1"),))
    odd = "an odd <name> & \x01"
    ledger.take(KernelFinding("race", "error", f"what {odd} does", kernel) for kernel in ("loud", "quiet", odd, ""))
    ledger.take([KernelFinding("unfenced-overwrite", "portability", "no fence", "loud")])
    for failures in ([], [(odd, odd)]):
        root = ElementTree.fromstring(findings_as_junit(ledger, failures))
        assert not list(_complaints(root))
        assert len(list(root.iter("failure"))) == 3 + len(failures), "three races of kernels that nobody suppressed"
        assert len(list(root.iter("skipped"))) == 1
    assert not list(_complaints(ElementTree.fromstring(findings_as_junit(Ledger(), []))))

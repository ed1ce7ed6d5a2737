"""What a finding may follow from: which missing orders are linked to it, and how the formats say so."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import jsonschema_rs
import pytest

from conformance.meta.doors.test_findings import BEYOND, CLEAN, RACE, SARIF, TWICE, finding, kernel, launched
from megamoe.export.findings import CheckedRun, read_findings, rendered
from megamoe.findings import CollidingAccess, KernelFinding, Ledger, module_of
from megamoe.vm import Device

NARROW = {"rule": "scope-too-narrow", "missing": "a scope", "line": 9, "where": "CTA (1, 0, 0), warp 0",
          "other": CollidingAccess("warp 0 of CTA (0, 0, 0)", "wrote", 5),
          "leads_to": ("global-race", "deadlock")}  # fmt: skip


def _cause(*found: KernelFinding) -> str:
    ledger = Ledger()
    ledger.take(found)
    cause = ledger.cause_of(found[-1])
    return "" if cause is None else cause.rule


def test_a_narrow_poll_may_cause_what_comes_after_it() -> None:
    race = finding(rule="global-race", missing="a release", line=20, where="CTA (1, 0, 0), warp 3",
                   other=CollidingAccess("warp 2 of CTA (0, 0, 0)", "wrote", 3))  # fmt: skip
    elsewhere = finding(rule="global-race", missing="a release", line=20, where="CTA (2, 0, 0), warp 3",
                        other=CollidingAccess("warp 2 of CTA (0, 0, 0)", "wrote", 3))  # fmt: skip
    deadlock = finding(rule="deadlock", line=40, where="all warps wait or spin",
                       detail="nobody can move: CTA (1, 0, 0), warp 3 and 5 more spins at PTX line 40")  # fmt: skip
    published = finding(rule="deadlock", line=40, where="all warps wait or spin",
                        detail="nobody can move: CTA (0, 0, 0), warp 0 and 1 more waits at PTX line 41")  # fmt: skip
    nowhere = finding(rule="deadlock", line=40, where="", detail="warp 0 spins at PTX line 40")
    poll = finding(**NARROW)
    assert _cause(poll, race) == "scope-too-narrow"
    assert _cause(poll, elsewhere) == "", "the poll ordered other CTAs"
    assert _cause(poll, deadlock) == "scope-too-narrow"
    assert _cause(poll, published) == "", "only CTA 1 went on too early"
    assert _cause(poll, nowhere) == "", "nobody knows which CTA spins"
    assert _cause(poll, finding(rule="misaligned", line=40)) == "", "no order mends it"
    assert _cause(finding(**{**NARROW, "kernel": "other"}), race) == ""
    ledger = Ledger()
    ledger.take([race, poll])
    assert ledger.cause_of(race) is None, "it happened before the poll"


def test_within_a_cta_only_the_thread_that_did_not_wait_may_have_caused_it() -> None:
    unread = finding(rule="wait-result-unread", missing="a loop", line=5, where="CTA (0, 0, 0), warp 0",
                     leads_to=("race",))  # fmt: skip
    for where, who, caused in (
        ("CTA (0, 0, 0), warp 2", "warp 1", False),
        ("CTA (0, 0, 0), warp 2", "warp 0", True),
        ("CTA (0, 0, 0), warp 0", "warp 1", True),
        ("CTA (1, 0, 0), warp 0", "warp 1", False),
    ):
        race = finding(missing="a barrier", line=20, where=where, other=CollidingAccess(who, "wrote", 15))
        assert bool(_cause(unread, race)) == caused, (where, who)


def test_a_cause_may_lie_within_the_lines_that_are_named() -> None:
    within = finding(rule="deadlock", line=7, where="all warps spin", detail="all spin: CTA (1, 0, 0), "
                     "warp 0 spins at PTX lines 7 to 12; CTA (2, 0, 0), warp 0 at PTX lines 20 to 30")  # fmt: skip
    poll = finding(**{**NARROW, "leads_to": ()})
    assert _cause(poll, within) == "scope-too-narrow"
    for line in (13, 25):
        assert _cause(finding(**{**NARROW, "leads_to": (), "line": line}), within) == "", "that is in another CTA"
    ledger = Ledger()
    ledger.take([within, poll])
    assert ledger.cause_of(within) is None, "it happened before the poll"


def test_a_cause_at_the_line_comes_before_one_anywhere() -> None:
    race = finding(missing="a barrier", line=20, where="CTA (1, 0, 0), warp 0")
    misused = finding(rule="mbarrier-misuse", line=20, where="CTA (1, 0, 0), warp 0", detail="PTX lines 8 to 20")
    poll = finding(**{**NARROW, "leads_to": ("mbarrier-misuse",)})
    assert _cause(poll, misused) == "scope-too-narrow"
    assert _cause(poll, race, misused) == "race"


def test_the_message_of_a_launch_says_what_it_may_follow_from() -> None:
    device = Device("sm_100a")
    device.ledger.take([finding(rule="wait-result-unread", kernel="kernel", module=module_of(kernel(RACE)),
                                missing="a loop", line=5, leads_to=("race",))])  # fmt: skip
    fault = launched(device, RACE)
    assert "; it may follow from [wait-result-unread] at PTX line 5" in str(fault), fault


@pytest.mark.parametrize("steps", [(RACE, CLEAN, BEYOND), (TWICE, RACE, CLEAN, BEYOND), (BEYOND,), (RACE,)], ids=len)
@pytest.mark.parametrize("profile", ["strict", "default", "lenient"])
def test_a_launch_raises_what_the_report_begins_with(steps: tuple[str, ...], profile: str) -> None:
    """What ends a launch may follow from what it did before."""
    device = Device("sm_100a", profile=profile)
    fault = launched(device, *steps)
    counting = [one for one in device.findings if device.ledger.counts(one)]
    assert (fault is None) == (not counting)
    if fault is None:
        return
    report = rendered(CheckedRun(Ledger(device.ledger.profile, (), {one.site: one for one in counting})), "text")
    assert report.startswith(f"{counting[0].grade} {counting[0].sentence}"), report
    assert str(fault).startswith(counting[0].sentence), fault
    assert fault.rule == counting[0].rule
    assert fault.findings == tuple(device.findings), "in another order than the report"
    ending = [one for one in counting if one.ends]
    assert bool(ending) == (BEYOND in steps)
    for one in ending:
        said = f"{one.short} ended the launch"
        assert (said in str(fault)) == (one is not counting[0]), fault


def test_a_launch_that_is_stopped_says_so_behind_what_it_found() -> None:
    device = Device("sm_100a")
    device.timeout = 1.5
    fault = launched(device, RACE, "LOOP: red.global.add.u32 [%rd1], 1;\n bra LOOP;")
    assert str(fault).startswith(device.findings[0].sentence), fault
    assert "the launch was stopped: " in str(fault), fault


def test_what_may_follow_from_a_finding_comes_after_it() -> None:
    """A copy overwrites what a warp has read, because the warp never waited for the copy."""
    copy = CollidingAccess("a copy", "writes", 77)
    race = finding(missing="a barrier", line=77, other=CollidingAccess("warp 1", "read", 91))
    unawaited = finding(rule="copy-not-awaited", missing="a wait", line=91, other=copy, leads_to=("race", "deadlock"))
    undefined = finding(rule="uninitialised-shared", line=97, detail="PTX line 91 reads it")
    apart = finding(missing="a barrier", line=30, other=CollidingAccess("warp 1", "read", 31))
    ledger = Ledger()
    ledger.take([apart, undefined, race, unawaited])
    assert ledger.findings == [apart, unawaited, undefined, race]
    assert [ledger.said_of_cause(one) for one in ledger.findings] == [
        "", "", *["[copy-not-awaited] at PTX line 91"] * 2
    ]  # fmt: skip
    assert ledger.in_order([race, undefined]) == [race, undefined], "those that are asked for, and no others"
    less = Ledger()
    less.take([race, finding(rule="copy-not-awaited", grade="note", missing="a wait", line=91, leads_to=("race",))])
    assert less.findings[0] == race, "the grade comes first"


PUBLISHED = """  mov.u32 %r4, %ctaid.x;
  setp.ne.u32 %p2, %r4, 0;
  @%p2 bra READER;
  @!%p1 st.global.u32 [%rd1+4], 7;
  @!%p1 st.release.gpu.global.u32 [%rd1+8], 1;
  ret;
READER:
  ld.acquire.SCOPE.global.u32 %r4, [%rd1+8];
  setp.eq.u32 %p3, %r4, 0;
  @%p3 bra READER;
  ld.global.u32 %r5, [%rd1+4];
  ret;"""


def test_a_race_behind_a_narrow_poll_names_the_poll() -> None:
    device = Device("sm_100a")
    assert launched(device, PUBLISHED.replace("SCOPE", "gpu"), grid=2) is None
    assert launched(device, PUBLISHED.replace("SCOPE", "cta"), grid=2) is not None
    said = rendered(CheckedRun(device.ledger), "text")
    assert [one.rule for one in device.findings] == ["scope-too-narrow", "global-race"]
    assert f"may follow from: [scope-too-narrow] at PTX line {device.findings[0].line}" in said, said


SKIPPED = """  setp.ne.u32 %p2, %r1, 32;
  mov.u32 %r4, mbar;
  @%p2 bra MET;
  mbarrier.init.shared::cta.b64 [%r4], 1;
  fence.mbarrier_init.release.cluster;
MET:
  bar.sync 0;
  setp.lt.u32 %p3, %r1, 32;
  @%p3 bra READER;
  @%p2 bra WAIT;
  st.shared.u32 [cell+64], %r1;
  mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r4], 16;
  cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [cell], [%rd1], 16, [%r4];
  bra WAIT;
READER:
  ld.shared.u32 %r5, [cell];
  ld.shared.u32 %r5, [cell+64];
WAIT:
  mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r4], 0;
  @!%p3 bra WAIT;
  ret;"""


def test_a_race_behind_a_copy_that_was_not_awaited_names_it() -> None:
    device = Device("sm_100a", schedule="lazy")
    assert launched(device, SKIPPED) is not None
    assert [one.rule for one in device.findings] == ["copy-not-awaited", "race"]
    assert "may follow from: [copy-not-awaited] at PTX line" in rendered(CheckedRun(device.ledger), "text")


def test_every_format_says_what_may_be_the_cause() -> None:
    ledger = Ledger()
    ledger.take([finding(line=30, missing="a barrier"), finding(rule="uninitialised-shared", detail="PTX line 30")])
    (root,) = ElementTree.fromstring(rendered(CheckedRun(ledger), "junit")).iter("testsuites")
    _, failure = root.iter("failure")
    document = json.loads(rendered(CheckedRun(ledger), "sarif"))
    jsonschema_rs.Draft202012Validator(SARIF).validate(document)
    _, result = document["runs"][0]["results"]
    said = re.compile(r"may follow from:? \[race\] at PTX line 30")
    for text in (failure.text, root.findtext("testsuite/system-out"), rendered(CheckedRun(ledger), "text"),
                 result["message"]["text"], result["relatedLocations"][-1]["message"]["text"]):  # fmt: skip
        assert len(said.findall(text or "")) == 1, text
    plain = json.loads(rendered(CheckedRun(ledger), "json"))["findings"]
    assert [one["may_follow_from"] for one in plain] == [None, {"finding": 0, "said": "[race] at PTX line 30"}]


def test_the_cause_in_json_is_that_of_the_ledger_and_is_read_back(tmp_path: Path) -> None:
    race = finding(missing="a barrier", line=77, other=CollidingAccess("warp 1", "read", 91))
    copy = CollidingAccess("a copy", "writes", 77)
    unawaited = finding(rule="copy-not-awaited", missing="a wait", line=91, other=copy, leads_to=("race",))
    ledger, again = Ledger(), Ledger()
    ledger.take([finding(rule="trap", line=3), race, unawaited])
    file = tmp_path / "found.json"
    file.write_text(rendered(CheckedRun(ledger), "json"), "utf-8")
    plain = json.loads(file.read_text("utf-8"))["findings"]
    causes = [one["may_follow_from"] and ledger.findings[one["may_follow_from"]["finding"]] for one in plain]
    assert causes == [ledger.cause_of(one) for one in ledger.findings]
    assert causes[-1] == unawaited, "the plant has no cause"
    again.take(read_findings(file))
    assert [again.cause_of(one) for one in again.findings] == causes, "a suite in its own process loses causes"

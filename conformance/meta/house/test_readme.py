"""What the README shows is what the committed records and the VM say."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from statistics import median

import pytest

from conformance import ROOT
from conformance.fakes import broken_ptx
from megamoe.contract import load_executor
from megamoe.judge.guarded import GuardedCase
from megamoe.records.files import read_records
from megamoe.spec.load import load_specs

RECORDS = ROOT / "results" / "records"
README = (ROOT / "README.md").read_text("utf-8")
OURS = "ptx"
PEERS = {
    "cuDNN": ("torch-sdpa-cudnn", "torch-sdpa-cudnn-folded"),
    "torch flash": ("torch-sdpa-flash",),
    "flash-attn-4": ("flash-attn-4",),
    "cudnn-frontend": ("cudnn-frontend",),
}
ROW = re.compile(r"^\| `(hd=[^`]+)` \| ([\d.]+) \| ([\d.]+)[^|]*\| (\D+?) ([\d.]+)[^|]*\|$", re.MULTILINE)


def _cold_medians() -> dict[str, dict[str, float]]:
    """Case without its op -> backend -> median in microseconds, of the two attention records."""
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for name in ("decode", "small"):
        for timing in read_records(RECORDS / f"h200-fmha-{name}.jsonl").timings:
            if timing.temperature == "cold" and timing.samples_us:
                found[timing.case.partition(":")[2]][timing.backend] = median(timing.samples_us)
    return found


def test_the_smoke_profile_prints_what_its_record_holds() -> None:
    records = read_records(RECORDS / "smoke.jsonl").records
    groups = Counter((one.op, one.backend, one.target, one.executor) for one in records)
    seconds: dict[tuple[str, ...], float] = defaultdict(float)
    for one in records:
        seconds[one.op, one.backend, one.target, one.executor] += one.judge_host_seconds or 0.0
    shown = re.findall(r"^ (\w+) +(\w+) +(sm_\w+) +(vm) +(\d+) +([\d.]+) $", README, re.MULTILINE)
    assert {tuple(line[:4]): (int(line[4]), line[5]) for line in shown} == {
        key: (count, f"{seconds[key]:.1f}") for key, count in groups.items()
    }
    assert f"{len(records)} passed, 0 failed" in README


def test_the_times_are_those_of_the_records() -> None:
    medians, rows = _cold_medians(), ROW.findall(README)
    assert rows, "the README has no table of times"
    for case, _, ours, peer, theirs in rows:
        assert f"{medians[case][OURS]:.1f}" == ours, case
        best = min((us, name) for name, us in medians[case].items() if name != OURS)
        assert best[1] in PEERS[peer], f"{case}: {best[1]} is the best peer, not {peer}"
        assert f"{best[0]:.1f}" == theirs, case


def test_the_count_of_rows_ahead_is_that_of_the_records() -> None:
    medians = _cold_medians()
    ahead = [case for case, us in medians.items() if us[OURS] <= min(v for name, v in us.items() if name != OURS)]
    assert f"in {len(ahead)} of {len(medians)} measured rows" in README


def test_the_broken_rule_is_what_the_vm_says() -> None:
    spec = load_specs(None)["fmha"]
    case = spec.parse_case("fmha:hd=64,t=1,s_k=128")
    program = broken_ptx.BACKEND.build(case, "sm_100a")
    said = GuardedCase(spec, case, load_executor("vm")).run(program).execution.violation or ""
    (shown,) = re.findall(r"```text\n(\[tmem-store-not-waited\].*?)\n```", README, re.DOTALL)
    assert " ".join(shown.split()) == said


@pytest.mark.parametrize("path", sorted(set(re.findall(r"\]\(([\w./-]+)\)", README))))
def test_what_it_links_to_is_there(path: str) -> None:
    assert (ROOT / path).exists()

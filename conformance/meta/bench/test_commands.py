"""Commands of conformance/bench: wrong options give one sentence, and sections for a borrowed device select rows.

On a borrowed device an empty section wastes time.
"""

from __future__ import annotations

import pytest

from backends.peers.peer import Peer
from conformance import ROOT
from conformance.bench.on_device import SECTIONS
from conformance.fakes.commands import PYTEST, python
from megamoe.contract import Row, load_backend
from megamoe.spec.load import load_specs
from megamoe.spec.selection import Selection, owed_rows

BENCH = (*PYTEST, "-q", "-p", "no:cacheprovider", "conformance/bench/bench_rows.py", "--benchmark-only")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--where", "hd=65", "--executor", "vm"), "no selected case has hd=65; hd is 64, 128, 256, 512"),
        (("--case", "fmha:hd=64,t=2,s_k=3", "--profile", "smoke"), "--case names its own row"),
    ],
)
def test_a_wrong_selection_is_one_sentence_and_a_usage_error(
    options: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # pytest-benchmark disables itself in an xdist worker.
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    done = python(*BENCH, *options, cwd=ROOT)
    told = done.stdout + done.stderr
    assert said in told
    assert "pluggy" not in told, f"a traceback surrounds the sentence: {told}"
    assert len([line for line in told.splitlines() if line.strip()]) <= 3, told
    assert done.returncode == pytest.ExitCode.USAGE_ERROR, "wrong options are status 4, not that of a row that failed"


TARGET = "sm_90a"
SPECS = load_specs()


def rows_of(section: str) -> list[Row]:
    """Rows that the options of a section select."""
    options = SECTIONS[section][2]
    given = {name: tuple(options[i + 1] for i, part in enumerate(options) if part == name) for name in options[::2]}
    (profile,) = given["--profile"]
    selection = Selection(
        profile,
        ops=given["--op"],
        where=given["--where"],
        backends=given.get("--backend", ()),
        targets=(TARGET,),
        executors=("gpu",),
        schedules=("eager",),
    )
    return list(owed_rows(SPECS, selection))


def refusal(row: Row) -> str | None:
    """Why a row's backend has no kernel for it, as far as that is known without building one. None if nothing is
    known."""
    backend = load_backend(row.backend)
    if TARGET not in backend.targets(row.op):
        return f"{row.backend} has no {row.op} for {TARGET}"
    return backend.limits.refusal(SPECS[row.op].parse_case(row.case)) if isinstance(backend, Peer) else None


@pytest.mark.parametrize("section", sorted(SECTIONS))
def test_every_case_of_a_section_has_two_kernels_to_compare(section: str) -> None:
    rows = rows_of(section)
    able = {case: [row for row in rows if row.case == case and not refusal(row)] for case in {row.case for row in rows}}
    alone = [case for case, found in able.items() if len(found) < 2]
    assert able, f"section {section} selects no row"
    assert not alone, f"section {section} has one kernel or none on {TARGET} for {alone}"


@pytest.mark.parametrize("section", ["aa", "gemms"])
def test_where_backends_are_named_each_has_every_case(section: str) -> None:
    refused = {f"{row}: {refusal(row)}" for row in rows_of(section) if refusal(row)}
    assert not refused, f"section {section} would spend its time on refusals: {sorted(refused)}"


def test_a_layer_has_no_kernel_there_and_would_be_noticed() -> None:
    row = Row("nvfp4_moe:hidden=7168,intermediate=3072,num_experts=48,tokens=1", "humming", TARGET, "gpu", "eager")
    assert refusal(row), "humming has no whole layer"

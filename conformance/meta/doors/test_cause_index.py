"""A ledger looks causes up in an index: it finds those of the definition, and many findings take no square of time."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from random import Random

import pytest

from conformance.meta.doors.test_findings import finding
from megamoe.findings import (
    CollidingAccess,
    KernelFinding,
    Ledger,
    _accesses,
    _lines_of,
    _may_lead,
    _spans_of,
    _Threads,
    _threads_of,
)

RULES = ("race", "deadlock", "copy-not-awaited", "scope-too-narrow", "uninitialised-shared")


def defined_cause(ledger: Ledger, of: KernelFinding) -> KernelFinding | None:
    """The definition of Ledger.cause_of, by a look at every finding."""
    lines, spans, threads = _lines_of(of) - {0}, _spans_of(of), _threads_of(of)
    before, exact, within, general = True, *(list[KernelFinding]() for _ in range(3))
    for known, one in ledger.by_site.items():
        before = before and known != of.site
        if not one.missing or (one.module, one.kernel) != (of.module, of.kernel):
            continue
        leads, at = of.rule in one.leads_to, _accesses(one)
        if of.missing:
            exact += [one] * (leads and None not in (one.other, of.other) and at == _accesses(of))
        elif lines & at:
            exact.append(one)
        elif before and any(
            ctas & _Threads.of(one.where).ctas and any(line in span for line in at) for span, ctas in spans
        ):
            within.append(one)
        if before and leads and _may_lead(one, threads):
            general.append(one)
    near = exact or within or general
    led = {slug for one in near for slug in one.leads_to}
    return next((one for one in near if one.rule not in led), near[0] if near else None)


def defined_order(ledger: Ledger, found: Sequence[KernelFinding]) -> list[KernelFinding]:
    """The definition of Ledger.in_order: each finding behind those that it follows from, as far as they are there."""
    graded = sorted(found, key=lambda one: ("error", "portability", "note").index(one.grade))
    placed = list[KernelFinding]()
    for one in graded:
        chain = [one]
        while chain[-1] not in placed and (cause := defined_cause(ledger, chain[-1])) is not None:
            known = next((each for each in graded if each.site == cause.site), None)
            if known is None or known.grade != one.grade or known in chain:
                break
            chain.append(known)
        placed += [each for each in reversed(chain) if each not in placed]
    return placed


def _drawn(draw: Random) -> KernelFinding:
    def thread() -> str:
        return draw.choice([
            "", f"CTA ({draw.randrange(3)}, 0, 0), warp {draw.randrange(3)}", f"warp {draw.randrange(3)}",
            f"CTA ({draw.randrange(3)}, 0, 0), warp {draw.randrange(3)} and 2 more",
        ])  # fmt: skip

    first, last = sorted((draw.randrange(12), draw.randrange(12)))
    details = ("", f"PTX line {first} reads it", f"{thread()} spins at PTX lines {first} to {last}; "
               f"{thread()} at PTX lines {last} to {last + 3}")  # fmt: skip
    return finding(
        rule=draw.choice(RULES), grade=draw.choice(["error", "error", "note"]), line=draw.randrange(10),
        kernel=draw.choice(["one", "one", "other"]), where=thread(), detail=draw.choice(details), source=(),
        missing=draw.choice(["", "an order"]), leads_to=tuple(draw.sample(RULES, draw.randrange(3))),
        other=draw.choice([None, CollidingAccess(thread(), "wrote", draw.randrange(10))]),
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(40))
def test_causes_and_order_are_those_of_the_definition(seed: int) -> None:
    draw = Random(seed)
    ledger = Ledger()
    for _ in range(3):
        ledger.take([_drawn(draw) for _ in range(draw.choice([2, 8, 20]))])
    asked = [*ledger.by_site.values(), *(_drawn(draw) for _ in range(10))]
    for one in asked:
        assert ledger.cause_of(one) == defined_cause(ledger, one), one
    assert any(ledger.cause_of(one) for one in asked) or len(asked) < 30, "the draws have no causes"
    assert ledger.findings == defined_order(ledger, list(ledger.by_site.values()))
    some = draw.sample(list(ledger.by_site.values()), len(ledger.by_site) // 2)
    assert ledger.in_order(some) == defined_order(ledger, some)


def _calls(found: Sequence[KernelFinding]) -> int:
    """The calls that it takes to put findings into a ledger and in order."""
    calls = 0

    def count(_frame: object, event: str, _arg: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    ledger = Ledger()
    sys.setprofile(count)
    try:
        ledger.take(found)
        said = [ledger.said_of_cause(one) for one in ledger.findings]
    finally:
        sys.setprofile(None)
    assert len(said) == len(found), "the findings have one site"
    return calls


def _one(number: int, **more: object) -> KernelFinding:
    where = f"CTA ({number % 7}, 0, 0), warp {number % 4}"
    return finding(line=number + 10, where=where, source=(), **more)


KINDS = {
    "causes": lambda n: _one(n, missing="a barrier", leads_to=("race",)),
    "no causes": lambda n: _one(n),
    "at one line": lambda n: _one(n, missing="a barrier", other=CollidingAccess("warp 1", "wrote", 1),
                                  leads_to=("race",)),
    "of one line": lambda n: _one(n, detail="PTX line 1") if n % 2 else
                             _one(n, missing="a wait", other=CollidingAccess("warp 1", "wrote", 1)),
    "a chain": lambda n: _one(n, detail=f"PTX line {n + 9}", missing="" if n % 2 else "a barrier"),
    "each in its CTA": lambda n: finding(line=n + 10, where=f"CTA ({n}, 0, 0), warp 0", source=(),
                                         missing="a wait", leads_to=("race",)),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_four_times_the_findings_take_four_times_the_calls(kind: str) -> None:
    few, many = (_calls([KINDS[kind](number) for number in range(size)]) for size in (100, 400))
    assert many < 5 * few, f"{few} calls for 100 findings, {many} for 400"

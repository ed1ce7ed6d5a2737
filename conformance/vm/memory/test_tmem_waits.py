"""Whether CTAs can wait for each other's tensor memory: the rule equals a search of all states, places included."""

from __future__ import annotations

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from backends.vm.memory.tmem_waits import fewest, listed
from conformance.vm.kernel import Kernel, assert_blamed, assert_clean, fault_of

COLUMNS = 8
"""Of the small tensor memory of the search, where an allocation may be of one column."""
Program = list[tuple[int, frozenset[int]]]
"""The allocations of a CTA: how many columns, and which earlier allocations it frees before."""
Held = tuple[tuple[int, int], ...]
"""Numbers and first columns of the allocations that a CTA holds."""
State = tuple[tuple[int, Held], ...]
"""Of each CTA the number of its next allocation, and what it holds."""


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Counts are powers of two and do not grow. What a CTA holds fits in tensor memory."""
    counts = sorted((1 << draw(st.integers(0, 3)) for _ in range(draw(st.integers(2, 4)))), reverse=True)
    program: Program = []
    held = frozenset[int]()
    for number, count in enumerate(counts):
        freed = frozenset(one for one in held if draw(st.integers(0, 2)) == 0)
        if count + sum(counts[one] for one in held - freed) > COLUMNS:
            freed = held
        held = held - freed | {number}
        program.append((count, freed))
    return program


def amounts(program: Program) -> list[int]:
    """What a CTA keeps at each allocation."""
    return [sum(program[one][0] for one in held) for held in held_at(program)]


def held_at(program: Program) -> list[frozenset[int]]:
    held, found = frozenset[int](), list[frozenset[int]]()
    for number, (_, freed) in enumerate(program):
        found.append(held - freed)
        held = found[-1] | {number}
    return found


def search(program: Program, ctas: int) -> bool:
    """Whether CTAs, each of which begins again when it ends, can come to a state where each waits."""
    kept = held_at(program)
    first: State = tuple((0, ()) for _ in range(ctas))
    seen: set[State] = {first}
    open_: list[State] = [first]
    while open_:
        state = open_.pop()
        taken = {at + i for _, held in state for one, at in held for i in range(program[one][0])}
        moved = False
        for cta, (number, held) in enumerate(state):
            count = program[number][0]
            for at in range(0, COLUMNS, count):
                if taken.isdisjoint(range(at, at + count)):
                    moved, then = True, (number + 1) % len(program)
                    left = tuple(pair for pair in (*held, (number, at)) if then and pair[0] in kept[then])
                    after = tuple(sorted((*state[:cta], (then, left), *state[cta + 1 :])))
                    if after not in seen:
                        seen.add(after)
                        open_.append(after)
        if not moved:
            return True
    return False


def rule(program: Program, ctas: int) -> bool:
    """As TensorMemory asks, for any of the amounts."""
    kept = [amount for amount in amounts(program) if amount]
    return any(0 < len(fewest(one, kept, COLUMNS)) <= ctas for one in kept)


@settings(max_examples=100, deadline=None)
@given(programs(), st.integers(1, 4))
def test_the_rule_equals_a_search_of_all_states(program: Program, ctas: int) -> None:
    waits = search(program, ctas)
    event(f"they wait: {waits}")
    assert rule(program, ctas) == waits, f"{ctas} CTAs that allocate {program}, and keep {amounts(program)}"


def kernel_of(program: Program, ctas: int, last: list[int]) -> Kernel:
    """A warp of each CTA does that with 64 times the columns. At the end it frees the rest, in the order `last`."""
    alloc, dealloc = (f"tcgen05.{name}.cta_group::1.sync.aligned" for name in ("alloc", "dealloc"))
    body = [".shared .align 4 .b32 slot;"]
    freed = set[int]()
    for number, (count, before) in enumerate([*program, (0, frozenset(range(len(program))))]):
        now = sorted(before - freed, key=last.index)
        body += [f"{dealloc}.b32 %r{one}, {64 * program[one][0]};" for one in now]
        freed.update(now)
        if count:
            body.append(f"{alloc}.shared::cta.b32 [slot], {64 * count}; ld.shared.u32 %r{number}, [slot];")
    return Kernel("\n".join([*body, "ret;"]), grid=(ctas, 1, 1))


@settings(max_examples=25, deadline=None)
@given(programs(), st.integers(1, 4), st.permutations(range(4)))
def test_the_machine_reports_it_if_and_only_if_a_search_finds_it(program: Program, ctas: int, last: list[int]) -> None:
    found = fault_of(kernel_of(program, ctas, last), "eager")
    assert found is None or found.rule == "tmem-hold-and-wait", f"{found}"
    assert (found is not None) == search(program, ctas), f"{ctas} CTAs that allocate {program}: {found}"


@pytest.mark.parametrize(
    ("counts", "ctas", "waits"), [((4, 4), 2, True), ((4, 4), 1, False), ((2, 1, 1), 3, True), ((2, 1, 1), 2, False)]
)
def test_known_programs(counts: tuple[int, ...], ctas: int, waits: bool) -> None:
    """2, 1 and 1 of 8: with three CTAs, two keep 3 columns and one keeps 2. Equal amounts never take all columns."""
    program: Program = [(count, frozenset()) for count in counts]
    assert (search(program, ctas), rule(program, ctas)) == (waits, waits)


def test_the_fewest_amounts() -> None:
    assert fewest(128, [128, 192], 512) == (128, 192, 192)
    assert listed((128, 192, 192)) == "1 CTA that keeps 128 and 2 that keep 192"
    assert fewest(160, [160], 512) == ()
    assert fewest(512, [512, 256], 512) == (512,)


def pairs(ctas: int) -> Kernel:
    """Pairs of CTAs that keep 256 columns until they have got 256 more."""
    alloc, dealloc = (f"tcgen05.{name}.cta_group::2.sync.aligned" for name in ("alloc", "dealloc"))
    got = [f"{alloc}.shared::cta.b32 [slot], 256; ld.shared.u32 %r{number}, [slot];" for number in range(2)]
    meet = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
    freed = f"{dealloc}.b32 %r1, 256; {dealloc}.b32 %r0, 256; //!"
    body = "\n".join([".shared .align 4 .b32 slot;", meet, *got, meet, freed, "ret;"])
    return Kernel(body, grid=(ctas, 1, 1), cluster=(2, 1, 1))


def test_the_ctas_of_a_pair_are_on_two_sms() -> None:
    assert_blamed(pairs(4), "tmem-hold-and-wait", "the launch has 2 for an SM")
    assert_clean(pairs(2), {})

"""Exchange between lanes: shfl, vote, match, redux, elect, activemask (PTX ISA 9.7.9.6 and 9.7.13)."""

from __future__ import annotations

import functools
import json
import operator
from collections.abc import Callable

import numpy as np
import pytest

from backends.vm.faults import Fault, UnknownInstructionError
from conformance import SILICON
from conformance.vm.kernel import lanes_of, run_ptx

LANE = np.arange(32, dtype=np.uint32)
ALL = 0xFFFF_FFFF
MEASURED = SILICON / "movement" / "warp_and_barrier.json"


def semantics(mode: str, lane: int, b: int, c: int) -> tuple[int, bool]:
    """The pseudocode of PTX ISA 9.7.9.6."""
    clamp, segment = c & 31, c >> 8 & 31
    max_lane, min_lane = (lane & segment) | (clamp & ~segment), lane & segment
    if mode == "up":
        source, valid = lane - (b & 31), lane - (b & 31) >= max_lane
    elif mode == "down":
        source, valid = lane + (b & 31), lane + (b & 31) <= max_lane
    elif mode == "bfly":
        source, valid = lane ^ (b & 31), lane ^ (b & 31) <= max_lane
    else:
        source = min_lane | (b & 31 & ~segment)
        valid = source <= max_lane
    return (source if valid else lane), valid


# c in CuTeDSL's kernels (facts.md 5): idx n,31; up n,0; down n,7171; bfly n,31. The others are segments of 8 and 16.
SHUFFLES = [
    ("idx", 0, 31), ("idx", 5, 31), ("up", 1, 0), ("up", 16, 0), ("down", 1, 7171), ("bfly", 16, 31), ("bfly", 1, 31),
    ("idx", 3, 0x181F), ("up", 2, 0x1800), ("down", 4, 0x181F), ("bfly", 8, 0x181F), ("down", 40, 31), ("idx", 9, 4),
]  # fmt: skip


@pytest.mark.parametrize(("mode", "b", "c"), SHUFFLES)
def test_shuffles(mode: str, b: int, c: int) -> None:
    value = LANE * 3 + 100
    found = run_ptx(
        f"shfl.sync.{mode}.b32 %d|%p, %a, {b}, {c}, 0xffffffff;", {"a": value}, {"d": np.uint32, "p": np.bool_}
    )
    for lane in range(32):
        source, valid = semantics(mode, lane, b, c)
        assert found["d"][lane] == value[source], f"shfl.{mode} {b}, {c:#x}: lane {lane} reads {found['d'][lane]}"
        assert found["p"][lane] == valid, f"shfl.{mode} {b}, {c:#x}: the predicate of lane {lane}"
    plain = run_ptx(f"shfl.sync.{mode}.b32 %a, %a, {b}, {c}, 0xffffffff;", {"a": value}, {"a": np.uint32})
    assert np.array_equal(plain["a"], found["d"]), "the form without a predicate, in place, differs"


def test_every_lane_may_ask_for_another_lane() -> None:
    wanted = LANE[::-1].copy()
    found = run_ptx("shfl.sync.idx.b32 %d, %a, %b, 31, -1;", {"a": LANE + 7, "b": wanted}, {"d": np.uint32})["d"]
    assert np.array_equal(found, wanted + 7)


HALF_WARP = "setp.lt.u32 %low, %a, 16; @%low bra LOW; {high} bra.uni DONE; LOW: {low} DONE:"
DECLARE = ".reg .pred %low;"


def diverged(low: str, high: str) -> str:
    return HALF_WARP.format(low=low, high=high)


def test_halves_of_a_diverged_warp_exchange_among_themselves() -> None:
    body = diverged("shfl.sync.bfly.b32 %d, %a, 1, 31, 0xffff;", "shfl.sync.bfly.b32 %d, %a, 2, 31, 0xffff0000;")
    found = run_ptx(body, {"a": LANE}, {"d": np.uint32}, declare=DECLARE)["d"]
    assert np.array_equal(found, np.where(LANE < 16, LANE ^ 1, LANE ^ 2))


def test_lanes_with_masks_of_their_own_form_groups() -> None:
    """Each group passes its own mask to the same instruction, as tiled cooperative groups do."""
    masks = np.where(LANE < 8, np.uint32(0xFF), np.uint32(0xFFFF_FF00))
    inputs = {"a": LANE, "m": masks, "p": LANE % 2 == 1}
    found = run_ptx(
        "redux.sync.add.u32 %s, %a, %m; elect.sync %l|%e, %m; vote.sync.ballot.b32 %v, %p, %m; "
        "match.any.sync.b32 %t, %z, %m;",
        {**inputs, "z": np.uint32(4)}, {"s": np.uint32, "l": np.uint32, "e": np.bool_, "v": np.uint32, "t": np.uint32},
    )  # fmt: skip
    low = LANE < 8
    assert np.array_equal(found["s"], np.where(low, 28, 496 - 28)), "redux.sync.add over each group"
    assert np.array_equal(found["l"], np.where(low, 0, 8)), "elect.sync in each group"
    assert np.flatnonzero(found["e"]).tolist() == [0, 8], "one leader for each group"
    assert np.array_equal(found["v"], np.where(low, 0xAA, 0xAAAA_AA00)), "vote.sync.ballot of each group"
    assert np.array_equal(found["t"], masks), "match.any.sync within each group"


@pytest.mark.parametrize("one", json.loads(MEASURED.read_text())["elect"], ids=lambda one: hex(one["mask"]))
def test_elect_chooses_as_an_h200_does(one: dict[str, int]) -> None:
    """The lowest named lane leads, and every named lane gets its number as d."""
    mask, leader = one["mask"], one["leader"]
    named = lanes_of(mask)
    inputs = {"in": named, "d": np.full(32, 99, np.uint32), "p": np.zeros(32, np.bool_)}
    found = run_ptx(f"@%in elect.sync %d|%p, {mask};", inputs, {"d": np.uint32, "p": np.bool_})
    assert np.array_equal(found["d"], np.where(named, leader, 99)), f"elect.sync of {mask:#x}"
    assert np.flatnonzero(found["p"]).tolist() == [leader], f"elect.sync of {mask:#x} elects more or others"
    sunk = run_ptx(f"@%in elect.sync _|%p, {mask};", {"in": named, "p": np.zeros(32, np.bool_)}, {"p": np.bool_})
    assert np.array_equal(sunk["p"], found["p"]), "the sink changes the election"


@pytest.mark.parametrize("votes", [0, ALL, 0x0000_0400])
def test_votes(votes: int) -> None:
    body = "".join(f"vote.sync.{mode}.pred %{mode}, %p, -1;" for mode in ("all", "any", "uni"))
    body += "vote.sync.ballot.b32 %d, %p, -1; vote.sync.any.pred %not, !%p, -1;"
    outputs = {**dict.fromkeys(("all", "any", "uni", "not"), np.bool_), "d": np.uint32}
    found = run_ptx(body, {"p": lanes_of(votes)}, outputs)
    expected = {"all": votes == ALL, "any": votes != 0, "uni": votes in (0, ALL), "not": votes != ALL, "d": votes}
    for name, wanted in expected.items():
        assert (found[name] == wanted).all(), f"vote {name} of {votes:#x}"


def test_ballot_and_activemask_see_only_the_lanes_that_are_here() -> None:
    body = diverged("activemask.b32 %d; vote.sync.ballot.b32 %e, %p, 0xffff;",
                    "activemask.b32 %d; vote.sync.ballot.b32 %e, %p, 0xffff0000;")  # fmt: skip
    found = run_ptx(body, {"a": LANE, "p": np.ones(32, np.bool_)}, {"d": np.uint32, "e": np.uint32}, declare=DECLARE)
    wanted = np.where(LANE < 16, 0xFFFF, 0xFFFF_0000)
    assert np.array_equal(found["d"], wanted)
    assert np.array_equal(found["e"], wanted)


def test_lanes_that_do_not_exist_are_not_counted() -> None:
    found = run_ptx("activemask.b32 %d; vote.sync.all.pred %p, %p, -1;", {"p": np.ones(5, np.bool_)},
                    {"d": np.uint32, "p": np.bool_})  # fmt: skip
    assert found["d"].tolist() == [31] * 5
    assert found["p"].all(), "the bits of lanes that do not exist count as a vote"


REDUCE: dict[str, Callable[[int, int], int]] = {
    "add.u32": lambda a, b: (a + b) % 2**32, "min.u32": min, "max.u32": max, "and.b32": operator.and_,
    "or.b32": operator.or_, "xor.b32": operator.xor,
}  # fmt: skip


@pytest.mark.parametrize("op", REDUCE)
def test_integer_reductions(op: str) -> None:
    values = np.random.default_rng(1).integers(0, 2**32, 32, dtype=np.uint32)
    found = run_ptx(f"redux.sync.{op} %d, %a, -1;", {"a": values}, {"d": np.uint32})["d"]
    assert (found == functools.reduce(REDUCE[op], values.tolist())).all(), f"redux.sync.{op}"


def test_signed_reductions() -> None:
    values = (LANE.astype(np.int32) - 7) * 1000
    for op, wanted in (("add", int(values.sum())), ("min", -7000), ("max", 24000)):
        found = run_ptx(f"redux.sync.{op}.s32 %d, %a, -1;", {"a": values}, {"d": np.int32})["d"]
        assert (found == wanted).all(), f"redux.sync.{op}.s32 gives {found[0]}"


def test_float_reductions() -> None:
    """PTX ISA 9.7.13.12: +0 is above -0; NaN is ignored without .NaN, and canonical if there is nothing else."""
    values = np.zeros(32, np.float32)
    values[3], values[9], values[20] = -0.0, np.nan, -4.0
    expected = {
        "min": 0xC080_0000,
        "max": 0,
        "max.abs": 0x4080_0000,
        "min.NaN": 0x7FFF_FFFF,
        "max.abs.NaN": 0x7FFF_FFFF,
    }
    for op, wanted in expected.items():
        found = run_ptx(f"redux.sync.{op}.f32 %d, %a, -1;", {"a": values}, {"d": np.uint32})["d"]
        assert (found == wanted).all(), f"redux.sync.{op}.f32 gives {found[0]:08x}, not {wanted:08x}"
    values[20] = 0.0
    assert (run_ptx("redux.sync.min.f32 %d, %a, -1;", {"a": values}, {"d": np.uint32})["d"] == 0x8000_0000).all()
    found = run_ptx("redux.sync.min.f32 %d, %a, -1;", {"a": np.full(32, np.uint32(0x7F80_0001))}, {"d": np.uint32})["d"]
    assert (found == 0x7FFF_FFFF).all(), f"min of NaNs gives {found[0]:08x}"


@pytest.mark.parametrize("kind", [np.uint32, np.uint64])
def test_matching(kind: type[np.unsignedinteger]) -> None:
    bits = 8 * np.dtype(kind).itemsize
    values = (LANE % 3).astype(kind) << kind(bits - 4)
    found = run_ptx(f"match.any.sync.b{bits} %d, %a, -1;", {"a": values}, {"d": np.uint32})["d"]
    groups = [sum(1 << lane for lane in range(32) if lane % 3 == rest) for rest in range(3)]
    assert found.tolist() == [groups[lane % 3] for lane in range(32)]
    for same, mask in ((values, 0), (np.full(32, values[1]), ALL)):
        found = run_ptx(f"match.all.sync.b{bits} %d|%p, %a, -1;", {"a": same}, {"d": np.uint32, "p": np.bool_})
        assert (found["d"] == mask).all(), f"match.all.sync.b{bits}"
        assert (found["p"] == bool(mask)).all(), f"match.all.sync.b{bits}: the predicate"


@pytest.mark.parametrize(
    ("instruction", "reason"),
    [
        ("shfl.sync.bfly.b32 %d, %a, 1, 31, 0xffffffff;", r"names lanes \[16, .*not executing"),
        ("vote.sync.all.pred %low, %low, 0x1ffff;", r"names lanes \[16\]"),
        ("redux.sync.add.u32 %d, %a, 0xff;", "does not name"),
        ("elect.sync %d|%low, 0xfffe;", "does not name"),
        ("shfl.sync.idx.b32 %d, %a, 20, 31, 0xffff;", "reads lane 20, which is not active"),
    ],
)
def test_a_wrong_member_mask_is_found(instruction: str, reason: str) -> None:
    with pytest.raises(Fault, match=reason) as caught:
        run_ptx(
            diverged(instruction, "mov.u32 %d, 0;") + " bar.sync 0;",
            {"a": LANE, "d": LANE},
            {"d": np.uint32},
            declare=DECLARE,
        )
    assert caught.value.rule == "diverged"
    assert caught.value.line > 0, "the report has no PTX line"


@pytest.mark.parametrize(
    "instruction",
    ["shfl.idx.b32 %d, %a, 0, 31;", "shfl.sync.idx.b64 %d, %a, 0, 31, -1;", "vote.sync.ballot.pred %p, %p, -1;",
     "redux.sync.mul.u32 %d, %a, -1;", "redux.sync.and.s32 %d, %a, -1;", "redux.sync.add.f32 %d, %a, -1;",
     "match.any.sync.b32 %d|%p, %a, -1;", "elect.sync %d|%p;"],
)  # fmt: skip
def test_forms_that_the_isa_does_not_list_are_refused(instruction: str) -> None:
    with pytest.raises(UnknownInstructionError, match="PTX line"):
        run_ptx(instruction, {"a": LANE, "p": np.ones(32, np.bool_)}, {"d": np.uint32})

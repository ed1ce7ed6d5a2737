"""Keys split over CTAs: the rule, parts that see nothing, and other plans than the rule's, which keep the laws."""

from __future__ import annotations

from dataclasses import replace

import pytest

from backends.ptx import BACKEND, PtxBackend
from backends.ptx.attention import SUPPORTED_HD
from backends.ptx.sm90_fmha.geometry import Sm90FmhaTiling
from backends.ptx.sm100_fmha.geometry import TILE_N
from backends.ptx.split_keys import SPLIT_KEYS, splits_of
from conformance.kernels.laws.law import Bench, BrokenLawError, Machine, laws_of, spec_of
from megamoe.contract import TARGETS, Case, Program, Row, Target
from megamoe.judge.judge import judge

PARTS_OF_128 = PtxBackend("ptx-parts-of-128", 128)


class DoubledKeys(PtxBackend):
    """A planted fault: a part does not end where the next one begins."""

    def build(self, case: Case, target: Target) -> Program:
        """The program without the end of a part."""
        program = super().build(case, target)
        ptx = program.ptx.replace("min.s32 %tile_end_key, %tile_end_key, %split_end;", "")
        assert ptx != program.ptx, "the kernel has no such instruction any more"
        return replace(program, ptx=ptx)


DOUBLED_KEYS = DoubledKeys("ptx-doubled-keys", 128)


def named(attribute: str) -> str:
    """The name by which a record speaks of a backend of this file."""
    return f"{__name__}:{attribute}"


def hold(law: str, backend: str, target: Target, text: str, schedule: str = "eager") -> None:
    """Holds one law on one case."""
    bench = Bench(Machine(backend, target, "vm"), (schedule, "lazy", "random:0"))
    laws_of("fmha")[law].try_on(bench, spec_of("fmha").parse_case(f"fmha:{text}"))


@pytest.mark.parametrize(("t", "s_k", "splits"), [(1, 512, 1), (1, 513, 2), (16, 8192, 16), (17, 8192, 1)])
def test_the_keys_of_few_queries_are_split(t: int, s_k: int, splits: int) -> None:
    assert splits_of(t, s_k) == splits
    tiles = [TILE_N, *(Sm90FmhaTiling(hd).tile_n for hd in SUPPORTED_HD)]
    assert all(SPLIT_KEYS % tile_n == 0 for tile_n in tiles), "a part begins within a tile"


@pytest.mark.parametrize("target", TARGETS)
def test_decoding_one_sequence_fills_the_machine(target: Target) -> None:
    """64 heads of 8 KV heads: one CTA a KV head were 8 of the machine's 132 or 148."""
    case = spec_of("fmha").case(hd=128, t=1, s_k=8192, heads=64, kv_heads=8)
    attention, combine = BACKEND.build(case, target).launches
    assert attention.grid == (1, 8, 16), f"the CTAs of the keys are {attention.grid}"
    assert combine.grid == (64, 1, 1), f"a CTA a row combines; there are {combine.grid}"


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("part_keys", [0, -128, 100])
def test_a_part_that_begins_within_a_tile_is_refused(target: Target, part_keys: int) -> None:
    with pytest.raises(ValueError, match=f"a part has {part_keys} keys; it must have a multiple of"):
        PtxBackend("other", part_keys).build(spec_of("fmha").case(hd=64, t=1, s_k=300), target)


@pytest.mark.parametrize(
    ("target", "hd"), [*(("sm_90a", hd) for hd in SUPPORTED_HD), ("sm_100a", 64), ("sm_100a", 512)]
)
def test_parts_without_a_key_count_for_nothing(target: Target, hd: int) -> None:
    """With a window of one key, two of three parts see no key of one query or of both."""
    case = spec_of("fmha").case(hd=hd, t=2, s_k=1025, heads=2, causal=True, window=1)
    record = judge(Row(case.id, "ptx", target, "vm", "lazy"), "pytest")
    assert record.status == "passed", record.sentence


# Ragged keys; rows of several heads in one tile; rows that see no key of a part; more queries than the rule splits for.
@pytest.mark.parametrize(
    ("target", "law", "text"),
    [
        ("sm_90a", "gqa_equals_expanded_mha", "hd=64,t=3,s_k=300,heads=2,causal=true,window=150"),
        ("sm_100a", "gqa_equals_expanded_mha", "hd=64,t=3,s_k=300,heads=2,causal=true,window=150"),
        ("sm_100a", "batch_invariant", "hd=64,t=1,s_k=129,batch=2"),
        ("sm_100a", "matches_reference", "hd=64,t=17,s_k=129,causal=true,inputs=large_logits"),
    ],
)
def test_laws_hold_at_another_plan(target: Target, law: str, text: str) -> None:
    hold(law, named("PARTS_OF_128"), target, text, "random:1")


def test_parts_that_overlap_are_noticed() -> None:
    with pytest.raises(BrokenLawError, match="matches_reference is broken"):
        hold("matches_reference", named("DOUBLED_KEYS"), "sm_100a", "hd=64,t=1,s_k=129")

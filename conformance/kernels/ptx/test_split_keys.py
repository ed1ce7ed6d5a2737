"""Keys split over CTAs: the rule, parts that see no key, and plans other than the rule's, which keep the laws."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from backends.ptx import BACKEND, PtxBackend
from backends.ptx.attention import SUPPORTED_HD, FmhaShape
from backends.ptx.sm90_fmha.geometry import SM_COUNT, PairTiling, Sm90FmhaTiling, Tiling
from backends.ptx.sm90_fmha.program import MAX_PARTS, SHORT_KEYS, TINY_PART_KEYS, has_pair, part_keys_of
from backends.ptx.sm100_fmha.geometry import TILE_N
from backends.ptx.split_keys import SPLIT_KEYS, splits_of
from conformance.kernels.laws.law import Bench, BrokenLawError, Machine, laws_of, spec_of
from megamoe.contract import TARGETS, Case, Program, Row, RunOptions, Target, load_executor
from megamoe.judge.guarded import GuardedCase
from megamoe.judge.judge import judge

SCHEDULES = ("eager", "lazy", "random:1", "random:2")
PARTS_OF_128 = PtxBackend("ptx-parts-of-128", 128)


class DoubledKeys(PtxBackend):
    """A planted fault: a part runs past the start of the next one."""

    def build(self, case: Case, target: Target) -> Program:
        """Builds the program without the end of a part."""
        program = super().build(case, target)
        ptx = program.ptx.replace("min.s32 %tile_end_key, %tile_end_key, %split_end;", "")
        assert ptx != program.ptx, "the kernel has no such instruction any more"
        return replace(program, ptx=ptx)


DOUBLED_KEYS = DoubledKeys("ptx-doubled-keys", 128)


def named(attribute: str) -> str:
    """Returns the name of a backend of this file in a record."""
    return f"{__name__}:{attribute}"


def hold(law: str, backend: str, target: Target, text: str, schedule: str = "eager") -> None:
    """Holds one law on one case."""
    bench = Bench(Machine(backend, target, "vm"), (schedule, "lazy", "random:0"))
    laws_of("fmha")[law].try_on(bench, spec_of("fmha").parse_case(f"fmha:{text}"))


@pytest.mark.parametrize(("t", "s_k", "splits"), [(1, 512, 1), (1, 513, 2), (16, 8192, 16), (17, 8192, 1)])
def test_the_keys_of_few_queries_are_split(t: int, s_k: int, splits: int) -> None:
    assert splits_of(t, s_k) == splits
    tiles = [TILE_N, Sm90FmhaTiling(64).tile_n, *(PairTiling(hd).tile_n for hd in SUPPORTED_HD)]
    assert all(SPLIT_KEYS % tile_n == 0 for tile_n in tiles), "a part begins within a tile"


@pytest.mark.parametrize("target", TARGETS)
def test_decoding_one_sequence_fills_the_machine(target: Target) -> None:
    """64 heads of 8 KV heads: one CTA a KV head would use 8 of the machine's 132 or 148 SMs."""
    case = spec_of("fmha").case(hd=128, t=1, s_k=8192, heads=64, kv_heads=8)
    attention, combine = BACKEND.build(case, target).launches
    assert attention.grid == (1, 8, 16), f"the CTAs of the keys are {attention.grid}"
    assert combine.grid == (64, 1, 1), f"a CTA combines 128 columns of a row; there are {combine.grid}"


def shape_of(text: str) -> FmhaShape:
    return FmhaShape.of(spec_of("fmha").parse_case(f"fmha:{text}"), "sm_90a")


def tiling_of(shape: FmhaShape) -> Tiling:
    return PairTiling(shape.hd) if has_pair(shape) else Sm90FmhaTiling(shape.hd)


@pytest.mark.parametrize("t", [1, 4, 16, 17, 128])
@pytest.mark.parametrize("hd", SUPPORTED_HD)
def test_short_caches_are_split_alike_in_every_batch_on_sm_90a(hd: int, t: int) -> None:
    for s_k in (SPLIT_KEYS, SPLIT_KEYS + 1, SHORT_KEYS):
        shapes = [shape_of(f"hd={hd},t={t},s_k={s_k}"), shape_of(f"hd={hd},t={t},s_k={s_k},batch=4,heads=8")]
        kernels = {has_pair(shape) for shape in shapes}
        assert len(kernels) == 1, f"hd {hd}, t {t}, s_k {s_k}: batch and heads change the kernel"
        parts = {part_keys_of(shape, tiling_of(shape)) for shape in shapes}
        tiny = hd <= 128 and t > 16 and s_k <= SPLIT_KEYS
        wanted = {TINY_PART_KEYS if tiny else None}
        assert parts == wanted, f"hd {hd}, t {t}, s_k {s_k}: parts of {parts} keys, {wanted} by the rule"


@pytest.mark.parametrize(
    "text",
    [
        "hd=64,t=1,s_k=32768,heads=64,kv_heads=8",
        "hd=256,t=4,s_k=8192,batch=4,heads=64,kv_heads=8",
        "hd=512,t=128,s_k=8192,batch=2,heads=16,kv_heads=16",
        "hd=512,t=1,s_k=4096,batch=64,heads=128",
    ],
)
def test_a_long_cache_fills_the_machine_once(text: str) -> None:
    shape = shape_of(text)
    tiling = tiling_of(shape)
    part_keys = part_keys_of(shape, tiling)
    assert part_keys is not None, f"{text}: a long cache is split by the rule for short ones"
    assert part_keys % tiling.tile_n == 0, f"{text}: a part of {part_keys} keys begins within a tile"
    parts = -(-shape.s_k // part_keys)
    ctas = parts * shape.batch * shape.kv_heads * -(-shape.rows // tiling.tile_m)
    assert parts <= MAX_PARTS, f"{text}: {parts} parts"
    full = tiling.ctas_per_sm * SM_COUNT
    assert 0.9 * full <= ctas <= full, f"{text}: {ctas} CTAs on {SM_COUNT} SMs"


def test_one_row_tile_of_hd_512_leaves_sms_idle() -> None:
    """Writing parts and combining them costs more than idle SMs: 74 parts are faster than 103 were."""
    shape = shape_of("hd=512,t=1,s_k=32768,heads=64")
    assert part_keys_of(shape, tiling_of(shape)) == 448, "448 keys a part were measured to be the fastest"


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


# Rows of two heads in the tile of one consumer, of two and of none; rows and parts that see no key; rising maxima; one
# latent tensor, read as K and as V; a consumer whose keys no row sees.
@pytest.mark.parametrize(
    "text",
    [
        "hd=64,t=100,s_k=530,heads=2,causal=true,window=90",
        "hd=256,t=17,s_k=513,kv=latent,inputs=large_logits",
        "hd=512,t=3,s_k=200,heads=30,causal=true,window=20",
        "hd=512,t=40,s_k=97,causal=true,kv=latent,inputs=large_logits",
    ],
)
@pytest.mark.parametrize("schedule", ["lazy", "random:3"])
def test_two_consumers_give_attention(text: str, schedule: str) -> None:
    case = spec_of("fmha").parse_case(f"fmha:{text}")
    entry = BACKEND.build(case, "sm_90a").launches[0].entry
    assert entry.startswith("fmha_forward_pair"), f"{text} has the kernel {entry}"
    record = judge(Row(case.id, "ptx", "sm_90a", "vm", schedule), "pytest")
    assert record.status == "passed", record.sentence


# Keys hidden by a window, in the first and in the last round; two heads of a KV head; maxima that differ by warp; one
# latent tensor; no lse.
@pytest.mark.parametrize(
    "text",
    [
        "hd=64,t=1,s_k=333,causal=true,window=100,batch=2",
        "hd=128,t=1,s_k=165,heads=4,kv_heads=2,inputs=large_logits",
        "hd=128,t=1,s_k=512,lse=false,kv=latent",
    ],
)
def test_one_row_gives_attention(text: str) -> None:
    case = spec_of("fmha").parse_case(f"fmha:{text}")
    entry = BACKEND.build(case, "sm_90a").launches[0].entry
    assert entry.startswith("fmha_forward_row"), f"{text} has the kernel {entry}"
    for schedule in ("eager", "random:4"):
        record = judge(Row(case.id, "ptx", "sm_90a", "vm", schedule), "pytest")
        assert record.status == "passed", record.sentence


def test_a_latent_tile_is_loaded_once() -> None:
    """The machine counts loads: 200 keys are four tiles of eight boxes, and Q has eight more."""
    loads: list[int] = []
    for kv in ("apart", "latent"):
        case = spec_of("fmha").parse_case(f"fmha:hd=512,t=2,s_k=200,kv={kv}")
        record = judge(Row(case.id, "ptx", "sm_90a", "vm", "eager"), "pytest")
        assert record.status == "passed", record.sentence
        loads.append(int(record.counters["tma_loads"]))
    assert loads == [8 + 2 * 4 * 8, 8 + 4 * 8], f"K and V apart and latent take {loads} loads"


FAULTS: dict[str, tuple[str, str]] = {
    "a stage is filled before it is empty": ("hd=64,t=17,s_k=900", r"mbarrier\.try_wait[^\n]*\[%k_empty_at[^\n]*"),
    "warps are added up before they have stored": ("hd=64,t=1,s_k=200", r"bar\.sync 0;"),
    "weights of parts are read before they are stored": ("hd=128,t=1,s_k=1100", r"bar\.sync 0;  // the weights[^\n]*"),
    "P is read before it is whole": ("hd=512,t=2,s_k=200", r"bar\.sync 2, 256;"),
    "P is stored without a proxy fence": ("hd=512,t=2,s_k=200", r"fence\.proxy\.async\.shared::cta;"),
    "maxima are read before they are shown": ("hd=512,t=2,s_k=200", r"bar\.sync 1, 256;"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_on_sm_90a_is_noticed(name: str) -> None:
    text, pattern = FAULTS[name]
    case = spec_of("fmha").parse_case(f"fmha:{text}")
    program = BACKEND.build(case, "sm_90a")
    faulty = replace(program, ptx=re.sub(pattern, "", program.ptx))
    assert faulty.ptx != program.ptx, f"{name}: the kernel has no such instruction any more"
    guarded = GuardedCase(spec_of("fmha"), case, load_executor("vm"))
    noticed = any(guarded.run(faulty, RunOptions(schedule=schedule)).fault() for schedule in SCHEDULES)
    assert noticed, f"{name}: no schedule of {', '.join(SCHEDULES)} noticed"


# A partial key tile; rows of several heads in one tile; rows that see no key of a part; more queries than the rule
# splits.
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

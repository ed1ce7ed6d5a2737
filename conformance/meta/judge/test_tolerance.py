"""What `compare` fails, says and names for tensors of no particular op, and which planted faults it must catch."""

from __future__ import annotations

import math
import random
import re
from dataclasses import dataclass
from functools import lru_cache

import pytest
import torch

from conformance.fakes.fmha import FAULTS, Style, emulate, styles
from megamoe.contract import AxisValue, Case
from megamoe.judge.arena import POISON
from megamoe.judge.tolerance import Judgement, compare
from megamoe.ops import fmha, reference
from megamoe.spec.load import load_specs

CASE = Case("blend", (("rows", 48), ("columns", 64)), "normal", 0, "blend:rows=48,columns=64")
AXES = {"y": ("expert", "rows", "columns")}


@dataclass(frozen=True)
class Bars:
    cosine: float = 0.999996
    noise_ratio: float = 2.0


def exact(shape: tuple[int, ...] = (2, 48, 64), seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def verdict(actual: torch.Tensor, oracle: torch.Tensor, published: bool = False) -> Judgement:
    simulated = oracle.to(actual.dtype) if actual.shape == oracle.shape else oracle.bfloat16()
    return compare(CASE, {"y": actual}, {"y": oracle}, {"y": simulated}, Bars(), published, axes=AXES)


@pytest.mark.parametrize("scale", [2.0**-120, 1.0, 2.0**100])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_rounded_oracle_passes(dtype: torch.dtype, scale: float) -> None:
    if dtype == torch.float16 and scale != 1.0:
        scale = 2.0**-10 if scale < 1 else 2.0**10
    oracle = exact() * scale
    result = verdict(oracle.to(dtype), oracle)
    assert result.passed, f"the nearest {dtype} of everything must pass: {result.sentence}"
    assert result.sentence == "", "a pass has no sentence"
    assert result.worst is None, "a pass has no worst coordinate"


@pytest.mark.parametrize("scale", [2.0**-100, 1.0, 2.0**100])
def test_a_uniform_error_of_one_percent_fails_at_every_magnitude(scale: float) -> None:
    oracle = exact() * scale
    result = verdict((oracle * 1.01).bfloat16(), oracle)
    assert not result.passed, f"1 % too large at magnitude {scale} must fail: {result.metrics}"
    says = r"rms error [\d.e-]+, relative to the rms of each row, is .* row error .*, relative to the rms of its row"
    assert re.search(says, result.sentence), result.sentence


def test_one_ulp_on_a_small_tensor_passes_even_if_the_simulated_reference_is_exact() -> None:
    oracle = exact((1, 1, 64)).bfloat16().double()
    one_ulp_off = torch.nextafter(oracle.bfloat16(), torch.full_like(oracle.bfloat16(), 9.0))
    assert verdict(one_ulp_off, oracle).passed, "an exact simulated reference must not ask a kernel for exactness"


def test_one_ulp_on_a_large_tensor_fails() -> None:
    oracle = exact((2, 128, 64)).bfloat16().double()
    one_ulp_off = torch.nextafter(oracle.bfloat16(), torch.full_like(oracle.bfloat16(), 9.0))
    assert not verdict(one_ulp_off, oracle).passed, "a bias of one ulp in 256 rows is no rounding"


def test_noise_ratio_scales_the_bar() -> None:
    oracle, noise = exact(), 0.01 * exact(seed=1)
    simulated = {"y": (oracle + noise).float()}

    def passes(factor: float, ratio: float) -> bool:
        actual = {"y": (oracle + factor * noise).float()}
        return compare(CASE, actual, {"y": oracle}, simulated, Bars(noise_ratio=ratio), False).passed

    assert passes(1.9, 2.0), "1.9 times the noise of the simulated reference is within a ratio of 2"
    assert not passes(2.1, 2.0), "2.1 times it is not"
    assert passes(2.1, 3.0), "but within a ratio of 3"


def test_one_wrong_element_is_found_and_named() -> None:
    oracle = exact()
    actual = oracle.bfloat16()
    actual[1, 17, 5] = 7.5
    result = verdict(actual, oracle)
    assert result.worst is not None, "a failure has a worst coordinate"
    assert result.worst.coordinate == (("expert", 1), ("rows", 17), ("columns", 5))
    assert (result.worst.seen, result.worst.expected) == (7.5, float(oracle[1, 17, 5]))
    for part in (CASE.id, "tensor y", "expert=1, rows=17, columns=5: seen 7.5, expected", "1 of 6,144 elements"):
        assert part in result.sentence, f"the sentence must say {part!r}: {result.sentence}"


@pytest.mark.parametrize(
    ("where", "clause"),
    [
        ((0, slice(None), slice(None)), "all in expert=0"),
        ((slice(None), slice(32, 48), slice(None)), "all in rows 32..47 of 48"),
        ((slice(None), slice(None), slice(3, None, 8)), "all in columns 3..59 in steps of 8 of 64"),
        ((1, 5, slice(0, 16)), "all in expert=1, rows=5, columns 0..15 of 64"),
    ],
)
def test_the_sentence_says_where_the_errors_are(where: tuple[int | slice, ...], clause: str) -> None:
    oracle = exact()
    actual = oracle.bfloat16()
    actual[where] = actual[where] + 3.0
    sentence = verdict(actual, oracle).sentence
    assert clause in sentence, f"expected {clause!r} in: {sentence}"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_fails_where_the_oracle_is_finite(value: float) -> None:
    actual = exact().bfloat16()
    actual[0, 3, 9] = value
    result = verdict(actual, exact())
    assert not result.passed, f"{value} must fail"
    assert "expert=0, rows=3, columns=9" in result.sentence, result.sentence


def test_infinities_and_nans_are_compared_by_place_and_sign() -> None:
    oracle = exact()
    oracle[0, 0, 0], oracle[0, 0, 1], oracle[0, 0, 2] = math.inf, -math.inf, math.nan
    assert verdict(oracle.bfloat16(), oracle).passed, "the same places and signs must pass"
    for place, value in ((0, -math.inf), (0, 1.0), (1, math.nan), (2, math.inf), (2, 0.0)):
        actual = oracle.bfloat16()
        actual[0, 0, place] = value
        assert not verdict(actual, oracle).passed, f"{value} instead of {oracle[0, 0, place]} must fail"


def test_overflow_to_infinity_is_right_where_the_rounded_oracle_overflows() -> None:
    oracle = exact((1, 4, 64))
    oracle[0, 1, 2] = 1e6
    actual = oracle.half()
    assert verdict(actual, oracle).passed, "1e6 is infinite in f16"
    actual[0, 1, 2] = 65504.0
    assert not verdict(actual, oracle).passed, "a saturated value is not infinity"


def test_an_unwritten_output_is_called_so() -> None:
    actual = exact().bfloat16()
    poison = torch.frombuffer(bytearray(POISON[torch.bfloat16] * 64), dtype=torch.bfloat16)
    actual[1, 40] = poison
    sentence = verdict(actual, exact()).sentence
    assert "64 were never written" in sentence, sentence
    assert "all in expert=1, rows=40" in sentence, sentence


def test_rows_that_must_be_zero_admit_nothing_else() -> None:
    oracle = exact()
    oracle[0, 4] = 0.0
    actual = oracle.bfloat16()
    assert verdict(actual, oracle).passed, "zeros must pass"
    actual[0, 4, 7] = 1e-30
    assert not verdict(actual, oracle).passed, "1e-30 in a row of zeros must fail: nothing excuses it"


def test_the_cosine_bar_holds_on_published_cells_alone() -> None:
    oracle = exact()
    actual = (oracle + 0.0035 * exact(seed=1)).bfloat16()
    free, published = verdict(actual, oracle), verdict(actual, oracle, published=True)
    assert free.metrics["y.cosine"] < 0.999996, "the example must be below the bar"
    assert not published.passed, "a published cell must be held to the cosine"
    assert "is below the published 0.999996" in published.sentence, published.sentence
    assert "cosine" not in free.sentence, f"only published cells are held to the cosine: {free.sentence}"


def test_the_cosine_of_tiny_numbers_is_not_lost() -> None:
    oracle = exact() * 2.0**-124
    assert verdict(oracle.float(), oracle, published=True).metrics["y.cosine"] > 0.9999999


def test_an_absolute_scale_replaces_a_vanishing_one() -> None:
    oracle = {"y": torch.tensor([[1e-6]], dtype=torch.float64)}
    actual, simulated = {"y": torch.tensor([[2e-6]])}, {"y": torch.tensor([[1e-6]])}

    def passes(scale: float) -> bool:
        return compare(CASE, actual, oracle, simulated, Bars(), False, absolute_scale={"y": scale}).passed

    assert not passes(0.0), "twice the value is wrong in relative terms"
    assert passes(1.0), "an error of 1e-6 is noise where the unit is 1"
    assert not passes(0.01), "and is not where the unit is 0.01"


@pytest.mark.parametrize(
    ("actual", "clause"),
    [
        ({}, "do not have it"),
        ({"y": torch.zeros(2, 48, 63).bfloat16()}, r"shape (2, 48, 63); the reference has (2, 48, 64)"),
        ({"y": torch.zeros(2, 48, 64)}, "dtype torch.float32; the reference has torch.bfloat16"),
        ({"y": exact().bfloat16(), "z": torch.zeros(1)}, "tensor z: the reference does not have it"),
    ],
)
def test_what_cannot_be_compared_fails(actual: dict[str, torch.Tensor], clause: str) -> None:
    result = compare(CASE, actual, {"y": exact()}, {"y": exact().bfloat16()}, Bars(), False)
    assert not result.passed, "what cannot be compared must not pass"
    assert clause in result.sentence, f"expected {clause!r} in: {result.sentence}"


def test_zero_elements_compared_is_a_failure() -> None:
    empty = torch.zeros(0, 64, dtype=torch.float64)
    result = compare(CASE, {"y": empty.bfloat16()}, {"y": empty}, {"y": empty.bfloat16()}, Bars(), False)
    assert "zero elements compared" in result.sentence, result.sentence
    assert not compare(CASE, {}, {}, {}, Bars(), False).passed, "no output at all must fail"


def test_an_unknown_dtype_fails_in_words() -> None:
    codes = torch.ones(4, 4, dtype=torch.uint8)
    result = compare(CASE, {"y": codes}, {"y": codes.double()}, {"y": codes}, Bars(), False)
    assert "dtype torch.uint8 has no floor" in result.sentence, result.sentence


def test_metrics_are_finite_numbers_with_their_bars() -> None:
    metrics = verdict(exact().bfloat16(), exact()).metrics
    wanted = {f"y.{error}{bar}" for error in ("rms", "row", "max", "bias") for bar in ("", ".bar")} | {"y.cosine"}
    assert set(metrics) == wanted, "records and reports rely on these names"
    assert all(math.isfinite(value) for value in metrics.values()), f"a metric is not finite: {metrics}"


def test_a_scalar_output_can_be_compared() -> None:
    oracle = torch.tensor(3.0, dtype=torch.float64)
    simulated = {"y": oracle.float()}
    assert compare(CASE, {"y": oracle.float()}, {"y": oracle}, simulated, Bars(), True).passed
    wrong = compare(CASE, {"y": torch.tensor(3.1)}, {"y": oracle}, simulated, Bars(), False)
    assert "seen 3.1, expected 3" in wrong.sentence, wrong.sentence


def test_rows_without_an_expectation_do_not_dilute_the_rms() -> None:
    """40 rows that are 0.6 % too large get the same verdict and errors alone as among 472 rows of padding."""
    oracle = exact((40, 64))
    padded = torch.cat((oracle, torch.zeros(472, 64, dtype=torch.float64)))
    free = (torch.arange(512) >= 40)[:, None].expand(-1, 64)
    alone = compare(CASE, {"y": (oracle * 1.006).bfloat16()}, {"y": oracle}, {"y": oracle.bfloat16()}, Bars(), False)
    among = compare(
        CASE,
        {"y": torch.where(free, math.nan, padded * 1.006).bfloat16()},
        {"y": padded},
        {"y": padded.bfloat16()},
        Bars(),
        False,
        free={"y": free},
    )
    assert not alone.passed, f"the example must be above a bar: {alone.metrics}"
    assert not among.passed, f"padding hides the error: {among.metrics}"
    for name in ("y.rms", "y.rms.bar", "y.row", "y.max"):
        assert among.metrics[name] == pytest.approx(alone.metrics[name]), f"{name} depends on the amount of padding"


def test_an_output_of_padding_alone_has_no_error() -> None:
    nothing = torch.zeros(128, 64, dtype=torch.float64)
    free = {"y": torch.ones(128, 64, dtype=torch.bool)}
    seen = {"y": torch.full((128, 64), math.nan).bfloat16()}
    result = compare(CASE, seen, {"y": nothing}, {"y": nothing.bfloat16()}, Bars(), False, free=free)
    assert result.passed, f"a rank without a route owes no row: {result.sentence}"


def test_a_fault_among_padding_is_named_by_its_place_in_the_output() -> None:
    oracle = exact((512, 64))
    free = (torch.arange(512) % 128 >= 3)[:, None].expand(-1, 64)
    seen = oracle.bfloat16()
    assert compare(CASE, {"y": seen}, {"y": oracle}, {"y": seen}, Bars(), False, free={"y": free}).passed
    wrong = torch.where(free, math.nan, seen.double()).bfloat16()
    wrong[257, 5] = 100.0
    result = compare(
        CASE, {"y": wrong}, {"y": oracle}, {"y": seen}, Bars(), False, axes={"y": ("r", "c")}, free={"y": free}
    )
    assert not result.passed, "row 257 is wrong, and is no padding"
    assert result.worst is not None, result.sentence
    assert result.worst.coordinate == (("r", 257), ("c", 5)), f"it is y[257, 5]: {result.sentence}"


def test_padding_is_in_no_metric() -> None:
    """Simulated padding rows may hold anything, as the kernel's do: they enter no error, cosine, sentence or place."""
    oracle = exact((4, 128, 64))
    free = (torch.arange(128) >= 3).expand(4, 128)[..., None].expand(-1, -1, 64)
    axes = {"y": ("expert", "rows", "columns")}
    simulated = torch.where(free, 1e6, oracle).bfloat16()
    wrong = simulated.clone()
    wrong[2, 1] *= 1.5
    for seen, passes in ((simulated, True), (wrong, False)):
        among = compare(CASE, {"y": seen}, {"y": oracle}, {"y": simulated}, Bars(), True, axes=axes, free={"y": free})
        held = ~free[..., 0]
        alone = compare(CASE, {"y": seen[held]}, {"y": oracle[held]}, {"y": simulated[held]}, Bars(), True)
        assert among.passed == alone.passed == passes, f"{among.sentence}{alone.sentence}"
        assert among.metrics == pytest.approx(alone.metrics), "padding is in a metric"
    assert among.worst is not None
    assert among.worst.coordinate[:2] == (("expert", 2), ("rows", 1)), f"it is y[2, 1]: {among.sentence}"
    assert alone.worst is not None
    assert (among.worst.seen, among.worst.expected) == (alone.worst.seen, alone.worst.expected)
    assert "all in expert=2, rows=1" in among.sentence, among.sentence


@pytest.mark.parametrize("shape", [(128, 64), (2, 3, 8), (64,), ()], ids=str)
def test_an_output_of_padding_alone_is_right_whatever_the_reference_has_there(shape: tuple[int, ...]) -> None:
    nothing, anything = torch.zeros(shape, dtype=torch.float64), torch.full(shape, 7.0).bfloat16()
    free = {"y": torch.ones(shape, dtype=torch.bool)}
    result = compare(CASE, {"y": anything}, {"y": nothing}, {"y": anything}, Bars(), True, free=free)
    assert result.passed, result.sentence
    assert (result.metrics["y.max"], result.metrics["y.cosine"]) == (0.0, 1.0)


def test_a_value_that_is_not_finite_among_padding_is_named_by_its_place() -> None:
    oracle = exact((512, 64))
    free = (torch.arange(512) % 128 >= 3)[:, None].expand(-1, 64)
    seen = oracle.bfloat16()
    seen[257, 5] = math.inf
    result = compare(
        CASE,
        {"y": seen},
        {"y": oracle},
        {"y": oracle.bfloat16()},
        Bars(),
        False,
        axes={"y": ("r", "c")},
        free={"y": free},
    )
    assert "all in r=257, c=5" in result.sentence, result.sentence
    assert "first at r=257, c=5: seen inf" in result.sentence, result.sentence


SPEC = load_specs()["fmha"]
FMHA = reference("fmha")
Outputs = dict[str, torch.Tensor]

RAGGED = "fmha:hd=64,t=32,s_k=300,heads=4,kv_heads=2"
MASKED = "fmha:hd=64,t=32,s_k=300,heads=4,kv_heads=2,causal=true,window=100"
CAUSAL = "fmha:hd=128,t=16,s_k=200,causal=true"
DECODE = "fmha:hd=128,t=1,s_k=200,heads=8,kv_heads=2"
CELL = "fmha:hd=64,t=4,s_k=512"
SMALL = "fmha:hd=64,t=1,s_k=5"
PREFILL = "fmha:hd=64,t=128,s_k=128,causal=true"
SINKS = "fmha:hd=64,t=32,s_k=300,heads=4,kv_heads=2,sinks=true,kv=latent"
LENGTHS = "fmha:hd=64,t=8,s_k=200,batch=3,heads=2,causal=true,ragged=true,total_q=20,total_k=450"
PAGES = "fmha:hd=64,t=8,s_k=200,batch=3,heads=2,causal=true,ragged=true,total_q=20,total_k=640,page_size=16"


@dataclass(frozen=True, slots=True)
class Kill:
    """Each tensor of `by`, judged alone, must catch `fault` on `case`."""

    fault: str
    case: str
    by: tuple[str, ...] = ("o",)

    def __str__(self) -> str:
        return f"{self.fault}-{self.case}"


KILLS = (
    *(Kill("scale_1_percent", case, ("o", "lse")) for case in (RAGGED, MASKED, CAUSAL, DECODE)),
    Kill("scale_1_percent", CELL, ("o", "lse")),
    Kill("scale_1_percent", SMALL, ("lse",)),
    *(Kill("key_dropped", case, ("o", "lse")) for case in (RAGGED, MASKED, CAUSAL, DECODE, CELL, SMALL)),
    Kill("key_past_s_k", SMALL, ("o", "lse")),
    *(Kill("key_past_s_k", case, ("lse",)) for case in (RAGGED, DECODE, CELL)),
    *(Kill("key_past_s_k", f"{case},inputs=large_logits", ("o", "lse")) for case in (RAGGED, DECODE, CELL)),
    *(Kill("last_tile_unmasked", case, ("o", "lse")) for case in (RAGGED, DECODE, SMALL)),
    *(Kill("mask_off_by_one", case, ("o", "lse")) for case in (MASKED, CAUSAL)),
    *(Kill("rows_swapped", case, ("o",)) for case in (RAGGED, MASKED, CAUSAL, CELL)),
    *(Kill("lse_base_2", case, ("lse",)) for case in (RAGGED, MASKED, CAUSAL, DECODE, CELL, SMALL)),
    *(Kill("lse_of_rounded_p", case, ("lse",)) for case in (RAGGED, MASKED, CAUSAL, DECODE, CELL, SMALL)),
    *(Kill("kv_head_modulo", case, ("o", "lse")) for case in (RAGGED, MASKED, DECODE)),
    Kill("bf16_accumulation", "fmha:hd=64,t=32,s_k=512"),
    Kill("bf16_accumulation", "fmha:hd=64,t=4,s_k=1024"),
    *(Kill("no_rescale", case, ("o", "lse")) for case in (RAGGED, MASKED, CELL)),
    Kill("no_row_maximum", f"{MASKED},inputs=large_logits", ("o", "lse")),
    Kill("no_row_maximum", f"{SMALL},inputs=large_logits", ("o", "lse")),
    *(Kill("v_blocks_swapped", case) for case in (RAGGED, DECODE, CELL)),
    Kill("v_blocks_swapped", f"{RAGGED},inputs=one_hot_rows"),
    *(Kill("fp8_p", case) for case in (RAGGED, MASKED, CAUSAL, DECODE, CELL, SMALL)),
    *(Kill("truncated_p", case) for case in (RAGGED, MASKED, CAUSAL, DECODE, PREFILL)),
    *(Kill("truncated_o", case) for case in (RAGGED, MASKED, CAUSAL, DECODE, PREFILL)),
    *(Kill("last_column_unwritten", case) for case in (RAGGED, DECODE, SMALL)),
    *(Kill("flush_to_zero", f"{case},inputs=denormal_scale") for case in (RAGGED, DECODE, CELL)),
    *(Kill(f"sink_{how}", SINKS, ("o", "lse")) for how in ("ignored", "scaled", "of_kv_head")),
    *(Kill(fault, PAGES, ("o", "lse")) for fault in ("table_ignored", "next_page", "page_read_to_its_end")),
    *(Kill(fault, LENGTHS, ("o", "lse")) for fault in ("longest_length", "queries_at_the_end")),
    *(Kill("one_wrong_element", case) for case in (RAGGED, MASKED, CAUSAL, DECODE, CELL, SMALL)),
)


@lru_cache(maxsize=32)
def references(case: Case) -> tuple[Outputs, Outputs, Outputs]:
    inputs = FMHA.make_inputs(case)
    return inputs, FMHA.oracle(case, inputs), FMHA.simulated(case, inputs)


def judged(case: Case, outputs: Outputs, by: str | None = None) -> Judgement:
    """The verdict on all outputs, or on the output `by` alone."""
    _, oracle, simulated = references(case)
    if by is not None:
        outputs, oracle, simulated = ({by: found[by]} for found in (outputs, oracle, simulated))
    axes = {name: tensor.shape for name, tensor in SPEC.tensors_of(case).items()}
    return compare(
        case, outputs, oracle, simulated, SPEC.tolerance, False, axes=axes, absolute_scale=FMHA.ABSOLUTE_SCALE
    )


@pytest.mark.parametrize("kill", KILLS, ids=str)
def test_planted_fault_is_caught(kill: Kill) -> None:
    case = SPEC.parse_case(kill.case)
    outputs = emulate(case, references(case)[0], Style(tile=64), kill.fault)
    for tensor in kill.by:
        verdict = judged(case, outputs, tensor)
        assert not verdict.passed, f"{kill.case}: {tensor} passes although {FAULTS[kill.fault]}: {verdict.metrics}"


def test_every_fault_is_caught_somewhere() -> None:
    assert {kill.fault for kill in KILLS} == set(FAULTS), (
        "a planted fault without a case that must catch it proves nothing"
    )


@pytest.mark.parametrize("case_id", sorted({kill.case for kill in KILLS}))
def test_the_same_kernels_pass_without_the_fault(case_id: str) -> None:
    case = SPEC.parse_case(case_id)
    for style in (Style(tile=64), *styles(seed=0)):
        verdict = judged(case, emulate(case, references(case)[0], style))
        assert verdict.passed, f"{style}: {verdict.sentence}"


def drawn_case(choice: random.Random) -> Case:
    kv_heads = choice.choice([1, 1, 2])
    axes: dict[str, AxisValue] = {
        "hd": choice.choice([64, 64, 64, 128, 512]),
        "t": choice.choice([1, 1, 2, 3, 17, 40]),
        "s_k": choice.choice([1, 2, 3, 4, 7, 16, 33, 100, 129, 300]),
        "batch": choice.choice([1, 1, 2]),
        "heads": kv_heads * choice.choice([1, 2]),
        "kv_heads": kv_heads,
        "causal": choice.random() < 0.4,
        "window": choice.choice([None, None, 1, 2, 5, 60]),
        "scale": choice.choice([None, None, 1.0, 0.05, 0.3]),
    }
    return SPEC.case(inputs=choice.choice(SPEC.inputs), seed=choice.randrange(10**6), **axes)


@pytest.mark.parametrize("draw", range(8))
def test_legal_kernels_pass_on_drawn_shapes(draw: int) -> None:
    """No false alarm for other tile sizes and orders, a stale maximum, exp2 off by 2 ulps, or truncating
    accumulation."""
    choice = random.Random(draw)
    for _ in range(12):
        case = drawn_case(choice)
        for style in styles(choice.randrange(10**6)):
            verdict = judged(case, emulate(case, references(case)[0], style))
            assert verdict.passed, f"{style} is legal: {verdict.sentence}"


EXACT = tuple(f"{case},inputs={inputs}" for inputs in fmha.EXACT for case in (RAGGED, MASKED, CAUSAL, DECODE, SMALL))


def judged_with_latitude(case: Case, outputs: Outputs) -> Judgement:
    inputs, oracle, simulated = references(case)
    latitude = FMHA.latitude(case, inputs, outputs, oracle)
    return compare(
        case,
        outputs,
        oracle,
        simulated,
        SPEC.tolerance,
        SPEC.published(case),
        absolute_scale=FMHA.ABSOLUTE_SCALE,
        latitude=latitude,
    )


@pytest.mark.parametrize("case_id", EXACT)
def test_what_has_one_answer_is_equal_bit_for_bit_in_every_order(case_id: str) -> None:
    """Legal kernels in any order agree. An output with one element off by one ulp does not."""
    case = SPEC.parse_case(case_id)
    for style in (Style(tile=64), *styles(seed=3)):
        outputs = emulate(case, references(case)[0], style)
        verdict = judged_with_latitude(case, outputs)
        assert verdict.passed, f"{style}: {verdict.sentence}"
        outputs["o"].view(torch.int16)[0, 0, 0, 0] ^= 1
        assert not judged_with_latitude(case, outputs).passed, f"{style}: one ulp off in one element passes"


@pytest.mark.parametrize("fault", ["rows_swapped", "v_blocks_swapped", "kv_head_modulo", "last_column_unwritten"])
def test_exact_sums_show_what_is_wrong(fault: str) -> None:
    case = SPEC.parse_case(EXACT[0])
    outputs = emulate(case, references(case)[0], Style(tile=64), fault)
    assert not judged_with_latitude(case, outputs).passed, f"o passes although {FAULTS[fault]}"


def test_lone_keys_show_one_truncated_column() -> None:
    """Where sums have many terms, this is one error among many. A reciprocal is off by one fp32 ulp."""
    for inputs, shown in (("normal", False), ("lone_keys", True)):
        case = SPEC.parse_case(f"{RAGGED},inputs={inputs}")
        outputs = emulate(case, references(case)[0], Style(tile=64))
        o = (outputs["o"].double() * (1 - 2.0**-23)).float()
        outputs["o"] = o.bfloat16()
        assert judged_with_latitude(case, outputs).passed, f"{inputs}: what is rounded to nearest fails"
        outputs["o"][..., 5] = (o.view(torch.int32) & -65536).view(torch.float32).bfloat16()[..., 5]
        verdict = judged_with_latitude(case, outputs)
        assert verdict.passed != shown, f"{inputs}: {verdict.sentence or 'passes'}"


@pytest.mark.parametrize("hd", [64, 128, 256, 512])
def test_the_cosine_bar_can_be_met_on_published_cells(hd: int) -> None:
    """The simulated reference clears the published bar; t = 1 is closest to it."""
    for t, s_k in ((1, 128), (1, 256), (1, 384), (1, 512), (1, 1024), (4, 128), (32, 512)):
        case = SPEC.case(hd=hd, t=t, s_k=s_k)
        assert SPEC.published(case), f"{case.id} must be a published cell"
        _, oracle, simulated = references(case)
        verdict = compare(case, simulated, oracle, simulated, SPEC.tolerance, True)
        assert verdict.passed, verdict.sentence


def test_no_seed_fails_the_simulated_reference() -> None:
    """An audit draws any seed: the cosine of 64 elements, 0.999995983 with this one, must not fail a kernel."""
    case = SPEC.case(hd=64, t=1, s_k=128, seed=1664296576)
    verdict = judged_with_latitude(case, references(case)[2])
    assert verdict.metrics["o.cosine"] < SPEC.tolerance.cosine, "this seed must be one that the bar would have failed"
    assert verdict.passed, verdict.sentence

"""Laws of the FMHA references, written out here as loops, unlike the references' own computation."""

from __future__ import annotations

import math

import pytest
import torch

from conformance.kernels.laws.law import specs
from megamoe.contract import Case
from megamoe.ops import Reference, reference
from megamoe.ops.fmha import (
    DISTRIBUTIONS,
    SCORES,
    drawn_lengths,
    key_rows,
    lone_keys,
    one_hot_keys,
    softmax_scale,
    visible_keys,
)

SPEC = specs()["fmha"]
FMHA: Reference = reference("fmha")

CASES = (
    "fmha:hd=64,t=3,s_k=7",
    "fmha:hd=64,t=2,s_k=9,batch=2,heads=6,kv_heads=2",
    "fmha:hd=64,t=5,s_k=8,causal=true",
    "fmha:hd=64,t=6,s_k=4,causal=true",
    "fmha:hd=64,t=5,s_k=9,window=3",
    "fmha:hd=64,t=6,s_k=4,causal=true,window=2",
    "fmha:hd=64,t=2,s_k=5,scale=0.5",
    "fmha:hd=64,t=6,s_k=4,batch=2,heads=4,kv_heads=2,causal=true,sinks=true",
    "fmha:hd=64,t=3,s_k=7,heads=2,scale=0.5,sinks=true,kv=latent",
)


def values_of(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """v, or k where one latent tensor is both."""
    return inputs.get("v", inputs["k"])


def by_hand(case: Case, inputs: dict[str, torch.Tensor], b: int, h: int, i: int) -> tuple[torch.Tensor, float]:
    """o and lse of one query row, key by key, from the text of the spec."""
    q, k, v = (tensor.double() for tensor in (inputs["q"], inputs["k"], values_of(inputs)))
    kv, scale, window = h // (case.int("heads") // case.int("kv_heads")), case["scale"], case["window"]
    factor = float(scale) if scale is not None else case.int("hd") ** -0.5
    p = i + case.int("s_k") - case.int("t")
    numerator, denominator = torch.zeros(case.int("hd"), dtype=torch.float64), 0.0
    if case["sinks"]:
        denominator = math.exp(inputs["sink"][h])
    for j in range(case.int("s_k")):
        if (case["causal"] and j > p) or (window is not None and j <= p - int(window)):
            continue
        weight = math.exp(factor * float((q[b, h, i] * k[b, kv, j]).sum()))
        numerator, denominator = numerator + weight * v[b, kv, j], denominator + weight
    return (numerator / denominator, math.log(denominator)) if denominator else (numerator, -math.inf)


@pytest.mark.parametrize("case_id", CASES)
def test_oracle_is_the_sum_over_visible_keys(case_id: str) -> None:
    case = SPEC.parse_case(case_id)
    inputs = FMHA.make_inputs(case)
    result = FMHA.oracle(case, inputs)
    for index in torch.cartesian_prod(*(torch.arange(case.int(axis)) for axis in ("batch", "heads", "t"))).tolist():
        o, lse = by_hand(case, inputs, *index)
        at = tuple(index)
        assert torch.allclose(result["o"][at], o, rtol=1e-12, atol=1e-14), f"{case.id}: o of row {at} is off"
        assert result["lse"][at].item() == pytest.approx(lse, rel=1e-13), f"{case.id}: lse of row {at} is off"


@pytest.mark.parametrize("inputs", DISTRIBUTIONS)
@pytest.mark.parametrize("case_id", CASES)
def test_outputs_have_the_shapes_and_dtypes_of_the_spec(case_id: str, inputs: str) -> None:
    case = SPEC.vary(SPEC.parse_case(case_id), inputs=inputs)
    tensors = FMHA.make_inputs(case)
    outputs = FMHA.simulated(case, tensors)
    dtypes = {"bf16": torch.bfloat16, "f32": torch.float32}
    for name, spec in SPEC.tensors_of(case).items():
        tensor = tensors[name] if spec.role == "input" else outputs[name]
        assert tuple(tensor.shape) == SPEC.shape(name, case), f"{case.id}: {name} has the wrong shape"
        assert tensor.dtype == dtypes[spec.dtype], f"{case.id}: {name} has dtype {tensor.dtype}"
    assert all(bool(torch.isfinite(tensors[name]).all()) for name in tensors), f"{case.id}: an input is not finite"


def test_a_row_without_visible_keys_is_zero_and_minus_infinity() -> None:
    case = SPEC.case(hd=64, t=6, s_k=4, causal=True)
    inputs = FMHA.make_inputs(case)
    for name, outputs in (("oracle", FMHA.oracle(case, inputs)), ("simulated", FMHA.simulated(case, inputs))):
        assert not outputs["o"][0, 0, :2].any(), f"{name}: rows 0 and 1 see no key, so o must be 0 there"
        assert bool((outputs["lse"][0, 0, :2] == -math.inf).all()), f"{name}: their lse must be -inf"
        assert bool(torch.isfinite(outputs["lse"][0, 0, 2:]).all()), f"{name}: row 2 and later see a key"


@pytest.mark.parametrize("page", [0, 16])
@pytest.mark.parametrize("inputs", DISTRIBUTIONS)
def test_ragged_inputs_are_sequences_and_nan_elsewhere(inputs: str, page: int) -> None:
    """Lengths add up and every key has its own row. What belongs to no sequence is NaN, and no table entry names it."""
    case = SPEC.case(
        hd=64, t=4, s_k=40, batch=4, heads=4, kv_heads=2, ragged=True, inputs=inputs,
        total_q=9, total_k=160 if page else 61, page_size=page,
    )  # fmt: skip
    tensors = FMHA.make_inputs(case)
    queries, keys = drawn_lengths(case)
    assert tensors["cu_seqlens_q"].diff().tolist() == queries, (
        f"{case.id}: lengths {queries} are not those of the tensor"
    )
    assert sum(queries) == 9, f"{case.id}: {queries} are not all query rows"
    assert max(queries) == 4, f"{case.id}: no sequence of {queries} is as long as may be"
    assert max(keys) == 40, f"{case.id}: no sequence of {keys} is as long as may be"
    rows = torch.cat([key_rows(case, tensors, number) for number in range(4)])
    assert len(rows) == sum(keys) == len(rows.unique()), f"{case.id}: sequences share rows of k"
    for name in ("k", "v"):
        written = torch.isfinite(tensors[name]).all(dim=-1).all(dim=-1)
        assert written[rows].all(), f"{case.id}: a key of a sequence is not finite in {name}"
        assert int(written.sum()) == len(rows), f"{case.id}: {name} is a number where nothing may be read"
    if page:
        used = (tensors["block_table"] >= 0).sum(dim=1).tolist()
        assert used == [-(-s_k // page) for s_k in keys], f"{case.id}: entries {used} for {keys} keys"


@pytest.mark.parametrize("page", [0, 16])
def test_a_ragged_oracle_is_by_hand_too(page: int) -> None:
    case = SPEC.case(
        hd=64, t=4, s_k=11, batch=3, heads=2, causal=True, sinks=True, ragged=True,
        total_q=7, total_k=64 if page else 19, page_size=page,
    )  # fmt: skip
    inputs = FMHA.make_inputs(case)
    result, (queries, keys) = FMHA.oracle(case, inputs), drawn_lengths(case)
    starts = inputs["cu_seqlens_q"].tolist()
    for number, (t, s_k) in enumerate(zip(queries, keys, strict=True)):
        if not t or not s_k:
            continue
        alone = SPEC.case(hd=64, t=t, s_k=s_k, heads=2, causal=True, sinks=True)
        rows = key_rows(case, inputs, number)
        own = {name: inputs[name][rows].transpose(0, 1)[None] for name in ("k", "v")}
        own |= {"q": inputs["q"][starts[number] : starts[number + 1]].transpose(0, 1)[None], "sink": inputs["sink"]}
        for h in range(2):
            for i in range(t):
                o, lse = by_hand(alone, own, 0, h, i)
                at = (starts[number] + i, h)
                assert torch.allclose(result["o"][at], o, rtol=1e-12, atol=1e-14), f"{case.id}: o of row {at} is off"
                assert result["lse"][at].item() == pytest.approx(lse, rel=1e-13), f"{case.id}: lse of row {at} is off"


def test_a_sequence_without_keys_is_zero_and_its_sink() -> None:
    case = SPEC.case(hd=64, t=2, s_k=3, batch=2, ragged=True, total_q=4, total_k=3, sinks=True)
    inputs = FMHA.make_inputs(case) | {"cu_seqlens_k": torch.tensor([0, 3, 3], dtype=torch.int32)}
    for name, outputs in (("oracle", FMHA.oracle(case, inputs)), ("simulated", FMHA.simulated(case, inputs))):
        assert not outputs["o"][2:].any(), f"{name}: o of a sequence without keys must be 0"
        assert (outputs["lse"][2:] == inputs["sink"]).all(), f"{name}: its lse must be the sink"


def test_a_sink_takes_its_share_of_every_row() -> None:
    """o without a sink, times the keys' share. A row that sees no key has the sink as its lse."""
    case = SPEC.case(hd=64, t=6, s_k=4, heads=2, causal=True, sinks=True)
    inputs = FMHA.make_inputs(case)
    plain = FMHA.oracle(SPEC.vary(case, sinks=False), inputs)
    for name, outputs in (("oracle", FMHA.oracle(case, inputs)), ("simulated", FMHA.simulated(case, inputs))):
        lse = torch.logaddexp(plain["lse"], inputs["sink"].double()[:, None])
        assert torch.allclose(outputs["lse"].double(), lse, atol=1e-6), f"{name}: lse does not count the sink"
        seen = outputs["lse"][0, :, 0].float()
        assert torch.allclose(seen, inputs["sink"], atol=1e-6), f"{name}: row 0 sees the sink alone; its lse is {seen}"
        share = (plain["lse"] - lse).exp()[..., None]
        assert torch.allclose(outputs["o"].double(), plain["o"] * share, atol=0.02), f"{name}: o has another share"


def test_lse_is_left_out_when_the_case_says_so() -> None:
    case = SPEC.case(hd=64, t=1, s_k=4, lse=False)
    inputs = FMHA.make_inputs(case)
    assert set(FMHA.oracle(case, inputs)) == set(FMHA.simulated(case, inputs)) == {"o"}, f"{case.id} has o alone"


def test_blocks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    case = SPEC.case(hd=64, t=7, s_k=40, heads=4, kv_heads=2, causal=True)
    inputs = FMHA.make_inputs(case)
    whole = FMHA.oracle(case, inputs)
    monkeypatch.setattr("megamoe.ops.fmha.SCORES", 3 * 40)
    blocks = FMHA.oracle(case, inputs)
    assert SCORES > 14 * 40, "the first oracle must have been computed in one block"
    for name in whole:
        assert torch.allclose(whole[name], blocks[name], rtol=1e-13), f"{name} depends on how rows are blocked"


@pytest.mark.parametrize("inputs", DISTRIBUTIONS)
def test_simulated_is_as_near_as_bf16_allows(inputs: str) -> None:
    case = SPEC.case(hd=128, t=16, s_k=200, inputs=inputs)
    tensors = FMHA.make_inputs(case)
    oracle, simulated = FMHA.oracle(case, tensors), FMHA.simulated(case, tensors)
    error = (simulated["o"].double() - oracle["o"]).norm() / oracle["o"].norm()
    # Subnormal bf16 has fewer significant bits. Elsewhere both roundings together stay below one ulp.
    assert error < (2.0**-5 if inputs == "denormal_scale" else 2.0**-7), f"{inputs}: o is off by {error:.3g}"
    assert (simulated["lse"] - oracle["lse"]).abs().max() < 2e-4, f"{inputs}: lse is off"


def test_simulated_rounds_p_and_keeps_the_sum() -> None:
    """Two keys with logits 0 and -d: for v = (0, 1), o is bf16(p) / (1 + p), and lse carries no bf16 error."""
    case = SPEC.case(hd=64, t=1, s_k=2, scale=1.0)
    q, k, v = torch.zeros(1, 1, 1, 64), torch.zeros(1, 1, 2, 64), torch.zeros(1, 1, 2, 64)
    q[..., 0], k[0, 0, 1, 0], v[0, 0, 1, 0] = 1.0, -0.33, 1.0
    outputs = FMHA.simulated(case, {"q": q.bfloat16(), "k": k.bfloat16(), "v": v.bfloat16()})
    p = torch.exp(k[0, 0, 1, 0].bfloat16().double())
    expected = (p.bfloat16().double() / (1 + p)).bfloat16()
    assert outputs["o"][0, 0, 0, 0] == expected, "P must be rounded to bf16, the row sum must not"
    assert outputs["lse"].item() == pytest.approx(math.log(1 + p.item()), rel=2e-7), "lse must come from the fp32 P"


@pytest.mark.parametrize("inputs", DISTRIBUTIONS)
def test_inputs_depend_on_the_case_alone(inputs: str) -> None:
    case = SPEC.case(hd=64, t=4, s_k=33, inputs=inputs, seed=5)
    torch.manual_seed(1)
    first = FMHA.make_inputs(case)
    torch.manual_seed(2)
    second, other = FMHA.make_inputs(SPEC.parse_case(case.id)), FMHA.make_inputs(SPEC.vary(case, seed=6))
    for name in first:
        assert torch.equal(first[name], second[name]), f"{inputs}: {name} differs between two draws of {case.id}"
    assert not torch.equal(first["v"], other["v"]), f"{inputs}: v is the same for seeds 5 and 6"


def test_inputs_are_pinned() -> None:
    """Records from different machines and torch versions refer to the same numbers."""
    tensors = FMHA.make_inputs(SPEC.case(hd=64, t=1, s_k=3))
    bits = {name: tensor.view(torch.int16).flatten()[:4].tolist() for name, tensor in tensors.items()}
    assert bits == PINNED, "the bits of the inputs have changed: all earlier records speak of other numbers"


PINNED = {"q": [-16547, 16150, 16197, -16628], "k": [-16474, 16109, -16608, -16476], "v": [-16523, 16027, 16387, 16403]}


@pytest.mark.parametrize("case_id", CASES)
def test_normal_is_standard(case_id: str) -> None:
    tensors = FMHA.make_inputs(SPEC.vary(SPEC.parse_case(case_id), s_k=400))
    for name in {"k", "v"} & tensors.keys():
        values = tensors[name].double()
        assert abs(values.mean().item()) < 5 / math.sqrt(values.numel()), f"{name} has mean {values.mean():.3g}"
        assert abs(values.std().item() - 1) < 5 / math.sqrt(values.numel()), f"{name} has deviation {values.std():.3g}"


@pytest.mark.parametrize("case_id", CASES)
def test_large_logits_overflow_without_a_row_maximum(case_id: str) -> None:
    case = SPEC.vary(SPEC.parse_case(case_id), inputs="large_logits", s_k=64)
    lse = FMHA.oracle(case, FMHA.make_inputs(case))["lse"]
    assert lse.max() > 88.8, f"{case.id}: no row overflows exp in fp32; the largest lse is {lse.max():.3g}"
    assert lse.numel() == 1 or lse.min() < -30, f"{case.id}: no row lies below the logit 0 of a zero-filled key"


@pytest.mark.parametrize("case_id", CASES)
def test_one_hot_rows_attend_to_the_known_key(case_id: str) -> None:
    case = SPEC.vary(SPEC.parse_case(case_id), inputs="one_hot_rows")
    inputs = FMHA.make_inputs(case)
    o, keys = FMHA.oracle(case, inputs)["o"], one_hot_keys(case)
    group = case.int("heads") // case.int("kv_heads")
    visible = visible_keys(case, torch.arange(case.int("t")))
    for b, h, i in torch.cartesian_prod(*(torch.arange(size) for size in keys.shape)).tolist():
        if visible[i].any():
            assert visible[i, keys[b, h, i]], f"{case.id}: row {i} is aimed at a key that it does not see"
            expected = values_of(inputs)[b, h // group, keys[b, h, i]].double()
            assert torch.allclose(o[b, h, i], expected, atol=1e-6), f"{case.id}: row {(b, h, i)} attends elsewhere"


@pytest.mark.parametrize("case_id", CASES)
def test_lone_keys_overflow_without_their_key_and_leave_its_value(case_id: str) -> None:
    case = SPEC.vary(SPEC.parse_case(case_id), inputs="lone_keys")
    inputs = FMHA.make_inputs(case)
    o, keys = FMHA.oracle(case, inputs)["o"], lone_keys(case)
    group = case.int("heads") // case.int("kv_heads")
    visible = visible_keys(case, torch.arange(case.int("t")))
    logits = inputs["q"].double() @ inputs["k"].repeat_interleave(group, dim=1).double().mT * softmax_scale(case)
    for b, h, i in torch.cartesian_prod(*(torch.arange(size) for size in keys.shape)).tolist():
        if visible[i].any():
            key = keys[b, h, i]
            assert visible[i, key], f"{case.id}: row {i} is aimed at a key that it does not see"
            others = logits[b, h, i, torch.arange(case.int("s_k")) != key]
            gap = float((logits[b, h, i, key] - others).min()) if len(others) else math.inf
            assert gap > 89.0, f"{case.id}: row {(b, h, i)} without its key overflows no exponential: {gap:.3g}"
            right = values_of(inputs)[b, h // group, key].double()
            assert torch.allclose(o[b, h, i], right, rtol=1e-12, atol=1e-30), f"{case.id}: row {(b, h, i)} has more"


def test_lone_keys_come_to_all_places_of_a_tile() -> None:
    case = SPEC.case(hd=128, t=128, s_k=200, inputs="lone_keys")
    keys = lone_keys(case).flatten()
    assert len(keys.unique()) == 128, f"{len(keys.unique())} keys are taken by 128 rows of 200 keys"
    assert len((keys % 64).unique()) == 64, "a column of a tile of 64 keys is nobody's"


def test_constant_v_comes_out_exactly() -> None:
    case = SPEC.case(hd=64, t=4, s_k=100, heads=4, kv_heads=2, inputs="constant_v")
    inputs = FMHA.make_inputs(case)
    constant = inputs["v"][:, :, :1].repeat_interleave(2, dim=1).double().expand(1, 4, 4, 64)
    assert torch.allclose(FMHA.oracle(case, inputs)["o"], constant, rtol=1e-12), "o must be the constant"


def test_repeated_keys_tie() -> None:
    keys = FMHA.make_inputs(SPEC.case(hd=64, t=1, s_k=50, kv_heads=2, heads=2, inputs="repeated_keys"))["k"]
    for head in range(2):
        distinct = len(torch.unique(keys[0, head].float(), dim=0))
        assert 1 < distinct <= 3, f"head {head} has {distinct} distinct keys of 50; they must tie, not be all alike"


def test_denormal_scale_has_normal_inputs_and_subnormal_outputs() -> None:
    case = SPEC.case(hd=64, t=4, s_k=100, inputs="denormal_scale")
    inputs = FMHA.make_inputs(case)
    tiny = torch.finfo(torch.bfloat16).tiny
    assert all((tensor.abs() >= tiny).all() for tensor in (inputs["k"], inputs["v"])), "k and v must be normal numbers"
    o = FMHA.simulated(case, inputs)["o"]
    share = ((o != 0) & (o.abs() < tiny)).float().mean().item()
    assert share > 0.5, f"only {share:.2f} of o is subnormal, so that flushing to zero would hardly show"


@pytest.mark.parametrize(
    ("case_id", "pairs", "seen"),
    [
        ("fmha:hd=64,t=4,s_k=10,heads=2", 40, 10),
        ("fmha:hd=64,t=4,s_k=10,heads=2,causal=true", 7 + 8 + 9 + 10, 10),
        ("fmha:hd=64,t=4,s_k=10,heads=2,causal=true,window=2", 8, 5),
        ("fmha:hd=64,t=4,s_k=2,heads=2,causal=true", 0 + 0 + 1 + 2, 2),
        ("fmha:hd=64,t=4,s_k=10,heads=2,sinks=true", 40, 10),
        ("fmha:hd=64,t=4,s_k=10,heads=2,kv=latent", 40, 10),
    ],
)
def test_work_counts_visible_keys_alone(case_id: str, pairs: int, seen: int) -> None:
    case = SPEC.parse_case(case_id)
    assert FMHA.useful_flops(case) == 2 * pairs * 4 * 64, f"{case.id}: {pairs} pairs of query and key a head"
    tensors = 1 if case["kv"] == "latent" else 2
    expected = 2 * (2 * 64 * 2 * 4) + tensors * (2 * 64 * seen) + 4 * 2 * 4 + (4 * 2 if case["sinks"] else 0)
    assert FMHA.minimum_bytes(case) == expected, f"{case.id}: q, o, {seen} keys and values, lse, sinks"

"""Laws of specs and case ids, checked on our specs; the published matrix has the published contents."""

from __future__ import annotations

import itertools
import pickle
import shlex
import subprocess
import sys

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance import ROOT
from conformance.kernels.laws.strategies import drawing_of
from megamoe.contract import AxisValue, Case
from megamoe.contract.known_names import nearest, nearest_of
from megamoe.spec.case_space import Axis
from megamoe.spec.load import load_specs
from megamoe.spec.marked_yaml import SpecError
from megamoe.spec.spec import Spec

SPECS = load_specs()
FMHA = SPECS["fmha"]
MATRICES = [pytest.param(spec, name, id=f"{op}-{name}") for op, spec in SPECS.items() for name in spec.matrices]
PROFILES = [pytest.param(spec, name, id=f"{op}-{name}") for op, spec in SPECS.items() for name in spec.profiles]
repeatable = settings(max_examples=150, deadline=None, derandomize=True, database=None)


def values(axis: Axis) -> st.SearchStrategy[AxisValue]:
    if axis.choices is not None:
        return st.sampled_from(axis.choices)
    low, high = axis.min, axis.max
    drawn = st.floats(low, high) if axis.kind == "float" else st.integers(int(low or 0), int(high or 0))
    return st.none() | drawn if axis.optional else drawn


def _totals(axes: dict[str, AxisValue]) -> dict[str, AxisValue]:
    """Adjusts a ragged case's totals to what its other axes allow."""
    batch, t, s_k, page, total_q, total_k = (
        int(axes[name] or 0) for name in ("batch", "t", "s_k", "page_size", "total_q", "total_k")
    )
    keys = page * (1 + total_k % 1000) if page else 1 + total_k % (batch * s_k)
    return {"total_q": 1 + total_q % (batch * t), "total_k": keys}


@st.composite
def cases(draw: st.DrawFn, spec: Spec) -> Case:
    axes = {name: draw(values(axis)) for name, axis in spec.axes.items()}
    if "ragged" in axes:
        axes.update(dict.fromkeys(("total_q", "total_k", "page_size"), 0) if not axes["ragged"] else _totals(axes))
    if "kv_heads" in axes and spec.admits(axes):
        axes["kv_heads"] = 1
    assert spec.admits(axes) is None, f"axes drawn from the ranges are refused: {spec.admits(axes)}"
    return spec.case(inputs=draw(st.sampled_from(spec.inputs)), seed=draw(st.integers(0, 2**63 - 1)), **axes)


@repeatable
@given(cases(FMHA))
def test_id_names_exactly_one_case(case: Case) -> None:
    assert FMHA.parse_case(case.id) == case, f"{case.id} does not come back as the case that it names"


@repeatable
@given(cases(FMHA))
def test_id_needs_no_quotes_in_a_shell(case: Case) -> None:
    assert shlex.quote(case.id).strip("'") == case.id
    assert not set(case.id) & set(" \t\n'\"\\$`!*?[]{}()<>|&;#~^"), f"{case.id} has a character that a shell interprets"


@repeatable
@given(cases(FMHA), st.randoms(use_true_random=False))
def test_id_may_spell_axes_in_any_order(case: Case, random: st.DataObject) -> None:
    op, _, rest = case.id.partition(":")
    parts = rest.split(",")
    random.shuffle(parts)  # pyright: ignore[reportAttributeAccessIssue]
    assert FMHA.parse_case(f"{op}:{','.join(parts)}") == case


def test_id_omits_defaults() -> None:
    case = FMHA.case(hd=64, t=1, s_k=128, batch=1, causal=False, window=None, lse=True, inputs="normal", seed=0)
    assert case.id == "fmha:hd=64,t=1,s_k=128"
    told = FMHA.case(hd=64, t=1, s_k=128, heads=4, causal=True, scale=1, lse=False, inputs="large_logits", seed=7)
    assert told.id == "fmha:hd=64,t=1,s_k=128,heads=4,causal=true,scale=1.0,lse=false,inputs=large_logits,seed=7"
    assert FMHA.parse_case("fmha:hd=64,t=1,s_k=128,batch=1,window=null,causal=false") == case


def test_case_survives_a_process_boundary() -> None:
    case = FMHA.case(hd=64, t=1, s_k=128, window=5)
    assert pickle.loads(pickle.dumps(case)) == case


def test_case_answers_in_sentences() -> None:
    case = FMHA.case(hd=64, t=1, s_k=128)
    assert (case["window"], case.int("s_k"), [name for name, _ in case.axes]) == (None, 128, list(FMHA.axes))
    with pytest.raises(ValueError, match=r"axis window of case fmha:\S+ is null, not an integer"):
        case.int("window")
    with pytest.raises(KeyError, match="has no axis 'sk'"):
        _ = case["sk"]


@pytest.mark.parametrize(
    ("case_id", "sentence"),
    [
        (
            "fmha",
            "'fmha' is no case id of fmha: write fmha:hd=...,t=...,s_k=..., as `megamoe list --op fmha` prints them",
        ),
        ("moe:hd=64", "'moe:hd=64' is no case id of fmha: write fmha:"),
        ("fmha:", "not of the form axis=value"),
        ("fmha:hd=64,t=1", "s_k must be given"),
        ("fmha:hd=64,t=1,s_k=128,", "not of the form axis=value"),
        ("fmha:hd=64,t=1,s_k=128,sk=1", "did you mean 's_k'?"),
        ("fmha:hd=64,t=1,s_k=128,t=2", "t is given twice"),
        ("fmha:hd=65,t=1,s_k=128", "hd=65 is outside of its limits; it must be one of 64, 128, 256, 512"),
        ("fmha:hd=64,t=0,s_k=128", "t=0 is outside of its limits; it must be 1..4096"),
        ("fmha:hd=64,t=1,s_k=128,window=0", "it must be 1..65536 or null"),
        ("fmha:hd=64,t=1.0,s_k=128", "t must be an integer, not '1.0'"),
        ("fmha:hd=64,t=1_0,s_k=128", "t must be an integer, not '1_0'"),
        ("fmha:hd=64,t=null,s_k=128", "t must be an integer, not None"),
        ("fmha:hd=64,t=1,s_k=128,causal=yes", "causal must be true or false, not 'yes'"),
        ("fmha:hd=64,t=1,s_k=128,scale=nan", "scale must be a number or null, not 'nan'"),
        ("fmha:hd=64,t=1,s_k=128,scale=1e999", "scale must be a number or null, not inf"),
        ("fmha:hd=64,t=1,s_k=128,heads=3,kv_heads=2", "breaks the constraint 'heads % kv_heads == 0'"),
        ("fmha:hd=64,t=1,s_k=128,inputs=norml", "did you mean 'normal'?"),
        ("fmha:hd=64,t=1,s_k=128,seed=-1", "seed must be an integer from 0"),
        ("fmha:hd=64,t=1,s_k=" + "9" * 5000, "s_k must be an integer"),
    ],
)
def test_bad_case_id_is_refused(case_id: str, sentence: str) -> None:
    with pytest.raises(SpecError) as caught:
        FMHA.parse_case(case_id)
    assert sentence in str(caught.value)


def test_refused_case_points_at_the_rule() -> None:
    lines = FMHA.file.read_text().splitlines()
    with pytest.raises(SpecError) as caught:
        FMHA.case(hd=64, t=5000, s_k=128)
    line = caught.value.line
    assert line is not None
    assert lines[line - 1].strip().startswith("t:"), f"line {line} does not state the limits of t"
    assert f"{FMHA.file}:{line}: axes.t: t=5000" in str(caught.value)


def test_published_matrix_has_72_cells() -> None:
    hd, t = (64, 128, 256, 512), (1, 4, 32, 128)
    grid = [f"fmha:hd={h},t={q},s_k={s}" for h, q, s in itertools.product(hd, t, (128, 256, 384, 512))]
    long = [f"fmha:hd={h},t={q},s_k=1024" for h, q in itertools.product(hd, (1, 128))]
    assert [case.id for case in FMHA.cases("grid")] == grid
    assert [case.id for case in FMHA.cases("long")] == long
    assert len(grid) + len(long) == 72
    schedules = FMHA.profile("schedules")
    assert [case.id for case in schedules.cases] == grid + long
    late = ("late_cta:0", "late_cta:1", "late_warp:0", "late_warp:4")
    assert schedules.schedules == ("eager", "lazy", *late, *(f"random:{seed}" for seed in range(8)))


# Published numbers, and those chosen since, must be changed here and in the spec together.
TOLERANCES = {"fmha": (0.999996, 2.0), "nvfp4_moe": (0.9999, 2.0)}


def _bars(text: str) -> tuple[object, object]:
    """The file's numbers, read without our own code."""
    tolerance = yaml.safe_load(text)["tolerance"]
    return tolerance["cosine"]["value"], tolerance["noise_ratio"]["value"]


def test_the_tolerances_are_those_that_were_published() -> None:
    for op, bars in TOLERANCES.items():
        assert _bars(SPECS[op].file.read_text("utf-8")) == bars, f"{op}: the file has other bars than were published"
    for op, spec in SPECS.items():
        assert (spec.tolerance.cosine, spec.tolerance.noise_ratio) == _bars(spec.file.read_text("utf-8"))
        assert op in TOLERANCES or not spec.published_cells, f"{op} has a published matrix: give its bars here"


@pytest.mark.parametrize(("old", "new"), [("0.999996", "0.99"), ("value: 2.0", "value: 20.0")])
def test_a_tolerance_that_was_loosened_is_noticed(old: str, new: str) -> None:
    text = FMHA.file.read_text("utf-8")
    assert old in text, "the planted fault must change the file"
    assert _bars(text.replace(old, new)) != TOLERANCES["fmha"]


def test_cosine_bar_holds_for_the_published_cells_only() -> None:
    published = [case for name in FMHA.matrices for case in FMHA.cases(name) if FMHA.published(case)]
    assert published == FMHA.cases("grid") + FMHA.cases("long")
    assert not FMHA.published(FMHA.case(hd=64, t=1, s_k=128, seed=3)), "the bar is that of the matrix's own inputs"
    assert not FMHA.published(FMHA.case(hd=64, t=1, s_k=128, inputs="large_logits"))
    assert not FMHA.published(FMHA.case(hd=64, t=2, s_k=128))


def test_smoke_touches_every_feature() -> None:
    smoke = FMHA.profile("smoke").cases
    features = {
        "every hd": {case["hd"] for case in smoke} == {64, 128, 256, 512},
        "ragged t and s_k": any(case.int("t") % 32 and case.int("s_k") % 128 for case in smoke),
        "one key": any(case["s_k"] == 1 for case in smoke),
        "batch": any(case.int("batch") > 1 for case in smoke),
        "GQA": any(1 < case.int("kv_heads") < case.int("heads") for case in smoke),
        "MQA": any(1 == case.int("kv_heads") < case.int("heads") for case in smoke),
        "causal": any(case["causal"] and case["window"] is None for case in smoke),
        "window": any(case["window"] is not None and case.int("window") < case.int("s_k") for case in smoke),
        "row with no visible key": any(case["causal"] and case.int("t") > case.int("s_k") for case in smoke),
        "no lse": any(not case["lse"] for case in smoke),
    }
    missing = [name for name, there in features.items() if not there]
    assert not missing, f"smoke has no case with: {', '.join(missing)}"


def test_smoke_stays_small() -> None:
    """Units of 0.1 ms of the VM, by the model that the laws use for their budget: at most 12 s per backend."""
    smoke = FMHA.profile("smoke").cases
    assert sum(drawing_of("fmha").work(dict(case.axes)) for case in smoke) < 120_000


@pytest.mark.parametrize(("spec", "name"), MATRICES)
def test_matrix_ids_are_distinct_and_come_back(spec: Spec, name: str) -> None:
    found = spec.cases(name)
    assert found
    assert len({case.id for case in found}) == len(found)
    assert [spec.parse_case(case.id) for case in found] == found


@pytest.mark.parametrize(("spec", "name"), PROFILES)
def test_profile_selects_rows_of_matrices_once(spec: Spec, name: str) -> None:
    selected = [case.id for case in spec.profile(name).cases]
    assert len(set(selected)) == len(selected) > 0
    assert set(selected) <= {case.id for matrix in spec.matrices for case in spec.cases(matrix)}


def test_order_is_stable() -> None:
    again = load_specs()["fmha"]
    for name in FMHA.matrices:
        assert again.cases(name) == FMHA.cases(name)
    for name in FMHA.profiles:
        assert again.profile(name) == FMHA.profile(name)


def test_shapes_follow_the_axes() -> None:
    case = FMHA.case(hd=64, t=3, s_k=5, batch=2, heads=6, kv_heads=3)
    shapes = {name: FMHA.shape(name, case) for name in FMHA.tensors_of(case)}
    assert shapes == {"q": (2, 6, 3, 64), "k": (2, 3, 5, 64), "v": (2, 3, 5, 64), "o": (2, 6, 3, 64), "lse": (2, 6, 3)}
    ragged = FMHA.vary(case, s_k=17, ragged=True, total_q=4, total_k=32)
    assert (FMHA.shape("q", ragged), FMHA.shape("cu_seqlens_k", ragged)) == ((4, 6, 64), (3,))
    assert FMHA.shape("block_table", FMHA.vary(ragged, page_size=16)) == (2, 2)
    with pytest.raises(SpecError, match="has no block_table: page_size is 0"):
        FMHA.shape("block_table", ragged)
    silent = FMHA.vary(case, lse=False)
    assert "lse" not in FMHA.tensors_of(silent)
    with pytest.raises(SpecError, match="has no lse: lse is false"):
        FMHA.shape("lse", silent)


@pytest.mark.parametrize(
    ("ask", "sentence"),
    [
        (lambda: FMHA.cases("gird"), "there is no matrix 'gird'; did you mean 'grid'?"),
        (lambda: FMHA.profile("smok"), "there is no profile 'smok'; did you mean 'smoke'?"),
        (lambda: FMHA.shape("qq", FMHA.cases("grid")[0]), "there is no tensor 'qq'"),
    ],
)
def test_unknown_name_is_refused_with_the_nearest(ask, sentence: str) -> None:
    with pytest.raises(SpecError) as caught:
        ask()
    assert sentence in str(caught.value)
    assert str(FMHA.file) in str(caught.value)


def test_one_function_says_which_name_was_meant() -> None:
    sources = [path for path in (ROOT / "megamoe").rglob("*.py") if "get_close_matches" in path.read_text("utf-8")]
    assert [path.name for path in sources] == ["known_names.py"]
    assert nearest("smok", ["full", "smoke"]) == "; did you mean 'smoke'?"
    assert nearest_of("zzz", ["full"]) == "; known: full"
    many = [f"rule-{number}" for number in range(99)]
    assert nearest_of("rul-7", many, "README.md") == "; did you mean 'rule-7'? README.md lists all 99"


def test_specs_are_read_without_torch() -> None:
    program = "import sys, megamoe.spec.load as s; s.load_specs(); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], timeout=60, check=False)
    assert done.returncode == 0, "reading the specs imports torch, which makes `megamoe list` slow"

"""Every way to spoil a spec is refused in a sentence with file, line, key and what would be right.

The op here is not one of ours: packed fp4 tensors, a text axis and a float axis need no change in megamoe.spec. Any
other content of a spec file or a case id gives a value or a SpecError, never another exception.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from conformance.fakes.instant import SPEC
from conformance.kernels.laws.law import specs
from megamoe import SPECS
from megamoe.contract import AxisValue
from megamoe.spec.expression import ExpressionError, parse_expression
from megamoe.spec.load import build_spec, load_spec, load_specs
from megamoe.spec.marked_yaml import SpecError, parse_marked_yaml
from megamoe.spec.spec import DEFAULT_THRESHOLD, Spec

SOUND = """\
op: toy_moe
doc: Two grouped products.
axes:
  hidden: {type: int, in: [16, 32], doc: columns}
  tokens: {type: int, min: 0, max: 64, doc: rows}
  topk: {type: int, min: 1, max: 8, default: 1, doc: experts a token}
  weight_applies: {type: str, in: [before, after], default: after, doc: when the weight applies}
  clamp: {type: float, min: 0.5, max: 10.0, optional: true, default: null, doc: limit of SwiGLU}
  debug: {type: bool, default: false, doc: whether scales are written}
  lean: {type: bool, default: true, doc: whether nothing is written twice}
  far: {type: int, min: 0, max: 1000000, default: 0, doc: rows further on}
constraints:
  - topk <= 4 or hidden == 32
tensors:
  a: {shape: [tokens * topk, hidden // 2], dtype: e2m1}
  o: {shape: [tokens, hidden], dtype: bf16, role: output}
  sf: {shape: [(tokens + 127) // 128 * 128], dtype: e4m3, role: output, when: debug}
matrices:
  grid:
    hidden: [16, 32]
    tokens: [1, 4]
  edges:
    - {hidden: 16, tokens: 0}
    - {hidden: 32, tokens: 3, topk: 8}
  big:
    - {hidden: 32, tokens: 64}
published: [grid]
beyond_ranges: [big]
ranges:
  tokens: {min: 0, max: 32}
inputs: [normal, zeros]
laws: [matches_reference]
tolerance:
  cosine: {value: 0.99, reason: as published}
  noise_ratio: {value: 2.0, reason: twice the noise}
benchmark:
  threshold: {value: 0.02, reason: as measured}
  overrides:
    - {matrix: big, value: 0.03, reason: large}
    - {where: {hidden: [16], debug: [false]}, temperature: hot, value: 0.05, reason: short}
profiles:
  smoke:
    doc: A little.
    schedules: [eager, "random:3"]
    cases:
      - {hidden: 16, tokens: 0}
  full:
    doc: All of it.
    schedules: [eager]
    matrices: [grid, edges]
"""


EDGE, TWIN = "{hidden: 32, tokens: 3, topk: 8}", "{tokens: 0, hidden: 16, topk: 1}"


@dataclass(frozen=True)
class Plant:
    """Replaces `old` by `new`. The refusal must be at the line that contains `at`, at `key`, and say all of `says`."""

    old: str
    new: str
    at: str
    key: str
    says: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.key}-{self.says[0]}".replace(" ", "_")


def plant(old: str, new: str, at: str, key: str, *says: str) -> Plant:
    return Plant(old, new, at, key, says)


KEYS = [
    plant("doc: Two", "dco: Two", "dco:", "dco", "unknown key 'dco'; did you mean 'doc'?"),
    plant("doc: columns", "docs: columns", "docs:", "axes.hidden.docs", "unknown key 'docs'; did you mean 'doc'?"),
    plant("dtype: bf16", "dytpe: bf16", "dytpe", "tensors.o.dytpe", "did you mean 'dtype'?"),
    plant("cosine:", "cosin:", "cosin:", "tolerance.cosin", "did you mean 'cosine'?", "noise_ratio"),
    plant("reason: twice", "resaon: twice", "resaon", "tolerance.noise_ratio.resaon", "did you mean 'reason'?"),
    plant("    schedules: [eager]", "    schedule: [eager]", "schedule: [", "profiles.full.schedule", "'schedules'?"),
    plant("tokens: {min: 0,", "tokens: {mn: 0,", "{mn:", "ranges.tokens.mn", "did you mean 'min'?"),
    plant("matrices:\n  grid", "matrixes:\n  grid", "matrixes:", "matrixes", "did you mean 'matrices'?"),
    plant("op: toy_moe\n", "", "doc: Two", "", "key 'op' is missing"),
    plant(", dtype: bf16", "", "  o: {", "tensors.o", "key 'dtype' is missing", "shape, dtype, role"),
    plant("    tokens: [1, 4]", "    tokns: [1, 4]", "tokns", "matrices.grid.tokns", "did you mean 'tokens'?"),
    plant("{hidden: 16, tokens: 0}", "{hiden: 16, tokens: 0}", "{hiden", "matrices.edges[0].hiden", "'hidden'?"),
    plant("tokens: {min", "toks: {min", "toks:", "ranges.toks", "no axis 'toks'", "'tokens'?"),
    plant("[tokens, hidden]", "[tokens, hiden]", "hiden]", "tensors.o.shape[1]", "'hiden'", "did you mean 'hidden'?"),
    plant("when: debug", "when: debog > 0", "debog", "tensors.sf.when", "'debog', no axis", "'debug'?"),
    plant(
        "when: debug", "shape_if: {debog: [tokens]}", "debog", "tensors.sf.shape_if", "no bool axis 'debog'", "'debug'?"
    ),
    plant(
        "when: debug", "shape_if: {debug: [tokans]}", "tokans", "tensors.sf.shape_if.debug[0]", "'tokans'", "'tokens'?"
    ),
    plant("when: debug", "when: debog", "debog", "tensors.sf.when", "no bool axis 'debog'", "'debug'?"),
    plant("when: debug", "when: {debug: yet}", "debug: yet", "tensors.sf.when", "no axis of text 'debug'"),
    plant(
        *("when: debug", "when: {weight_applies: besides}", "besides", "tensors.sf.when.weight_applies.besides"),
        "weight_applies is never 'besides'; it is one of before, after",
    ),
    plant("published: [grid]", "published: [gird]", "gird", "published[0]", "no matrix 'gird'; did you mean 'grid'?"),
    plant("published: [grid]", "published: []", "published", "published", "is empty; it needs at least one entry"),
    plant("[grid, edges]", "[grid, edgs]", "edgs", "profiles.full.matrices[1]", "did you mean 'edges'?"),
    plant("  hidden: {type", "  Hidden: {type", "Hidden:", "axes.Hidden", "'Hidden' is no name"),
    plant("  debug: {type", "  seed: {type", "  seed:", "axes.seed", "'seed' cannot name an axis"),
]

TYPES = [
    plant("op: toy_moe", "op: 7", "op: 7", "op", "must be text, not 7"),
    plant("int, in", "integer, in", "integer", "axes.hidden.type", "'int', 'float', 'bool' or 'str'", "'integer'"),
    plant("min: 0, max: 64", "min: zero, max: 64", "zero", "axes.tokens.min", "must be a number, not 'zero'"),
    plant("min: 0, max: 64", "min: 0.5, max: 64", "0.5, max: 64", "axes.tokens.min", "must be an integer, not 0.5"),
    plant("in: [16, 32]", "in: [16, '32']", "'32'", "axes.hidden.in[1]", "must be an integer, not '32'"),
    plant("in: [16, 32]", "in: 16", "in: 16", "axes.hidden.in", "must be a list, not 16"),
    plant("default: false", "default: 0", "default: 0", "axes.debug.default", "must be true or false, not 0"),
    plant("dtype: bf16", "dtype: bfloat16", "bfloat16", "tensors.o.dtype", "'bf16'", "'bfloat16'"),
    plant("inputs: [normal, zeros]", "inputs: normal", "inputs: n", "inputs", "must be a list, not 'normal'"),
    plant("value: 0.99", "value: '0.99'", "'0.99'", "tolerance.cosine.value", "must be a number, not '0.99'"),
    plant("value: 0.99", "value: 1.5", "1.5", "tolerance.cosine.value", "less than or equal to 1", "1.5"),
    plant("value: 2.0", "value: 0", "value: 0,", "tolerance.noise_ratio.value", "greater than or equal to 1"),
    plant("value: 2.0", "value: 1.0e+300", "1.0e+300", "tolerance.noise_ratio.value", "less than or equal to 16"),
    plant("reason: as published", "reason: ''", "''", "tolerance.cosine.reason", "must be a sentence"),
    plant("tolerance:\n", "tolerance: 0.99\nx:\n", "tolerance: 0", "tolerance", "must be a mapping, not 0.99"),
    plant("tokens: 3", "tokens: 3.5", "3.5", "matrices.edges[1].tokens", "must be an integer, not 3.5"),
    plant("tokens: 3", "tokens: [3]", "[3]", "matrices.edges[1].tokens", "not a list"),
    plant("tokens: [1, 4]", "tokens: 4", "tokens: 4", "matrices.grid.tokens", "must be a list, not 4"),
    plant("tokens: 3,", "seed: true, tokens: 3,", "seed: true", "matrices.edges[1].seed", "seed must be an integer"),
    plant("[eager, ", "[eagre, ", "eagre", "profiles.smoke.schedules[0]", "'eagre' is no schedule", "random:SEED"),
    plant('"random:3"', '"random:x"', "random:x", "profiles.smoke.schedules[1]", "'random:x' is no schedule"),
]

THRESHOLDS = [
    plant(
        "  threshold: {", "  treshold: {", "treshold", "benchmark.treshold", "did you mean 'threshold'?", "overrides"
    ),
    plant("value: 0.02, reason", "value: 0.02, raeson", "raeson", "benchmark.threshold.raeson", "'reason'?"),
    plant("value: 0.02, ", "", "{reason: as m", "benchmark.threshold", "key 'value' is missing; known: value, reason"),
    plant("value: 0.02", "value: 2%", "2%", "benchmark.threshold.value", "must be a number, not '2%'"),
    plant("value: 0.02", "value: 0", "value: 0,", "benchmark.threshold.value", "greater than 0"),
    plant("value: 0.02", "value: 1.5", "1.5", "benchmark.threshold.value", "less than 1"),
    plant("reason: as measured", "reason: ''", "''", "benchmark.threshold.reason", "must be a sentence"),
    plant("benchmark:\n", "benchmark: 0.02\nx:\n", "benchmark: 0", "benchmark", "must be a mapping, not 0.02"),
    plant("    - {matrix: big", "    - {matirx: big", "matirx", "benchmark.overrides[0].matirx", "'matrix'?"),
    plant("{matrix: big, ", "{matrix: bgi, ", "bgi", "benchmark.overrides[0].matrix", "no matrix 'bgi'", "'big'?"),
    plant(
        "{hidden: [16], d", "{hiden: [16], d", "hiden", "benchmark.overrides[1].where.hiden", "did you mean 'hidden'?"
    ),
    plant(
        "{hidden: [16], d", "{hidden: 16, d", "hidden: 16, d", "benchmark.overrides[1].where.hidden", "a list, not 16"
    ),
    plant(
        "{hidden: [16], d", "{hidden: [x], d", "[x], d", "benchmark.overrides[1].where.hidden[0]", "an integer, not 'x'"
    ),
    plant(
        "{hidden: [16], d", "{hidden: [16, 16], d", "[16, 16]", "benchmark.overrides[1].where.hidden[1]", "given twice"
    ),
    plant("debug: [false]}, ", "debug: [true]}, ", "[true]", "benchmark.overrides[1]", "matches no case of any matrix"),
    plant(
        "where: {hidden: [16], debug: [false]}", "where: {}", "where: {}", "benchmark.overrides[1].where", "is empty"
    ),
    plant("temperature: hot", "temperature: warm", "warm", "benchmark.overrides[1].temperature", "'cold' or 'hot'"),
    plant("{matrix: big, value", "{value", "{value: 0.03", "benchmark.overrides[0]", "selects everything"),
    plant("matrix: big, value: 0.03", "matrix: big", "matrix: big", "benchmark.overrides[0]", "key 'value' is missing"),
]

MEANINGS = [
    plant("tokens: [1, 4]", "tokens: []", "tokens: []", "matrices.grid.tokens", "is empty"),
    plant("    - {hidden: 32, tokens: 64}", "    []", "  big:", "matrices.big", "is empty"),
    plant("    cases:\n      - {hidden: 16, tokens: 0}\n", "", "  smoke:", "profiles.smoke", "selects no case"),
    plant(
        "max: 32}", "max: 3}", "tokens: [1, 4]", "matrices.grid.tokens", "tokens=4", "widen the range", "beyond_ranges"
    ),
    plant("max: 32}", "max: 128}", "max: 128", "ranges.tokens", "goes beyond the limits", "0..64"),
    plant("max: 32}", "max: 32, in: [1]}", "max: 32, in", "ranges.tokens", "has both 'in' and 'min'"),
    plant("min: 0, max: 32}", "min: 33, max: 32}", "min: 33", "ranges.tokens.min", "min 33 is above max 32"),
    plant("min: 0, max: 64", "min: 0", "tokens: {type", "axes.tokens", "no complete range", "'min' and 'max'"),
    plant("in: [before, after], ", "", "weight_applies: {t", "axes.weight_applies", "give 'in'"),
    plant("default: 1", "default: 9", "9, d", "axes.topk.default", "default 9 is no value of it; it must be 1..8"),
    plant("tokens: 3", "tokens: 65", "65", "matrices.edges[1].tokens", "tokens=65 is outside of its limits", "0..64"),
    plant("tokens: 3, ", "", "{hidden: 32, topk", "matrices.edges[1]", "tokens must be given"),
    plant(
        "hidden: 32, tokens: 3", "hidden: 16, tokens: 3", "tokens: 3", "matrices.edges[1]", "topk=8", "'topk <= 4 or"
    ),
    plant("tokens: [1, 4]", "tokens: [1, 4, 1]", "[1, 4, 1]", "matrices.grid.tokens[2]", "1 is given twice"),
    plant(EDGE, TWIN, TWIN, "matrices.edges[1]", "toy_moe:hidden=16,tokens=0 is already in matrix edges, line 23"),
    plant(EDGE, "{hidden: 16, tokens: 4}", "tokens: 4}", "matrices.edges[1]", "is already in matrix grid, line 19"),
    plant("[big]", "[big, edges]", "beyond_ranges", "beyond_ranges[1]", "no row of matrix edges"),
    plant(
        "      - {hidden: 16, tokens: 0}",
        "      - {hidden: 16, tokens: 5}",
        "tokens: 5",
        "profiles.smoke.cases[0]",
        "toy_moe:hidden=16,tokens=5 is a row of no matrix",
    ),
    plant(
        "    matrices: [grid, edges]",
        "    matrices: [edges]\n    cases: [{hidden: 16, tokens: 0}]",
        "cases: [{",
        "profiles.full.cases[0]",
        "selected twice",
    ),
    plant("[normal, zeros]", "[normal, normal]", "normal, normal", "inputs[1]", "given twice"),
    plant("tokens: 3,", "inputs: zeroes, tokens: 3,", "zeroes", "matrices.edges[1].inputs", "did you mean 'zeros'?"),
    plant("bf16, role: output", "bf16", "tensors:", "tensors", "nothing would be compared"),
    plant("topk <= 4 or", "topk < = 4 or", "< = 4", "constraints[0]", "cannot be read"),
    plant("topk <= 4 or", "top_k <= 4 or", "top_k <=", "constraints[0]", "did you mean 'topk'?"),
    plant("topk <= 4 or", "abs(topk) <= 4 or", "abs(", "constraints[0]", "contains 'abs(topk)'"),
    plant("topk <= 4 or", "().__class__ <= 4 or", "__class__", "constraints[0]", "is not an expression"),
    plant("topk <= 4 or", "topk ** 9 <= 4 or", "** 9", "constraints[0]", "contains 'topk ** 9'"),
    plant(
        "topk <= 4 or hidden == 32", "hidden % topk", "  - hidden % topk", "constraints[0]", "neither true nor false"
    ),
    plant("topk <= 4 or", "hidden // tokens >= 0 or", "hidden: 16, tokens: 0}", "matrices.edges[0]", "divides by zero"),
    plant("[tokens, hidden]", "[tokens - 1, hidden]", "tokens - 1", "tensors.o.shape[0]", "'tokens - 1' is -1"),
    plant(
        "[tokens, hidden]", "[hidden, 8 // tokens]", "// tokens", "tensors.o.shape[1]", "divides by zero", "in toy_moe:"
    ),
    plant("[tokens, hidden]", "[tokens > 1, hidden]", "> 1", "tensors.o.shape[0]", "'tokens > 1' is no number"),
    plant("[tokens, hidden]", '["null", hidden]', '"null",', "tensors.o.shape[0]", "'null' is no number"),
    plant(
        *("[tokens, hidden]", "[hidden], shape_if: {lean: [tokens - 1]}", "lean: [", "tensors.o.shape_if.lean[0]"),
        "'tokens - 1' is -1",
    ),
    plant("topk <= 4 or", "not hidden or", "not hidden", "constraints[0]", "'hidden' is neither true nor false"),
    plant(
        "when: debug", "when: topk + 1", "topk + 1", "tensors.sf.when", "'topk + 1' is neither true nor false; compare"
    ),
    plant("when: debug", "when: (topk)", "(topk)", "tensors.sf.when", "'topk' is neither true nor false"),
    plant(
        "when: debug", "when: debug and topk", "and topk", "tensors.sf.when", "in 'debug and topk', 'topk' is neither"
    ),
    plant(
        "when: debug",
        "when: not null",
        "not null",
        "tensors.sf.when",
        "in 'not null', 'null' is neither true nor false",
    ),
    plant("when: debug", "when: 8 // tokens > 1", "// tokens", "tensors.sf.when", "divides by zero", "tokens is 0"),
    plant("when: debug", "when: 8 % far == 1", "% far", "tensors.sf.when", "divides by zero", "in toy_moe:"),
    plant(
        "role: output}",
        "role: output, when: tokens > 0}",
        "tensors:",
        "tensors",
        "if debug is false and tokens is 0",
    ),
    plant("role: output}", "role: output, when: far != 7}", "tensors:", "tensors", "depends on debug, far, which have"),
]

YAML = [
    plant("doc: Two", "op: again\ndoc: Two", "op: again", "op", "given twice, first in line 1"),
    plant("dtype: bf16,", "dtype: bf16, dtype: f16,", "dtype: f16", "tensors.o.dtype", "given twice"),
    plant("op: toy_moe", "op: !!python/name:os.system", "op: !!", "", "tag", "is refused"),
    plant("op: toy_moe", "op: !!python/object/apply:os.system ['true']", "op: !!", "", "tag", "is refused"),
    plant("op: toy_moe", "op: !secret x", "op: !s", "", "tag '!secret' is refused"),
    plant("[grid, edges]", "*a", "matrices: *a", "", "alias *a is refused"),
    plant("laws: [matches_reference]", "laws: [x]\n<<: {laws: [y]}", "<<:", "", "a key must be plain text, not '<<'"),
    plant("default: false", "default: no", "default: no", "axes.debug.default", "'no' would be read as bool"),
    plant("tokens: 3", "tokens: 010", "010", "matrices.edges[1].tokens", "'010' would be read as int"),
    plant("tokens: 3", "tokens: 1:30", "1:30", "matrices.edges[1].tokens", "'1:30' would be read as int"),
    plant("value: 2.0", "value: .inf", ".inf", "tolerance.noise_ratio.value", "'.inf' would be read as float"),
    plant("doc: A little.", "doc: 2020-01-01", "2020", "profiles.smoke.doc", "timestamp"),
    plant("  big:\n", "  true:\n", "  true:", "matrices", "a key must be plain text, not 'true'"),
    plant("  big:\n", "  ? [a]\n  :\n", "? [a]", "matrices", "not a collection"),
    plant("[16, 32], doc", "[16, 32, doc", "}", "", "is not acceptable YAML"),
    plant("  grid:\n", "\tgrid:\n", "\tgrid", "", "is not acceptable YAML", "cannot start any token"),
    plant("doc: A little.", "doc: A \x07 little.", "\x07", "", "control character U+0007"),
    plant("ranges:\n", "---\nranges:\n", "---", "", "single document"),
    plant("laws: [matches_reference]", "laws: " + "[" * 40 + "]" * 40, "[[[", "", "nested deeper than"),
]


def spoil(folder: Path, text: str) -> SpecError:
    file = folder / "toy_moe.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(SpecError) as caught:
        load_spec(file)
    return caught.value


def test_the_spec_that_is_spoilt_is_sound(tmp_path: Path) -> None:
    file = tmp_path / "toy_moe.yaml"
    file.write_text(SOUND)
    spec: Spec = load_specs(tmp_path)["toy_moe"]
    case = spec.case(hidden=32, tokens=3, topk=2, weight_applies="before", clamp=7, debug=True)
    assert case.id == "toy_moe:hidden=32,tokens=3,topk=2,weight_applies=before,clamp=7.0,debug=true"
    assert spec.parse_case(case.id) == case
    assert {name: spec.shape(name, case) for name in spec.tensors} == {"a": (6, 16), "o": (3, 32), "sf": (128,)}
    assert [len(spec.cases(name)) for name in ("grid", "edges", "big")] == [4, 2, 1]


def test_the_first_override_that_matches_counts(tmp_path: Path) -> None:
    (tmp_path / "toy_moe.yaml").write_text(SOUND)
    spec = load_specs(tmp_path)["toy_moe"]

    def threshold(case: str, temperature: Literal["cold", "hot"]) -> float:
        return spec.thresholds.of(spec.parse_case(f"toy_moe:{case}"), temperature)

    assert threshold("hidden=32,tokens=64", "hot") == 0.03, "a row of the matrix"
    assert threshold("hidden=16,tokens=4", "hot") == 0.05, "axes and temperature both match"
    assert threshold("hidden=16,tokens=4", "cold") == 0.02, "the temperature does not match"
    assert threshold("hidden=16,tokens=4,debug=true", "hot") == 0.02, "an axis does not match"
    assert threshold("hidden=16,tokens=63", "hot") == 0.05, "a case need not be in a matrix"


def test_without_the_key_every_threshold_is_the_default(tmp_path: Path) -> None:
    start, _, rest = SOUND.partition("benchmark:")
    (tmp_path / "toy_moe.yaml").write_text(start + rest[rest.index("profiles:") :])
    thresholds = load_specs(tmp_path)["toy_moe"].thresholds
    assert (thresholds.default, thresholds.overrides) == (DEFAULT_THRESHOLD, ())


@pytest.mark.parametrize("planted", [*KEYS, *TYPES, *THRESHOLDS, *MEANINGS, *YAML], ids=str)
def test_planted_fault_is_refused_where_it_is(planted: Plant, tmp_path: Path) -> None:
    assert planted.old in SOUND, f"{planted.old!r} is not in the sound spec, so nothing is planted"
    text = SOUND.replace(planted.old, planted.new, 1)
    refusal = spoil(tmp_path, text)
    lines = [i for i, line in enumerate(text.split("\n"), start=1) if planted.at in line]
    for words in planted.says:
        assert words in str(refusal)
    assert refusal.line in lines, f"{planted.at!r} is in line {lines}, but the refusal is: {refusal}"
    assert refusal.key == planted.key
    assert str(refusal).startswith(f"{tmp_path / 'toy_moe.yaml'}:{refusal.line}: ")


# More than a loader should accept: nested aliases, and a matrix of too many cells.
ALIASES = "".join(f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 9)}]\n" for i in range(1, 12))
LONG_AXES = "".join(f"    {name}: {list(range(1, 40))}\n" for name in ("hidden", "tokens", "topk", "clamp"))


@pytest.mark.parametrize(
    ("files", "wanted", "sentence"),
    [
        ({}, "none.yaml", "none.yaml: there is no such file"),
        ({}, "", "is no regular file"),
        ({}, "/dev/zero", "is no regular file"),
        ({"a.yaml": "# nothing\n"}, "a.yaml", "a.yaml:1: is empty"),
        ({"a.yaml": "op: toy\ndoc: \xff\n"}, "a.yaml", "a.yaml:2: byte 0xff is not UTF-8"),
        ({"a.yaml": "# filler\n" * 200_000}, "a.yaml", "is 1,800,000 bytes long"),
        ({"a.yaml": "- op\n- toy\n"}, "a.yaml", "a.yaml:1: must be a mapping, not a list"),
        ({"a.yaml": f"l0: &l0 [x]\n{ALIASES}"}, "a.yaml", "a.yaml:2: is not acceptable YAML: alias *l0 is refused"),
        (
            {"a.yaml": SOUND.replace("    hidden: [16, 32]\n    tokens: [1, 4]\n", LONG_AXES)},
            "a.yaml",
            "a.yaml:19: matrices.grid: has 2,313,441 cells",
        ),
    ],
    ids=itertools.count(),
)
def test_bad_file_is_refused(tmp_path: Path, files: dict[str, str], wanted: str, sentence: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="latin-1")
    with pytest.raises(SpecError) as caught:
        load_spec(tmp_path / wanted)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("files", "folder", "sentence"),
    [
        ((), "none", "none: there is no such folder"),
        ((), "", "there is no *.yaml in this folder"),
        (("a.yaml", "b.yml"), "", "b.yml: would be overlooked"),
        (("a.yaml", "b.yaml"), "", "b.yaml:1: op: op 'toy_moe' is also in"),
    ],
)
def test_bad_folder_is_refused(tmp_path: Path, files: tuple[str, ...], folder: str, sentence: str) -> None:
    for name in files:
        (tmp_path / name).write_text(SOUND)
    with pytest.raises(SpecError) as caught:
        load_specs(tmp_path / folder)
    assert sentence in str(caught.value)


FMHA = specs()["fmha"]
LINES = FMHA.file.read_text(encoding="utf-8").splitlines(keepends=True)
SHARDS = [*"{}[]:'x1\t\n", ": ", "- ", "&a ", "*a", "!!int ", "null", "-1", "1.5", "true", "|\n"]
unhurried = settings(deadline=None, derandomize=True, database=None)


# Random combinations of YAML words, the nearest thing to typing errors.
YAML_WORDS = [
    *"abc?\n\t{}[],'\"# |>%@1\\:",
    "b: ",
    "- ",
    "? ",
    "\n  ",
    "&x ",
    "*x",
    "!t ",
    "---\n",
    "null",
    "0x1",
    "|2#",
]
YAML_WORDS += ["\x00", "\x85", "\u2028", "\ufeff", "é", "<<: "]


def test_libyaml_and_pyyaml_read_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which one parses only affects speed, so a text that only libyaml accepts is refused."""
    random = np.random.default_rng(1)
    texts = [file.read_text("utf-8") for file in sorted(SPECS.glob("*.yaml"))]
    texts += ["".join(random.choice(YAML_WORDS, random.integers(1, 9))) for _ in range(2000)] + ["{a:}", "a: |#", "? a"]

    def read(text: str) -> object:
        try:
            document = parse_marked_yaml(text, Path("x.yaml"))
        except SpecError as refusal:
            return str(refusal)
        return document.value, document.lines

    quick = [read(text) for text in texts]
    monkeypatch.setattr("megamoe.spec.marked_yaml.CParser", None)
    for text, seen in zip(texts, quick, strict=True):
        assert seen == read(text), f"libyaml reads {text!r} otherwise than PyYAML"


@st.composite
def spoilt_specs(draw: st.DrawFn) -> str:
    """fmha.yaml with one to three lines dropped or doubled, or with a piece cut out and another inserted."""
    lines = list(LINES)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(lines) - 1))
        line = lines[at]
        start = draw(st.integers(0, len(line)))
        end = draw(st.integers(start, len(line)))
        cut = line[:start] + draw(st.sampled_from([*SHARDS, ""])) + line[end:]
        lines[at] = draw(st.sampled_from(["", line + line, cut, cut]))
    return "".join(lines)


def refusal_of(text: str) -> SpecError | None:
    try:
        build_spec(parse_marked_yaml(text, Path("spoilt.yaml")))
    except SpecError as refusal:
        return refusal
    return None


@settings(unhurried, max_examples=60)
@given(spoilt_specs())
def test_spoilt_spec_is_read_or_refused_with_a_line(text: str) -> None:
    if refusal := refusal_of(text):
        assert refusal.line is not None, f"this refusal has no line: {refusal}"
        assert 1 <= refusal.line <= text.count("\n") + 1
        assert str(refusal).startswith(f"spoilt.yaml:{refusal.line}: ")


@settings(unhurried, max_examples=300)
@given(st.text(max_size=60) | st.text("fmha:d=t,s_k0123456789.-+e", max_size=60).map("fmha:hd=64,t=1,s_k=".__add__))
@example("fmha:hd=64,t=1,s_k=1,scale=1e-400")
@example("fmha:hd=64,t=1,s_k=\u0661")
def test_any_text_is_a_case_or_is_refused(text: str) -> None:
    try:
        case = FMHA.parse_case(text)
    except SpecError:
        return
    assert FMHA.parse_case(case.id) == case


@settings(unhurried, max_examples=300)
@given(st.text("abt 0123()+-*/%<>=!nor\x00", max_size=40), st.integers(0, 9), st.integers(0, 9))
@example("(" * 150, 1, 1)
@example("-" * 159 + "1", 1, 1)
@example("1or 2", 1, 1)
@example("a if b else t", 1, 1)
def test_any_text_is_an_expression_or_is_refused(text: str, a: int, b: int) -> None:
    try:
        value = parse_expression(text, ("a", "b", "t")).value({"a": a, "b": b, "t": 1})
    except ExpressionError:
        return
    assert type(value) in (int, bool, type(None))


@pytest.mark.parametrize(
    ("text", "axes", "value"),
    [
        ("(a + 127) // 128 * 128", {"a": 129}, 256),
        ("a % b == 0", {"a": 6, "b": 4}, False),
        ("1 <= a < b", {"a": 1, "b": 2}, True),
        ("w == null or w <= a", {"a": 1, "w": None}, True),
        ("w == null or w <= a", {"a": 1, "w": 2}, False),
        ("not flag or a != 3", {"a": 3, "flag": True}, False),
        ("-a * 2 - 1", {"a": 3}, -7),
        ("flag == true", {"flag": True}, True),
    ],
)
def test_expression_means_what_it_says(text: str, axes: dict[str, AxisValue], value: int | bool) -> None:
    found = parse_expression(text, axes).value(axes)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("text", "axes", "sentence"),
    [("w <= a", {"w": None, "a": 1}, "guard it with 'w == null or ...'"), ("1 // a", {"a": 0}, "divides by zero")],
)
def test_expression_without_a_value_says_why(text: str, axes: dict[str, AxisValue], sentence: str) -> None:
    with pytest.raises(ExpressionError) as caught:
        parse_expression(text, axes).value(axes)
    assert sentence in str(caught.value)


def test_a_long_list_of_an_axis_takes_a_second() -> None:
    values = list(range(1, 30_001))
    text = SPEC.format(sizes=[1]).replace("n: [1], m: [1]", f"n: {values}, m: [1]").replace("max: 1000", "max: 100000")
    document = parse_marked_yaml(text, Path("many.yaml"))
    started = time.process_time()
    with pytest.raises(SpecError, match="has 30,000 cells; a matrix has at most 20,000"):
        build_spec(document)
    seconds = time.process_time() - started
    assert seconds < 1.0, f"30,000 values of an axis took {seconds:.1f} s beside the YAML"

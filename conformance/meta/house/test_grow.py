"""What README.md says under "Grow it" is true: a shape, an op, a backend and an instruction are added to a copy.

Each is also the smallest example of its kind: the texts below are whole files.
"""

from __future__ import annotations

import filecmp
import gzip
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from conformance import ROOT
from conformance.meta.house.test_import_rules import (
    RULES,
    broken,
    checkout_files,
    classes_named_twice,
    folders_without_a_rule,
)

CASE = "fmha:hd=64,t=5,s_k=77"
ROW = "{hd: 64, t: 5, s_k: 77}"

RMSNORM_YAML = """\
op: rmsnorm
doc: y = w * x / sqrt(mean(x * x) + 1e-6), row by row, in f32.
axes:
  rows: {type: int, min: 1, max: 64, doc: "rows, one a CTA"}
  hidden: {type: int, in: [32, 96, 512], doc: "elements a row"}
tensors:
  x: {shape: [rows, hidden], dtype: f32}
  w: {shape: [hidden], dtype: f32}
  y: {shape: [rows, hidden], dtype: f32, role: output}
matrices:
  small: {rows: [1, 3], hidden: [32, 96, 512]}
inputs: [normal]
laws: [matches_reference, schedule_independent, bitwise_repeatable]
tolerance:
  cosine: {value: 0.99999, reason: "Nothing is published."}
  noise_ratio: {value: 2.0, reason: "Everything is f32; the kernel sums in another order."}
profiles:
  smoke: {doc: "All of it.", schedules: [eager], matrices: [small]}
"""

RMSNORM_PY = '''\
"""RMSNorm: y = w * x / sqrt(mean(x * x) + EPS)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

from megamoe.contract import Case
from megamoe.ops import Latitude
from megamoe.spec.draws import normal

ABSOLUTE_SCALE: Final[Mapping[str, float]] = {}
MATRIX_RATES: Final[Mapping[str, float]] = {}
EPS: Final = 1e-6
Tensors = Mapping[str, torch.Tensor]


def make_inputs(case: Case, device: str | torch.device = "cpu") -> dict[str, torch.Tensor]:
    """x [rows, hidden] and w [hidden], N(0, 1)."""
    hidden = case.int("hidden")
    x, w = normal(case, "x", (case.int("rows"), hidden)), normal(case, "w", (1, hidden))[0]
    return {"x": x.to(device), "w": w.to(device)}


def _y(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return w * x * torch.rsqrt(x.square().mean(dim=1, keepdim=True) + EPS)


def oracle(case: Case, inputs: Tensors) -> dict[str, torch.Tensor]:
    """y in float64."""
    return {"y": _y(inputs["x"].double(), inputs["w"].double())}


def simulated(case: Case, inputs: Tensors) -> dict[str, torch.Tensor]:
    """y in float32."""
    return {"y": _y(inputs["x"], inputs["w"])}


def free(case: Case, inputs: Tensors) -> dict[str, torch.Tensor]:
    """Every element of y has a meaning."""
    return {}


def latitude(case: Case, inputs: Tensors, outputs: Tensors, expected: Tensors) -> Latitude:
    """A kernel has no choice but its roundings."""
    return Latitude()


def sample(case: Case, inputs: Tensors, most_flops: int) -> None:
    """Every row is judged."""


def useful_flops(case: Case) -> int:
    """A square, a sum and two products an element."""
    return 4 * case.int("rows") * case.int("hidden")


def minimum_bytes(case: Case) -> int:
    """x and w in, y out."""
    return 4 * case.int("hidden") * (2 * case.int("rows") + 1)
'''

BACKEND_PY = '''\
"""RMSNorm by one warp a row."""

from __future__ import annotations

from megamoe.contract import BufferArg, Case, Launch, Program, ScalarArg, Target, UnsupportedError

_PTX = """.version 8.7
.target {target}
.address_size 64
.visible .entry rmsnorm(.param .u64 x, .param .u64 w, .param .u64 y, .param .u32 hidden)
{{
.reg .pred %p;
.reg .b32 %lane, %i, %n, %row;
.reg .b64 %x, %w, %y, %at, %step;
.reg .f32 %v, %g, %sum, %other, %size;
ld.param.u64 %x, [x];
ld.param.u64 %w, [w];
ld.param.u64 %y, [y];
ld.param.u32 %n, [hidden];
mov.u32 %lane, %tid.x;
mov.u32 %row, %ctaid.x;
mul.lo.u32 %row, %row, %n;
mul.wide.u32 %step, %row, 4;
add.u64 %x, %x, %step;
add.u64 %y, %y, %step;
mov.f32 %sum, 0f00000000;
mov.u32 %i, %lane;
SQUARES:
mul.wide.u32 %step, %i, 4;
add.u64 %at, %x, %step;
ld.global.f32 %v, [%at];
fma.rn.f32 %sum, %v, %v, %sum;
add.u32 %i, %i, 32;
setp.lt.u32 %p, %i, %n;
@%p bra SQUARES;
{reduce}
cvt.rn.f32.u32 %size, %n;
div.rn.f32 %sum, %sum, %size;
add.f32 %sum, %sum, 0f358637BD;
sqrt.rn.f32 %sum, %sum;
mov.u32 %i, %lane;
STORES:
mul.wide.u32 %step, %i, 4;
add.u64 %at, %x, %step;
ld.global.f32 %v, [%at];
add.u64 %at, %w, %step;
ld.global.f32 %g, [%at];
div.rn.f32 %v, %v, %sum;
mul.f32 %v, %v, %g;
add.u64 %at, %y, %step;
st.global.f32 [%at], %v;
add.u32 %i, %i, 32;
setp.lt.u32 %p, %i, %n;
@%p bra STORES;
ret;
}}
"""
_REDUCE = "\\n".join(
    f"shfl.sync.bfly.b32 %other, %sum, {lanes}, 31, 0xffffffff;\\nadd.f32 %sum, %sum, %other;"
    for lanes in (16, 8, 4, 2, 1)
)


class WarpRows:
    """One kernel, for both targets and short rows."""

    name = "warp-rows"

    def targets(self, op: str) -> tuple[Target, ...]:
        return ("sm_90a", "sm_100a") if op == "rmsnorm" else ()

    def build(self, case: Case, target: Target) -> Program:
        if target not in self.targets(case.op):
            raise UnsupportedError(f"{case.op} is not there for {target}")
        if case.int("hidden") > 96:
            raise UnsupportedError(f"hidden is {case['hidden']}; this kernel takes at most 96")
        args = (*(BufferArg(name) for name in "xwy"), ScalarArg("u32", case.int("hidden")))
        launch = Launch("rmsnorm", (case.int("rows"), 1, 1), (32, 1, 1), args)
        return Program(target, _PTX.format(target=target, reduce=_REDUCE), (launch,))


BACKEND = WarpRows()
'''

STORES_PY = '''\
"""Stores to global memory that a thread does not wait for."""

from dataclasses import replace

from backends.vm.bind.binder import Binder
from backends.vm.bind.forms import opcode
from backends.vm.isa.memory_access import st


@opcode("st.async.release.<scope>{.<space>}.<type>", section="9.7.9.12", counter="memory",
        scope="gpu sys", space="global", type="u32 s32 f32")  # fmt: skip
def st_async_release(b: Binder):
    """Store at once, which is one of the times at which it may be."""
    _, value = b.expect(2)
    b.source(value, "u32")  # which refuses a wider register, as ptxas does
    return st(replace(b, words={**b.words, "vec": "", "sem": "release"}))
'''

STORES_TEST = '''\
"""st.async.release stores, for a target that has it."""

import numpy as np
import pytest

from backends.vm.faults import UnknownInstructionError
from conformance.vm.kernel import Kernel

BODY = "st.async.release.gpu.global.u32 [%out], 7; ret;"


def test_it_stores() -> None:
    stored, _ = Kernel(BODY, {"out": np.zeros(1, np.uint32)}, block=(1, 1, 1), target="sm_100a").run()
    assert stored["out"].tolist() == [7]


def test_hopper_lacks_it() -> None:
    with pytest.raises(UnknownInstructionError, match="it needs target sm_100 or higher"):
        Kernel(BODY, {"out": np.zeros(1, np.uint32)}, block=(1, 1, 1), target="sm_90a").run()
'''

REGISTERED = '[project.entry-points."megamoe.backends"]\n'
SMOKE = "    schedules: [eager]\n    cases:\n"
"""The text before the first row of fmha's profile smoke."""
SHAPE = {
    "specs/fmha.yaml": lambda text: _after(_after(text, "  edges:\n", f"    - {ROW}\n"), SMOKE, f"      - {ROW}\n")
}
OP = {"specs/rmsnorm.yaml": lambda text: RMSNORM_YAML, "megamoe/ops/rmsnorm.py": lambda text: RMSNORM_PY}
KERNEL = {"backends/warp_rows/__init__.py": lambda text: BACKEND_PY}
LINE = {"pyproject.toml": lambda text: _after(text, REGISTERED, 'warp-rows = "backends.warp_rows:BACKEND"\n')}
OPCODE = {
    "backends/vm/isa/release_stores.py": lambda text: STORES_PY,
    "conformance/vm/isa/test_release_stores.py": lambda text: STORES_TEST,
}
ADDED = {**SHAPE, **OP, **KERNEL, **LINE, **OPCODE}
"""File -> (its text, "" for a new one -> its text with the addition)."""


def _after(text: str, place: str, more: str) -> str:
    assert text.count(place) == 1, f"{place!r} must be there once"
    return text.replace(place, place + more)


def _left_out(folder: str, names: list[str]) -> list[str]:
    """Names that a checkout does not track: environments, caches, runs."""
    return [name for name in names if name[0] == "." or name.endswith(".egg-info") or name in ("runs", "failures")]


def _install(tree: Path) -> None:
    """Writes pyproject.toml's entry points as `pip install -e .` would, as metadata that Python finds first."""
    project = tomllib.loads((tree / "pyproject.toml").read_text())["project"]
    (info := tree / "megamoe-0.1.0.dist-info").mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    lines = [
        line
        for group, points in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {target}" for name, target in points.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout with everything added, and nothing installed but its own metadata."""
    tree = tmp_path_factory.mktemp("grown") / "checkout"
    shutil.copytree(ROOT, tree, ignore=_left_out)
    for file, grown in ADDED.items():
        path = tree / file
        path.parent.mkdir(exist_ok=True)
        path.write_text(grown(path.read_text() if path.exists() else ""))
    _install(tree)
    return tree


# Runs modules, one line of JSON each: a process for each of them would import torch again.
SHELL = """
import io, json, runpy, sys
from contextlib import redirect_stderr, redirect_stdout
for line in sys.stdin:
    sys.argv = json.loads(line)
    out, err, status = io.StringIO(), io.StringIO(), 0
    with redirect_stdout(out), redirect_stderr(err):
        try:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        except SystemExit as left:
            status = int(left.code or 0)
    print(json.dumps([status, out.getvalue(), err.getvalue()]), flush=True)
"""
Run = Callable[..., str]
"""The output of `python -m ARGUMENTS` in the tree. `status`: how it must end."""


@pytest.fixture(scope="module")
def run(tree: Path) -> Iterator[Run]:
    """Runs modules in a process of the tree, whose modules take precedence over the checkout's."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", SHELL], cwd=tree, stdin=pipe, stdout=pipe, text=True) as shell:
        assert shell.stdin
        assert shell.stdout
        asked, answers = shell.stdin, shell.stdout

        def run(*arguments: str, status: int | None = 0) -> str:
            print(json.dumps(arguments), file=asked, flush=True)
            ended, out, err = json.loads(answers.readline())
            assert status in (None, ended), f"{shlex.join(arguments)}: {ended}\n{out}\n{err}"
            return out

        yield run


LAWS = "conformance/kernels/laws/test_laws.py"
OPCODES = ("conformance/vm/isa/test_release_stores.py", "conformance/vm/isa/test_coverage.py")
ACCEPTANCE = "conformance/acceptance/test_acceptance.py"
SPECS = ("conformance/meta/spec/test_spec.py", "conformance/meta/house/test_more_than_one_op.py")


@pytest.fixture(scope="module")
def outcomes(tree: Path, run: Run) -> dict[str, Counter[str]]:
    """Results, by file, of the tree's tests that cover the additions."""
    (tree / "results" / "coverage.md").write_text(run("backends.vm.coverage"))
    run("conformance.acceptance")
    files = (*OPCODES, ACCEPTANCE, *SPECS)
    those = " or ".join(Path(file).stem for file in files)
    chosen = ("-k", f"(test_laws and rmsnorm and not gpu) or {those}", "--case", "rmsnorm:rows=3,hidden=96")
    quiet = ("-q", "-rA", "--tb=short", "-W", "ignore::pytest.PytestAssertRewriteWarning")
    out = run("pytest", *quiet, LAWS, *files, *chosen, status=None)
    found: dict[str, Counter[str]] = {file: Counter() for file in (LAWS, *files)}
    for outcome, file in re.findall(r"^(PASSED|FAILED|ERROR) (\S+?\.py)", out, re.MULTILINE):
        found[file][outcome.lower()] += 1
    assert sum(found.values(), Counter[str]())["passed"], f"no test ran: {out}"
    failed = [line for line in out.splitlines() if line.startswith(("E   ", "FAILED", "ERROR"))]
    print("\n".join(failed))
    return found


def _all_passed(outcomes: dict[str, Counter[str]], *files: str) -> None:
    for file in files:
        assert set(outcomes[file]) == {"passed"}, f"{file} in the tree: {dict(outcomes[file])}"


def _differing(tree: Path) -> Iterator[str]:
    """Files of the tree that differ from the checkout, except those that commands write or the gate asks for."""
    for path in tree.rglob("*"):
        name, ours = path.relative_to(tree).as_posix(), ROOT / path.relative_to(tree)
        written = (
            name.startswith(("results/", "megamoe-"))
            or "__pycache__" in name
            or name.endswith((".jsonl", "expected.yaml"))
        )
        if path.is_file() and not written and not (ours.exists() and filecmp.cmp(path, ours, shallow=False)):
            yield name


def test_a_change_costs_what_the_readme_says(tree: Path) -> None:
    """A shape takes 1 file, an op 2 and one per backend, a backend a folder and a line, an opcode 2. No other file
    differs."""
    assert (len(SHAPE), len(OP), len(KERNEL), len(LINE), len(OPCODE)) == (1, 2, 1, 1, 2)
    assert sorted(_differing(tree)) == sorted(ADDED)


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_the_pages_name_what_else_an_addition_needs(page: str) -> None:
    """Each is a command or file that the tests here use, and without which a test in the tree would fail."""
    text = " ".join((ROOT / page).read_text("utf-8").split())
    needed = ("python -m conformance.acceptance", "python -m backends.vm.coverage > results/coverage.md")
    needed += ("backends/vm/bind/availability.py", "conformance/expected.yaml", "megamoe accept")
    missing = [one for one in needed if one not in text]
    assert not missing, f"{page} does not say that an addition needs {missing}"


def test_a_new_shape_is_in_the_matrix_and_passes(run: Run) -> None:
    (row,) = json.loads(run("megamoe", "list", "--where", "t=5,s_k=77", "--json"))
    assert (row["case"], row["matrices"], row["profiles"]) == (CASE, ["edges"], ["smoke", "full", "gpu"])
    machine = ("--backend", "ptx", "--target", "sm_90a", "--jobs", "1", "--output", "shape.jsonl")
    assert "1 passed, 0 failed" in run("megamoe", "run", "--case", CASE, *machine)


def test_a_new_op_runs_and_its_gate_opens_by_its_own_advice(tree: Path, run: Run) -> None:
    """The gate prints a command that accepts the rows, and entries that excuse what the backend does not support."""
    judged = "8 passed, 0 failed, 4 unsupported"
    op = ("megamoe", "run", "--op", "rmsnorm", "--jobs", "1", "--output")
    assert judged in run(*op, "op.jsonl", status=1), "6 cases on 2 targets of the new backend"
    closed = run("megamoe", "gate", "op.jsonl", status=1).splitlines()
    assert closed[-1] == "the gate is closed: 4 unsupported rows, 8 new rows"
    (command,) = (line.partition("megamoe ")[2] for line in closed if line.startswith("All of these at once: "))
    run("megamoe", *shlex.split(command.replace("...", "a new op")))
    closed = run("megamoe", "gate", "op.jsonl", status=1).splitlines()
    assert closed[-1] == "the gate is closed: 4 unsupported rows"
    (named,) = (line for line in closed if "needs an entry in " in line)
    (file,) = re.findall(r"\w+/\w+\.yaml", named)
    with (tree / file).open("a") as expected:
        expected.writelines(f"{line}\n" for line in closed[closed.index(named) + 1 : -1])
    assert f"{judged}, 4 of these as expected" in run(*op, "again.jsonl")
    assert "the gate is open: 8 rows" in run("megamoe", "gate", "again.jsonl")


def test_a_new_opcode_is_tested_and_in_the_table(tree: Path, outcomes: dict[str, Counter[str]]) -> None:
    written = "| `st.async.release.<scope>{.<space>}.<type>` | 9.7.9.12 | document |"
    assert written in (tree / "results" / "coverage.md").read_text()
    _all_passed(outcomes, *OPCODES)


def test_a_new_opcode_is_taken_where_ptxas_takes_it(tree: Path, outcomes: dict[str, Counter[str]]) -> None:
    """The answers are older than the spelling, which ptxas must have been asked about."""
    asked, before = (
        {line for lines in json.loads(gzip.decompress(file.read_bytes()))["answers"].values() for line in lines}
        for file in (place / "results" / "acceptance.json.gz" for place in (tree, ROOT))
    )
    new = asked - before
    assert new, "the new form has no spelling that ptxas was not asked about before"
    assert all(line.startswith("st.async.release.") for line in new), sorted(new)
    _all_passed(outcomes, ACCEPTANCE)


def test_the_laws_of_every_op_are_tried_on_the_new_one(outcomes: dict[str, Counter[str]]) -> None:
    assert outcomes[LAWS] == {"passed": 8}, f"3 laws on 2 targets, and 2 tests of the laws: {outcomes[LAWS]}"


def test_the_tests_of_the_specs_and_of_many_ops_hold_for_what_was_added(outcomes: dict[str, Counter[str]]) -> None:
    _all_passed(outcomes, *SPECS)


def test_what_was_added_keeps_the_rules_of_the_house(tree: Path) -> None:
    """All other files are as in the checkout, where test_import_rules.py checks them."""
    added = {file: (tree / file).read_text() for file in ADDED if file.endswith(".py")}
    assert len(added) == 4, f"an op, a kernel, an opcode and its test were added, not {sorted(added)}"
    found = [sentence for file, text in added.items() for rule in RULES for sentence in broken(rule, file, text)]
    library = {file: text for file, text in checkout_files().items() if file.startswith(("megamoe/", "backends/"))}
    found += classes_named_twice({**library, **{file: text for file, text in added.items() if file not in library}})
    found += folders_without_a_rule([*checkout_files(), *added])
    assert not found, "\n".join(found)

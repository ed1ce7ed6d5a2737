"""The walls of the repository: who may import whom, who prints, who reads the environment; sizes, names, copies."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

import pytest

from conformance import ROOT

TOPS = ("megamoe", "backends", "conformance")
MAX_LINES = 800
MAX_FUNCTION_LINES = 90
MAX_PARAMETERS = 10
"""Maximum parameters of a signature, not counting `self` and `cls`."""
FORBIDDEN_NAMES = ("util", "utils", "helper", "helpers", "manager", "managers", "misc", "common")
ENVIRONMENT = ("os.environ", "os.environb", "os.getenv", "os.*")
TORCH_IN_VM = "backends/vm/executor.py"

# Which rooms each room may import, besides itself. `*` is any folder without its own line. `X.__init__` is the door of
# X: it registers what the folders inside X hold, and these folders share the loose files of X.
MEGAMOE = {
    "contract": "",
    "codec": "contract",
    "runner": "contract",
    "spec": "megamoe contract runner",
    "ops": "contract codec spec",
    "ops.*": "contract codec spec ops",
    "records": "megamoe contract spec",
    "diff": "contract spec records",
    "judge": "megamoe contract runner spec ops records",
    "gate": "megamoe contract spec records diff",
    "bench": "contract runner spec ops records judge",
    "explain": "contract runner spec ops records judge",
    "report": "contract spec records diff explain",
    "export": "contract runner spec ops records gate findings",
    "cli": "megamoe contract runner spec records diff judge gate bench explain report export vm cuda_source findings "
    "given",
    # The doors. Each finds its machine by entry point, so none of them imports a backend.
    "findings": "contract spec given",
    "cuda_source": "contract",
    "given": "contract",
    "vm": "contract runner findings cuda_source given",
    "triton": "contract given vm",
    "cutedsl": "contract given vm",
    "torch_cuda": "contract given vm",
    # The API for PyTorch users. megamoe/__init__.py exports its names lazily.
    "torch_ops": "megamoe contract codec spec",
    "pytest_plugin": "contract runner vm torch_cuda triton cutedsl findings export",
    "__main__": "cli",
}
VM = {
    "rules": "",
    "faults": "rules",
    "numpy_calls": "",
    "ptx": "faults",
    "numerics": "numpy_calls",
    "memory": "faults numpy_calls numerics",
    "tensor": "faults numerics",
    "machine": "faults numpy_calls ptx numerics memory",
    "bind": "faults numpy_calls ptx numerics memory tensor machine",
    "isa": "faults numpy_calls ptx numerics memory tensor machine bind",
    "load": "faults ptx machine bind isa",
    "host": "rules faults ptx memory tensor machine load",
    "trace": "faults numpy_calls ptx memory machine megamoe.contract",
    "executor": "faults ptx numerics memory tensor machine load host trace megamoe.contract",
    "coverage": "ptx bind isa",
}
KERNELS = "megamoe.contract megamoe.codec"
BACKENDS = {
    "*": KERNELS,
    "ptx": KERNELS,
    "ptx.sm100_fmha": f"{KERNELS} ptx",
    "ptx.moe": f"{KERNELS} ptx",
    "ptx.sm100_moe": f"{KERNELS} ptx ptx.moe",
    "ptx.sm90_fmha": f"{KERNELS} ptx",
    "ptx.sm90_moe": f"{KERNELS} ptx ptx.moe",
    "ptx.__init__": f"{KERNELS} ptx ptx.sm100_fmha ptx.sm100_moe ptx.sm90_fmha ptx.sm90_moe",
    "cutedsl.compile": KERNELS,
    "cutedsl": f"{KERNELS} cutedsl.compile",
    "cutedsl.sm100_fmha": f"{KERNELS} cutedsl cutedsl.compile",
    "cutedsl.moe": f"{KERNELS} cutedsl cutedsl.compile",
    "cutedsl.sm100_moe": f"{KERNELS} cutedsl cutedsl.compile cutedsl.moe",
    "cutedsl.sm90_fmha": f"{KERNELS} cutedsl cutedsl.compile",
    "cutedsl.sm90_moe": f"{KERNELS} cutedsl cutedsl.compile cutedsl.moe",
    "cutedsl.__init__": (
        f"{KERNELS} cutedsl cutedsl.compile cutedsl.sm100_fmha cutedsl.sm100_moe cutedsl.sm90_fmha cutedsl.sm90_moe"
    ),
    "vm": "",
}
# All of these may also import megamoe and backends.
CONFORMANCE = {
    "fakes": "",
    "vm": "",
    "silicon": "vm",
    "acceptance": "silicon",
    "gpu": "fakes vm",
    "bench": "fakes",
    "witness": "kernels.mutants",
    "kernels.laws": "fakes",
    "kernels.*": "fakes kernels.laws",
    "meta.*": "fakes bench kernels.laws",
}

SAME_IDEA = {
    "Address Instruction Negated Register Sink": "the VM reads PTX with no code of the backend that writes it",
    "DLTensor FfiAny FfiArray": "two encoders of one ABI, the device's and the VM's, that test each other",
}
"""Class names that may occur in two modules of megamoe and backends, and why."""

SIGNATURES_OF_OTHERS = {
    "backends/vm/host/launch_calls.py: launch_kernel": "cuLaunchKernel has 11 parameters",
    "conformance/fakes/peers_on_cpu.py: flash": "torch.ops.aten._flash_attention_forward",
    "conformance/fakes/peers_on_cpu.py: efficient": "torch.ops.aten._efficient_attention_forward",
}


def _with_prefix(prefix: str, rooms: Mapping[str, str]) -> dict[str, frozenset[str]]:
    def whole(name: str) -> str:
        return name if name.partition(".")[0] in TOPS else f"{prefix}.{name}"

    return {whole(room): frozenset(map(whole, allowed.split())) for room, allowed in rooms.items()}


TABLE: Mapping[str, frozenset[str]] = {
    "megamoe": frozenset(),
    **_with_prefix("megamoe", MEGAMOE),
    **_with_prefix("backends", BACKENDS),
    **_with_prefix("backends.vm", VM),
    **_with_prefix("conformance", CONFORMANCE),
}


# Names of modules and rooms


def _module(path: str) -> str:
    """backends/vm/ptx/ast.py -> backends.vm.ptx.ast; a package is named by its folder."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@cache
def _resolved(name: str) -> str:
    """The module that defines an imported name: megamoe.contract.Case -> megamoe.contract."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:count])
        if path.is_dir() or path.with_suffix(".py").exists():
            return ".".join(parts[:count])
    return name


def room_of(module: str, table: Mapping[str, frozenset[str]] = TABLE) -> str | None:
    """The innermost room of `table` that holds `module`, or None."""
    if f"{module}.__init__" in table:
        return f"{module}.__init__"
    parts = module.split(".")
    for count in range(len(parts), 0, -1):
        name = ".".join(parts[:count])
        if name in table or f"{name.rpartition('.')[0]}.*" in table:
            return name
    return None


def allowed(room: str) -> frozenset[str]:
    """The rooms that `room` may import."""
    return TABLE[room] if room in TABLE else TABLE[f"{room.rpartition('.')[0]}.*"]


_LOOKED_AT = (ast.JoinedStr,
    ast.Import, ast.ImportFrom, ast.Call, ast.Attribute, ast.Subscript, ast.ClassDef, ast.FunctionDef,
    ast.AsyncFunctionDef,
)  # fmt: skip


@cache
def _nodes(tree: ast.AST) -> tuple[ast.AST, ...]:
    """The nodes of a tree that any rule inspects. Cached, so that the tree is walked once for all rules."""
    return tuple(node for node in ast.walk(tree) if isinstance(node, _LOOKED_AT))


def _last_name(call: ast.Call) -> str:
    """`c` for a call of `a.b.c`; "" if the callee has no name."""
    func = call.func
    return func.attr if isinstance(func, ast.Attribute) else func.id if isinstance(func, ast.Name) else ""


def imports(path: str, tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Absolute names that a file imports, whether lazily or for types only, with their line numbers."""
    parent = _module(path).split(".") if path.endswith("__init__.py") else _module(path).split(".")[:-1]
    for node in _nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = parent[: len(parent) - node.level + 1] if node.level else []
            start = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((f"{start}.{alias.name}", node.lineno) for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = _last_name(node).endswith(("import_module", "__import__"))
            if called and isinstance(node.args[0].value, str):
                yield node.args[0].value, node.lineno


# The rules. Each takes a path, relative to the checkout, its text and its tree, and yields sentences.

Rule = Callable[[str, str, ast.Module], Iterator[str]]


def rooms_keep_to_the_table(path: str, text: str, tree: ast.Module) -> Iterator[str]:
    """A room imports itself and the rooms in its line of the table."""
    room = room_of(_module(path))
    for name, line in imports(path, tree):
        top = name.partition(".")[0]
        if top not in TOPS or name == top != "megamoe":
            continue
        if path.startswith("conformance/"):
            # Conformance may import everything, but its own rooms import each other only by the table.
            if top != "conformance" or room is None:
                continue
        elif top == "conformance":
            yield f"{path}:{line}: conformance may be imported by conformance alone, not {name}"
            continue
        seen = room_of(_resolved(name))
        if room is None or (room == "megamoe" and "/" in path.removeprefix("megamoe/")):
            yield f"{path}:{line}: the table has no line for this room; add one to test_import_rules.py"
        elif seen is not None and seen != room and seen not in allowed(room):
            may = ", ".join(sorted(allowed(room))) or "no other room"
            yield f"{path}:{line}: {room} may import {may}, not {name}"


def torch_stays_out_of_the_vm(path: str, text: str, tree: ast.Module) -> Iterator[str]:
    """The machine runs on NumPy; only its executor takes tensors."""
    if path.startswith("backends/vm/") and path != TORCH_IN_VM:
        for name, line in imports(path, tree):
            if name == "torch" or name.startswith("torch."):
                yield f"{path}:{line}: torch in backends.vm is for its executor.py, not {name}"


def configuration_comes_in_by_three_doors(path: str, text: str, tree: ast.Module) -> Iterator[str]:
    """Only noxfile, conftest and cli read the environment. Setting a variable for a library is not reading.

    The judge's worker and the runner pass the whole environment to their processes and read no variable.
    """
    if (
        path in ("noxfile.py", "megamoe/judge/worker.py")
        or path.startswith(("megamoe/runner/", "megamoe/cli/"))
        or path.endswith("conftest.py")
    ):
        return
    stored = (ast.Store, ast.Del)
    written = {id(n.value) for n in _nodes(tree) if isinstance(n, ast.Subscript) and isinstance(n.ctx, stored)}
    for node in _nodes(tree):
        if isinstance(node, ast.Attribute):
            if f"os.{node.attr}" not in ENVIRONMENT:
                continue
            reads = f"{ast.unparse(node.value)}.{node.attr}" in ENVIRONMENT and id(node) not in written
        elif isinstance(node, ast.ImportFrom):
            reads = any(f"{node.module}.{one.name}" in ENVIRONMENT for one in node.names)
        else:
            continue
        if reads:
            yield f"{path}:{node.lineno}: only noxfile, conftest and cli read the environment"


def only_cli_prints(path: str, text: str, tree: ast.Module) -> Iterator[str]:
    """In the library and the backends, only cli and modules that are commands write to a terminal.

    The door megamoe/vm.py passes on what kernels print.
    """
    if (
        path.startswith(("megamoe/cli/", "conformance/"))
        or path
        in (
            "noxfile.py",
            "megamoe/vm.py",
        )
        or _is_a_command(path, tree)
    ):
        return
    for node in _nodes(tree):
        if isinstance(node, ast.Call) and (_last_name(node) in ("print", "Console") or "sys.std" in text):
            called = ast.unparse(node.func)
            if called.rpartition(".")[2] in ("print", "Console") or called.startswith(("sys.stdout", "sys.stderr")):
                yield f"{path}:{node.lineno}: only cli prints, not {called}()"


def _is_a_command(path: str, tree: ast.Module) -> bool:
    tests = (ast.unparse(node.test) for node in tree.body if isinstance(node, ast.If))
    return path.endswith("__main__.py") or "__name__ == '__main__'" in tests


def nothing_is_longer_than_a_reader_bears(path: str, text: str, tree: ast.Module) -> Iterator[str]:
    """Files, functions and signatures have limits."""
    if (lines := text.count("\n")) > MAX_LINES:
        yield f"{path}: {lines} lines; a file has at most {MAX_LINES}"
    for node in _nodes(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if (lines := (node.end_lineno or node.lineno) - node.lineno + 1) > MAX_FUNCTION_LINES:
            yield f"{path}:{node.lineno}: {node.name} has {lines} lines; a function has at most {MAX_FUNCTION_LINES}"
        given = node.args
        names = [one.arg for one in (*given.posonlyargs, *given.args)]
        count = len(names) - (names[:1] in (["self"], ["cls"])) + len(given.kwonlyargs)
        if count > MAX_PARAMETERS and f"{path}: {node.name}" not in SIGNATURES_OF_OTHERS:
            yield f"{path}:{node.lineno}: {node.name} has {count} parameters; a signature has at most {MAX_PARAMETERS}"


def names_say_what_is_inside(path: str, text: str, tree: ast.Module) -> Iterator[str]:
    """A file or folder is named after what it holds."""
    words = {word for part in Path(path).with_suffix("").parts for word in part.split("_")}
    yield from (f"{path}: {word!r} says nothing about what is in it" for word in sorted(words & set(FORBIDDEN_NAMES)))


def a_room_states_its_rule(path: str, text: str, tree: ast.Module) -> Iterator[str]:
    """The first paragraph of an __init__.py is one sentence: the room's rule. More may follow."""
    if path.endswith("/__init__.py"):
        rule = " ".join((ast.get_docstring(tree) or "").split("\n\n")[0].split())
        sentences = len(re.findall(r"\.(?= |$)", rule))
        if not rule.endswith(".") or sentences != 1:
            fault = "does not end with a full stop" if rule and not rule.endswith(".") else f"has {sentences} sentences"
            yield (
                f"{path}: the first paragraph of the docstring is the rule of this room, one sentence; {rule!r} "
                f"{fault if rule else 'is no sentence'}"
            )


def numbers_of_things_are_counted(path: str, text: str, tree: ast.Module) -> Iterator[str]:
    """A sentence says "1 row", so `counted` writes the numbers of things."""
    if not path.startswith(("megamoe/", "conformance/kernels/mutants/")) or Path(path).name.startswith("test_"):
        return
    texts = (node for node in _nodes(tree) if isinstance(node, ast.JoinedStr))
    for number, after in (pair for node in texts for pair in pairwise(node.values)):
        if not isinstance(number, ast.FormattedValue) or not isinstance(after, ast.Constant):
            continue
        said = ast.unparse(number.value)
        things = re.match(r" (?:more )?([a-z]+s)\b", str(after.value))
        if said.startswith("len(") and things and things[1] not in VERBS:
            yield f"{path}:{number.lineno}: {{{said}}}{things[0]} is wrong for 1; use megamoe.contract.counted"


VERBS = ("is", "has", "was", "holds", "shows")
"""Words behind a number that are no things."""
RULES: tuple[Rule, ...] = (
    rooms_keep_to_the_table,
    torch_stays_out_of_the_vm,
    configuration_comes_in_by_three_doors,
    only_cli_prints,
    nothing_is_longer_than_a_reader_bears,
    names_say_what_is_inside,
    a_room_states_its_rule,
    numbers_of_things_are_counted,
)


def classes_named_twice(files: Mapping[str, str]) -> list[str]:
    """Public class names defined in two modules and not in SAME_IDEA, and names in SAME_IDEA that no longer are."""
    places: dict[str, list[str]] = defaultdict(list)
    for path, text in files.items():
        for node in _nodes(_tree(text)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(path)
    twice = {name: paths for name, paths in places.items() if len(paths) > 1}
    kept = {name for names in SAME_IDEA for name in names.split()}
    found = [f"class {name} stands in {' and '.join(twice[name])}: rename one" for name in sorted(set(twice) - kept)]
    return found + [f"class {name} stands in one place: strike it from SAME_IDEA" for name in sorted(kept - set(twice))]


def folders_without_a_rule(paths: list[str]) -> list[str]:
    """Python folders without an __init__.py."""
    folders = {Path(path).parent.as_posix() for path in paths} - {"."}
    return sorted(folder for folder in folders if f"{folder}/__init__.py" not in paths)


def checkout_files() -> dict[str, str]:
    """Every Python file of the repository, with its text."""
    found = [file for top in TOPS for file in (ROOT / top).rglob("*.py")]
    found += [file for name in ("noxfile.py", "conftest.py") if (file := ROOT / name).exists()]
    return {file.relative_to(ROOT).as_posix(): file.read_text("utf-8") for file in sorted(found)}


def broken(rule: Rule, path: str, text: str) -> list[str]:
    """One rule's sentences about one file."""
    return list(rule(path, text, _tree(text)))


@cache
def _tree(text: str) -> ast.Module:
    return ast.parse(text)


# The house


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_file_keeps_the_rule(rule: Rule) -> None:
    files = checkout_files()
    assert len(files) > 20, "the walk must find the house"
    found = [sentence for path, text in files.items() for sentence in broken(rule, path, text)]
    assert not found, "\n".join(found)


def test_the_table_has_no_circle() -> None:
    tuple(TopologicalSorter(TABLE).static_order())
    with pytest.raises(CycleError):
        tuple(TopologicalSorter({**TABLE, "megamoe.contract": {"megamoe.cli"}}).static_order())


def test_the_table_speaks_of_rooms_that_are_there() -> None:
    named = set(TABLE) | {room for rooms in TABLE.values() for room in rooms}
    for room in sorted(named):
        path = ROOT.joinpath(*room.removesuffix(".*").split("."))
        assert path.is_dir() or path.with_suffix(".py").exists(), f"{room} is in the table, but not in the house"


def test_every_folder_has_a_rule() -> None:
    assert not (missing := folders_without_a_rule(list(checkout_files()))), (
        f"{missing} need an __init__.py with their rule"
    )
    assert folders_without_a_rule(["a/__init__.py", "a/b/c.py"]) == ["a/b"], "a folder without a rule goes unseen"


def test_no_class_name_stands_twice() -> None:
    files = {path: text for path, text in checkout_files().items() if path.startswith(("megamoe/", "backends/"))}
    assert not (found := classes_named_twice(files)), "\n".join(found)
    planted = classes_named_twice({**files, "backends/x.py": "class Case: ..."})
    assert planted == ["class Case stands in megamoe/contract/case.py and backends/x.py: rename one"]


def test_a_signature_of_others_is_still_long() -> None:
    for name in SIGNATURES_OF_OTHERS:
        path, _, function = name.partition(": ")
        assert f"def {function}(" in (ROOT / path).read_text("utf-8"), f"{name} is gone: strike it"


PLANTED = [
    (rooms_keep_to_the_table, "megamoe/judge/x.py", "import backends.vm", "may import"),
    (rooms_keep_to_the_table, "megamoe/judge/x.py", "from megamoe.cli import main", "megamoe.judge may import"),
    (rooms_keep_to_the_table, "megamoe/judge/x.py", "def f():\n    from ..cli import main", "megamoe.judge may import"),
    (
        rooms_keep_to_the_table,
        "megamoe/contract/x.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from megamoe.spec.spec import Spec",
        "megamoe.contract may import no other room",
    ),
    (rooms_keep_to_the_table, "megamoe/contract/x.py", "from megamoe import CHECKOUT", "no other room"),
    (rooms_keep_to_the_table, "megamoe/spec/x.py", "from conformance import fakes", "by conformance alone"),
    (rooms_keep_to_the_table, "megamoe/new_room/x.py", "from megamoe.contract import Case", "no line for this room"),
    (
        rooms_keep_to_the_table,
        "megamoe/gate/x.py",
        "from importlib import import_module\nimport_module('backends.ptx')",
        "megamoe.gate may import",
    ),
    (rooms_keep_to_the_table, "megamoe/ops/rmsnorm.py", "from megamoe.ops.nvfp4_moe import inputs", "ops.rmsnorm may"),
    (rooms_keep_to_the_table, "backends/ptx/x.py", "from backends import vm", "backends.ptx may import"),
    (rooms_keep_to_the_table, "backends/ptx/x.py", "from .. import vm", "backends.ptx may import"),
    (rooms_keep_to_the_table, "backends/ptx/__init__.py", "from ..vm.ptx import ast", "backends.ptx.__init__ may"),
    (rooms_keep_to_the_table, "backends/ptx/x.py", "from megamoe.ops import reference", "backends.ptx may import"),
    (rooms_keep_to_the_table, "backends/ptx/sm100_moe/x.py", "from backends.ptx.sm90_fmha import mma", "may import"),
    (rooms_keep_to_the_table, "backends/mine/x.py", "import backends.ptx.builder", "backends.mine may import"),
    (rooms_keep_to_the_table, "backends/mine/x.py", "import conformance.fakes", "by conformance alone"),
    (rooms_keep_to_the_table, "backends/vm/isa/x.py", "from megamoe.contract import Program", "backends.vm.isa may"),
    (rooms_keep_to_the_table, "backends/vm/memory/x.py", "from backends.vm.machine import warp", "vm.memory may"),
    (rooms_keep_to_the_table, "backends/vm/machine/x.py", "from backends.vm.bind import binder", "vm.machine may"),
    (rooms_keep_to_the_table, "backends/vm/executor.py", "from megamoe.codec import nvfp4", "vm.executor may"),
    (rooms_keep_to_the_table, "conformance/fakes/x.py", "import conformance.kernels.laws.law", "conformance.fakes may"),
    (torch_stays_out_of_the_vm, "backends/vm/isa/x.py", "import torch.nn", "torch in backends.vm"),
    (configuration_comes_in_by_three_doors, "megamoe/x.py", "import os\nx = os.environ['HOME']", "environment"),
    (configuration_comes_in_by_three_doors, "megamoe/x.py", "import os\nx = os.getenv('HOME')", "environment"),
    (configuration_comes_in_by_three_doors, "megamoe/cli_x.py", "from os import environ", "environment"),
    (configuration_comes_in_by_three_doors, "backends/vm/x.py", "import os\nx = dict(os.environ)", "environment"),
    (configuration_comes_in_by_three_doors, "conformance/x.py", "import os\nx = os.environ.get('CI')", "environment"),
    (only_cli_prints, "megamoe/report/x.py", "print(1)", "only cli prints, not print()"),
    (only_cli_prints, "megamoe/report/x.py", "from rich.console import Console\nConsole().print(1)", "only cli prints"),
    (only_cli_prints, "backends/ptx/x.py", "import sys\nsys.stdout.write('x')", "only cli prints"),
    (nothing_is_longer_than_a_reader_bears, "megamoe/x.py", "x = 1\n" * (MAX_LINES + 1), "a file has at most"),
    (
        nothing_is_longer_than_a_reader_bears,
        "megamoe/x.py",
        "def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES,
        "a function has at most",
    ),
    (
        nothing_is_longer_than_a_reader_bears,
        "backends/x.py",
        f"class A:\n    def f(self, {', '.join(f'p{i}' for i in range(9))}, *, q, r): ...",
        "f has 11 parameters",
    ),
    (names_say_what_is_inside, "megamoe/utils.py", "", "says nothing"),
    (names_say_what_is_inside, "megamoe/helpers/x.py", "", "says nothing"),
    (names_say_what_is_inside, "backends/vm/warp_manager.py", "", "says nothing"),
    (a_room_states_its_rule, "megamoe/x/__init__.py", "", "'' is no sentence"),
    (a_room_states_its_rule, "megamoe/x/__init__.py", '"""Rows and columns"""', "does not end with a full stop"),
    (a_room_states_its_rule, "megamoe/x/__init__.py", '"""Rows. And columns."""', "has 2 sentences"),
    (numbers_of_things_are_counted, "megamoe/x.py", 'f"a {len(x)} rows"', "{len(x)} rows is wrong for 1"),
    (
        numbers_of_things_are_counted,
        "megamoe/x.py",
        'f"and {len(x) - 2:,} more rows"',
        "{len(x) - 2} more rows is wrong",
    ),
]


@pytest.mark.parametrize(("rule", "path", "text", "sentence"), PLANTED)
def test_a_planted_fault_is_caught(rule: Rule, path: str, text: str, sentence: str) -> None:
    found = broken(rule, path, text)
    assert any(sentence in one for one in found), f"{path}: {text[:60]!r} must be caught: {found}"


def test_every_rule_has_a_planted_fault() -> None:
    assert set(RULES) == {rule for rule, *_ in PLANTED}


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (
            "backends/ptx/x.py",
            "from megamoe.contract import Program\nfrom backends.ptx.builder import Builder\nfrom . import operands",
        ),
        ("backends/mine/x.py", "from megamoe.codec.nvfp4 import pack\nfrom backends.mine import y\nimport torch"),
        ("backends/vm/isa/x.py", "from backends.vm.machine.warp import Warp\nfrom .forms import opcode\nimport numpy"),
        ("backends/vm/executor.py", "import torch\nfrom megamoe.contract import Program"),
        ("backends/vm/x.py", "if __name__ == '__main__':\n    print(1)"),
        ("megamoe/ops/rmsnorm.py", "from megamoe.ops import Latitude\nfrom megamoe.spec.draws import normal"),
        ("megamoe/cli/x.py", "import os\nprint(os.environ)"),
        ("megamoe/gate/x.py", "import os\nos.environ['OMP_NUM_THREADS'] = '1'"),
        ("conformance/meta/gate/x.py", "import backends.vm, megamoe.cli.main, torch, conformance.fakes.results"),
        ("megamoe/x/__init__.py", '"""Rows.\n\nAnd more. Much more."""'),
    ],
)
def test_what_is_allowed_passes(path: str, text: str) -> None:
    assert [sentence for rule in RULES for sentence in broken(rule, path, text)] == []


def test_the_example_of_a_backend_may_become_a_room() -> None:
    text = (ROOT / "examples" / "my_backend.py").read_text("utf-8")
    assert [sentence for rule in RULES for sentence in broken(rule, "backends/mine/__init__.py", text)] == []


MIN_LINES = 4
"""Shorter bodies may be alike by nature: an entry's name, an error class."""


def copies(sources: Mapping[str, str]) -> list[str]:
    """Functions whose bodies, without docstrings and annotations, occur in two modules, as "a.py: f = b.py: g"."""
    first: dict[str, str] = {}
    found: list[str] = []
    for path, text in sources.items():
        for node in ast.parse(text).body:
            if not isinstance(node, ast.FunctionDef):
                continue
            body = node.body[1:] if ast.get_docstring(node) else node.body
            spelt = "\n".join(ast.unparse(one) for one in body)
            if len(spelt.splitlines()) < MIN_LINES:
                continue
            here = f"{path}: {node.name}"
            there = first.setdefault(spelt, here)
            found += [] if there == here else [f"{there} = {here}"]
    return found


def test_no_kernel_of_the_ptx_backend_has_a_copy_of_another_s_function() -> None:
    files = sorted((ROOT / "backends" / "ptx").rglob("*.py"))
    assert len(files) > 20, "the kernels are not where they are looked for"
    found = copies({file.relative_to(ROOT).as_posix(): file.read_text("utf-8") for file in files})
    assert not found, f"one module of backends/ptx should have it: {found}"


def test_a_copy_is_found_whatever_its_docstring_and_annotations() -> None:
    body = "    y = x.let('y', 'mov.u32', 1)\n    x.emit('a', y)\n    x.emit('b', y)\n    return y\n"
    one, other = f'def f(x: One):\n    """One."""\n{body}', f'def g(x: Other):\n    """Other."""\n{body}'
    assert copies({"a.py": one, "b.py": other}) == ["a.py: f = b.py: g"], "a copy goes unseen"
    assert copies({"a.py": one, "b.py": other.replace("'b'", "'c'")}) == [], "what differs is no copy"

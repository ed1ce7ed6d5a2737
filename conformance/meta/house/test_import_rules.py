"""Who may import whom, who may read the environment, and the size and names of files: the walls of the house."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from conformance import ROOT

ROOMS = ("megamoe", "backends", "conformance")
MAX_LINES = 450
FORBIDDEN_NAMES = ("util", "utils", "helper", "helpers", "manager", "managers", "misc", "common")
ENVIRONMENT = ("os.environ", "os.environb", "os.getenv", "os.*")
TORCH_IN_VM = "backends/vm/executor.py"


def _files() -> list[Path]:
    found = [file for room in ROOMS for file in (ROOT / room).rglob("*.py")]
    return sorted(found + [file for name in ("noxfile.py", "conftest.py") if (file := ROOT / name).exists()])


def _module(path: str) -> str:
    """backends/vm/ptx/ast.py -> backends.vm.ptx.ast; a package is named by its folder."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imports(path: str, tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Absolute names of the modules that a file imports, lazily or not, and the lines on which it does."""
    parent = _module(path).split(".") if path.endswith("__init__.py") else _module(path).split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = parent[: len(parent) - node.level + 1] if node.level else []
            start = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((f"{start}.{alias.name}", node.lineno) for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = ast.unparse(node.func)
            if called.endswith(("import_module", "__import__")) and isinstance(node.args[0].value, str):
                yield node.args[0].value, node.lineno


def _within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def import_problem(path: str, name: str) -> str | None:
    """Why the file at `path` must not import `name`, or None if it may."""
    ours = any(_within(name, room) for room in ROOMS)
    if path.startswith("backends/vm/"):
        if ours and not _within(name, "backends.vm"):
            return "backends.vm imports nothing of ours but itself"
        return "torch in backends.vm is for its executor.py" if _within(name, "torch") and path != TORCH_IN_VM else None
    if path.startswith("backends/"):
        room = ".".join(_module(path).split(".")[:2])
        if ours and not _within(name, "megamoe") and not _within(name, room) and name != "backends":
            return f"{room} imports megamoe and itself, never a sibling"
    if path.startswith("megamoe/") and ours and not _within(name, "megamoe"):
        return "megamoe imports nothing of ours but itself"
    return None


def environment_reads(tree: ast.AST) -> Iterator[int]:
    """Lines that read the environment. Setting os.environ[...] for a library loaded later is not reading."""
    written = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Subscript) and _stores(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if f"{ast.unparse(node.value)}.{node.attr}" in ENVIRONMENT and id(node) not in written:
                yield node.lineno
        elif isinstance(node, ast.ImportFrom) and any(f"{node.module}.{one.name}" in ENVIRONMENT for one in node.names):
            yield node.lineno


def _stores(node: ast.Subscript) -> bool:
    return isinstance(node.ctx, ast.Store | ast.Del)


def may_read_environment(path: str) -> bool:
    """Configuration comes in through these files only."""
    return path == "noxfile.py" or path.endswith("conftest.py") or path.startswith("megamoe/cli")


def problems(path: str, text: str) -> list[str]:
    """Every rule that a file with this path (relative to the repository) and this text breaks."""
    tree = ast.parse(text)
    found = [
        f"{path}:{line}: {why}, not {name}" for name, line in imports(path, tree) if (why := import_problem(path, name))
    ]
    if not may_read_environment(path):
        found += [
            f"{path}:{line}: only noxfile, conftest and cli read the environment" for line in environment_reads(tree)
        ]
    lines = text.count("\n")
    if lines > MAX_LINES:
        found.append(f"{path}: {lines} lines; a file has at most {MAX_LINES}")
    words = {word for part in Path(path).with_suffix("").parts for word in part.split("_")}
    found += [f"{path}: {word!r} says nothing about what is in it" for word in sorted(words & set(FORBIDDEN_NAMES))]
    return found


def test_every_file_keeps_the_rules() -> None:
    files = _files()
    assert len(files) > 20, "the walk must find the house"
    broken = [
        problem for file in files for problem in problems(file.relative_to(ROOT).as_posix(), file.read_text("utf-8"))
    ]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(
    ("path", "text", "rule"),
    [
        ("megamoe/x.py", "import backends.vm", "nothing of ours but itself"),
        ("megamoe/x.py", "def f():\n    from conformance.meta import fakes", "nothing of ours but itself"),
        ("megamoe/x.py", "from importlib import import_module\nimport_module('backends.ptx')", "nothing of ours"),
        ("backends/ptx/x.py", "from backends import vm", "never a sibling"),
        ("backends/ptx/x.py", "from .. import vm", "never a sibling"),
        ("backends/ptx/__init__.py", "from ..vm import ast", "never a sibling"),
        ("backends/ptx/x.py", "import conformance.meta", "never a sibling"),
        ("backends/vm/x.py", "from megamoe.contract import Program", "nothing of ours but itself"),
        ("backends/vm/executor.py", "import megamoe", "nothing of ours but itself"),
        ("backends/vm/x.py", "import torch.nn", "torch in backends.vm"),
        ("megamoe/x.py", "import os\nprint(os.environ['HOME'])", "read the environment"),
        ("megamoe/x.py", "import os\nprint(os.getenv('HOME'))", "read the environment"),
        ("megamoe/x.py", "from os import environ", "read the environment"),
        ("backends/vm/x.py", "import os\nx = dict(os.environ)", "read the environment"),
        ("conformance/meta/x.py", "import os\nx = os.environ.get('CI')", "read the environment"),
        ("megamoe/x.py", "x = 1\n" * (MAX_LINES + 1), "at most"),
        ("megamoe/utils.py", "", "says nothing"),
        ("megamoe/helpers/x.py", "", "says nothing"),
        ("backends/vm/warp_manager.py", "", "says nothing"),
    ],
)
def test_a_planted_fault_is_caught(path: str, text: str, rule: str) -> None:
    assert any(rule in problem for problem in problems(path, text)), f"{path}: {text[:60]!r} must be caught"


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (
            "backends/ptx/x.py",
            "from megamoe.contract import Program\nfrom backends.ptx import y\nfrom . import z\nimport torch",
        ),
        ("backends/vm/x.py", "from backends.vm import ast\nfrom .ast import Module\nimport numpy"),
        ("backends/vm/executor.py", "import torch"),
        ("megamoe/cli_x.py", "import os\nprint(os.environ)"),
        ("megamoe/x.py", "import os\nos.environ['OMP_NUM_THREADS'] = '1'"),
        ("conformance/meta/x.py", "import backends.vm, megamoe, torch"),
    ],
)
def test_what_is_allowed_passes(path: str, text: str) -> None:
    assert problems(path, text) == []

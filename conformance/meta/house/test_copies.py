"""What the kernels of one backend share is written once: no body of a function stands in two modules of it."""

from __future__ import annotations

import ast
from collections.abc import Mapping

from conformance import ROOT

MIN_LINES = 4
"""A body of fewer lines may be alike by nature: the name of an entry, a class of errors."""


def copies(sources: Mapping[str, str]) -> list[str]:
    """The functions whose bodies, docstrings and annotations aside, stand in two modules, as "a.py: f = b.py: g"."""
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

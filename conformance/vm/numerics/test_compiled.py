"""Machine code is compiled once, found again by later processes, and never confused with that of another text."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import pytest
from llvmlite import ir

from backends.vm.numerics import compiled
from backends.vm.numerics.traced import INDEX, Traced


class _Shelf(dict[str, bytes]):
    """A cache that keeps what it is given."""

    def kept(self, name: str, decoded: Callable[[bytes], bytes]) -> bytes | None:
        return decoded(self[name]) if name in self else None

    def keep(self, name: str, content: bytes) -> None:
        self[name] = content


def _adds(number: int, table: np.ndarray[tuple[int], np.dtype[np.int64]] | None = None) -> ir.Module:
    """`i64 entry(i64 x)`: x + number, or element x + number of a table."""
    module = ir.Module("adds")
    made = ir.Function(module, ir.FunctionType(INDEX, [INDEX]), compiled.ENTRY)
    b = ir.IRBuilder(made.append_basic_block())
    found = Traced(b, np.int64, b.add(made.args[0], ir.Constant(INDEX, number)))
    b.ret((found if table is None else found.of(table)).value)
    return module


def _called(address: int, x: int) -> int:
    return int(ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(address)(x))


class _Linker:
    """Accepts objects and runs none: a second real linker in one process would free the first one's code."""

    def __init__(self) -> None:
        self.taken = list[object]()

    def add_object_file(self, file: object) -> None:
        self.taken.append(file)

    def finalize_object(self) -> None:
        pass

    def get_function_address(self, name: str) -> int:
        return int(name.removeprefix(f"{compiled.ENTRY}_")[:8], 16)


def test_machine_code_is_found_by_the_next_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code on the shelf is linked and not compiled again; another text has another name."""
    shelf, linker = _Shelf(), _Linker()
    monkeypatch.setattr(compiled, "_shelf", shelf)
    monkeypatch.setattr(compiled, "_addresses", {})
    assert _called(compiled.linked(_adds(5)), 2) == 7
    assert len(shelf) == 1, f"one function was made, and the shelf has {list(shelf)}"
    (name,) = shelf
    monkeypatch.setattr(compiled, "_addresses", {})
    monkeypatch.setattr(compiled, "_linker", lambda: linker)
    monkeypatch.setattr(compiled.llvm, "parse_assembly", _refused)
    assert compiled.linked(_adds(5)) == int(name[:8], 16), "the next process looks for another function"
    assert len(linker.taken) == 1, f"{len(linker.taken)} objects were linked"
    with pytest.raises(AssertionError, match="made again"):
        compiled.linked(_adds(6))


def _refused(text: str) -> object:
    raise AssertionError("machine code was made again")


def test_machine_code_that_says_where_a_table_lies_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table of another process has another address."""
    shelf = _Shelf()
    monkeypatch.setattr(compiled, "_shelf", shelf)
    assert _called(compiled.linked(_adds(1, np.array([3, 4, 50]))), 1) == 50
    assert not shelf, f"{list(shelf)} would be run where the table is not"

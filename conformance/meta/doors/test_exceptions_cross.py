"""An exception that crosses to another process, as a pickle, arrives with its type, its text and its fields."""

from __future__ import annotations

import importlib
import inspect
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from types import WrapperDescriptorType
from typing import Any

import pytest

from backends.vm.faults import Fault, OtherAccess, SourcePlace, UnknownInstructionError
from backends.vm.load import load
from backends.vm.ptx.tree import PtxSyntaxError
from conformance import ROOT
from conformance.meta.doors.test_findings import kernel
from megamoe.contract import DeviceLostError
from megamoe.contract.machine import LaunchRefusedError
from megamoe.findings import KernelFinding

PLACE = SourcePlace("kernel.cu", 3, 5, "f")
GIVEN: dict[str, object] = {
    "str": "a sentence",
    "str | None": "an axis",
    "int": 7,
    "int | None": 8,
    "bool": True,
    "float": 0.5,
    "KeyPath": ("rows", 0),
    "Path | None": Path("spec.yaml"),
    "Placed | None": None,
    "list[str]": ["waits"],
    "Sequence[Any]": (KernelFinding("race", "error", "a detail", "k"),),
    "Sequence[tuple[int, str]]": ((3, "one sentence"), (4, "another")),
    "tuple[SourcePlace, ...]": (PLACE,),
    "OtherAccess | None": OtherAccess("warp 1", "wrote", 9, (PLACE,), True),
    "LaunchRefusedError": LaunchRefusedError("a sentence", 1),
}
"""An argument of a constructor by its annotation."""
OWN = ("megamoe", "backends")


_EXCEPTION = re.compile(r"^ *class \w+\(.*(?:Error|Exception|Fault)\b", re.MULTILINE)


def _modules() -> Iterator[str]:
    """The modules that define exceptions. To import all others would take a minute."""
    for top in OWN:
        for path in sorted(ROOT.joinpath(top).rglob("*.py")):
            if _EXCEPTION.search(path.read_text("utf-8")):
                yield ".".join(path.relative_to(ROOT).with_suffix("").parts)


def _below(kind: type[BaseException]) -> Iterator[type[BaseException]]:
    for one in kind.__subclasses__():
        yield one
        yield from _below(one)


def _classes() -> list[type[BaseException]]:
    """Every exception class of megamoe and backends whose module can be imported here."""
    for name in _modules():
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as lacking:
            # An extra that is not installed, such as CuTeDSL.
            if (lacking.name or "").partition(".")[0] in OWN:
                raise
    own = {one for one in _below(BaseException) if one.__module__.partition(".")[0] in OWN}
    return sorted(own, key=lambda one: (one.__module__, one.__qualname__))


def _made(kind: type[BaseException]) -> Iterator[BaseException]:
    """An exception with every argument in its place, as far as may be, and one with every argument by name."""
    if isinstance(kind.__init__, WrapperDescriptorType):  # Python's own
        yield kind("a sentence")
        return
    wanted = list(inspect.signature(kind.__init__).parameters.values())[1:]
    lacking = [one for one in wanted if str(one.annotation) not in GIVEN]
    assert not lacking, f"{kind.__qualname__}: GIVEN has no example of {lacking}"
    values = [(one, GIVEN[str(one.annotation)]) for one in wanted]
    by_name = {one.name: value for one, value in values if one.kind is one.KEYWORD_ONLY}
    yield kind(*(value for one, value in values if one.name not in by_name), **by_name)
    yield kind(**{one.name: value for one, value in values})


def _told(error: BaseException) -> tuple[object, ...]:
    """Type, text and fields; of exceptions among the fields the same."""
    slots = [name for kind in type(error).__mro__ for name in getattr(kind, "__slots__", ())]
    fields = {name: getattr(error, name) for name in slots} | vars(error)
    return type(error), str(error), {name: _plain(value) for name, value in sorted(fields.items())}


def _plain(value: Any) -> object:
    if isinstance(value, BaseException):
        return _told(value)
    return tuple(map(_plain, value)) if isinstance(value, tuple) else value  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]


def lost_by(error: BaseException) -> str:
    """What a round trip does to an exception, "" for nothing."""
    try:
        back = pickle.loads(pickle.dumps(error))
    except Exception as problem:
        return f"{type(error).__qualname__} cannot be pickled and read back: {problem!r}"
    before, after = _told(error), _told(back)
    return "" if before == after else f"{type(error).__qualname__} was {before}\nand is {after}"


@pytest.fixture(autouse=True)
def _the_device_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceLostError, "met", None)


def test_every_exception_survives_the_way_to_another_process() -> None:
    classes = _classes()
    assert {Fault, PtxSyntaxError, DeviceLostError} <= set(classes), "the search misses classes"
    made = [one for kind in classes for one in _made(kind)]
    for one in made:
        one.add_note("a note of whoever let it pass")
    lost = [said for one in made if (said := lost_by(one))]
    assert not lost, "\n".join(lost)


class _TwoParts(Exception):
    def __init__(self, one: str, other: str) -> None:
        super().__init__(f"{one}, {other}")


class _Slotted(Exception):
    __slots__ = ("line",)

    def __init__(self, text: str, line: int = 0) -> None:
        super().__init__(text)
        self.line = line


class _Decorated(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(f"{text}; that is all")


@pytest.mark.parametrize(("planted", "said"), [
    (_TwoParts("a", "b"), "_TwoParts cannot be pickled"), (_Slotted("a", 3), "_Slotted was"),
    (_Decorated("a"), "that is all; that is all"),
])  # fmt: skip
def test_a_planted_exception_that_does_not_survive_is_caught(planted: Exception, said: str) -> None:
    assert said in lost_by(planted)


def test_a_lost_device_is_lost_only_where_it_was() -> None:
    content = pickle.dumps(DeviceLostError("cuLaunchKernel returned 700"))
    DeviceLostError.met = None
    assert "cuLaunchKernel" in str(pickle.loads(content))
    assert DeviceLostError.met is None, "this process has read of a lost device, and has lost none"


def test_what_is_wrong_with_a_text_survives_with_its_other_errors_and_the_rest() -> None:
    text = kernel("  mov.u32 %r1, nobody;\n  mov.u32 %r1, nobody_else;\n  frobnicate.u32 %r1;\n")
    with pytest.raises(PtxSyntaxError) as caught:
        load(text)
    first = caught.value.__context__
    assert isinstance(first, PtxSyntaxError)
    assert first.others, "the plant holds one error, no more"
    assert first.rest is not None, "the plant has no rest"
    for error in (caught.value, first):
        assert not lost_by(error), lost_by(error)
    assert pickle.loads(pickle.dumps(first)).rest == first.rest


def test_many_refusals_survive() -> None:
    many = UnknownInstructionError.of([(3, UnknownInstructionError("one")), (5, UnknownInstructionError("another"))])
    assert not lost_by(many), lost_by(many)

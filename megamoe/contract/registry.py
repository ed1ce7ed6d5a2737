"""Backends and executors by name: registered as entry points, or unregistered as package.module:ATTRIBUTE."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points

from megamoe.contract.backend import Backend, Executor
from megamoe.contract.errors import UnsupportedError


def backend_names() -> tuple[str, ...]:
    """Names of all registered backends, sorted. A registration is one line of pyproject.toml."""
    return tuple(sorted(_points("megamoe.backends")))


def executor_names() -> tuple[str, ...]:
    """Names of all registered executors, sorted."""
    return tuple(sorted(_points("megamoe.executors")))


# Each row of a matrix asks, and a look-up reads the metadata of everything that is installed.
@cache
def _points(group: str) -> Mapping[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=group)}


def _load(group: str, kind: str, name: str) -> object:
    points = _points(group)
    if ":" in name:
        return _load_attribute(group, kind, name)
    if name not in points:
        known = ", ".join(sorted(points)) or "none"
        raise UnsupportedError(
            f"there is no {kind} named {name!r}; registered in pyproject.toml: {known}; "
            f"one of your own is named package.module:ATTRIBUTE"
        )
    return points[name].load()


def _load_attribute(group: str, kind: str, name: str) -> object:
    try:
        return EntryPoint(name, name, group).load()
    except (ModuleNotFoundError, AttributeError) as error:
        raise UnsupportedError(f"the {kind} {name!r} cannot be loaded: {error}") from error


def load_backend(name: str) -> Backend:
    """The backend registered under `name`, or the unregistered object at "package.module:ATTRIBUTE".

    Raises UnsupportedError if there is none. An exception that the module itself raises passes through.
    """
    loaded = _load("megamoe.backends", "backend", name)
    if not isinstance(loaded, Backend):
        raise UnsupportedError(
            f"the backend {name!r} is of type {type(loaded).__name__}, without name, targets() and build()"
        )
    return loaded


def load_executor(name: str) -> Executor:
    """The executor registered under `name`, or the object at "package.module:ATTRIBUTE"; raises as load_backend."""
    loaded = _load("megamoe.executors", "executor", name)
    if not isinstance(loaded, Executor):
        raise UnsupportedError(
            f"the executor {name!r} is of type {type(loaded).__name__}, without name, unavailable() and run()"
        )
    return loaded

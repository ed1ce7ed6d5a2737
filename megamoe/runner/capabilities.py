"""Asks backends and executors what they can do, in separate processes; none of them is imported here."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, cast

from megamoe.contract import TARGETS, Target, UnsupportedError
from megamoe.runner.child import Confinement
from megamoe.runner.process import RunnerDiedError, RunnerFaultError, nursery
from megamoe.runner.requests import BACKEND, EXECUTOR

MAX_ASKED_S: Final = 60.0
"""Host seconds for importing a backend or an executor and getting its answer."""


# Nothing is judged here, so the code may import what it likes.
ASKED: Final = Confinement(references=True)


@dataclass(frozen=True, slots=True)
class Offer:
    """What a backend offers. `executors`: the only ones on which it owes rows, None for all.

    `borrowed`: whether it is a borrowed backend; `missing`: what such a backend needs and is not installed.
    """

    targets: tuple[Target, ...]
    executors: tuple[str, ...] | None
    borrowed: bool
    missing: str | None


@dataclass(frozen=True, slots=True)
class Abilities:
    """What an executor can do. `schedules`: the only ones it has, None for all. `unavailable`: reasons by target."""

    device: str
    schedules: tuple[str, ...] | None
    timed: bool
    unavailable: dict[str, str | None]


def offer_of(backend: str, op: str) -> Offer:
    """What `backend` offers for `op`. Raises UnsupportedError, with a sentence, if it does not answer."""
    told = _asked(BACKEND, "backend", backend, (op,), _place())
    if isinstance(told, str):
        raise UnsupportedError(told)
    try:
        targets = cast("tuple[Target, ...]", tuple(name for name in told["targets"][op] if name in TARGETS))
        return Offer(targets, _names(told["executors"]), bool(told["borrowed"]), told["missing"])
    except (KeyError, TypeError) as error:
        raise UnsupportedError(f"the backend {backend!r} cannot be loaded: it answered nonsense: {error!r}") from None


def machine_of(executor: str) -> Abilities:
    """What `executor` can do. Raises UnsupportedError, with a sentence, if it does not answer."""
    told = _asked(EXECUTOR, "executor", executor, TARGETS, _place())
    if isinstance(told, str):
        raise UnsupportedError(told)
    try:
        return Abilities(str(told["device"]), _names(told["schedules"]), bool(told["timed"]), dict(told["unavailable"]))
    except (KeyError, TypeError, ValueError) as error:
        raise UnsupportedError(f"the executor {executor!r} cannot be loaded: it answered nonsense: {error!r}") from None


def _names(told: list[str] | None) -> tuple[str, ...] | None:
    return None if told is None else tuple(str(name) for name in told)


def _place() -> tuple[str, ...]:
    """The module search path, which an answer also depends on."""
    # An entry may name an import hook instead of a folder.
    return tuple(os.path.abspath(path) if os.path.isdir(path or ".") else path for path in sys.path)


@lru_cache(maxsize=512)
def _asked(call: str, kind: str, name: str, about: Sequence[str], place: tuple[str, ...]) -> dict[str, Any] | str:
    told = {kind: name, "ops" if kind == "backend" else "targets": list(about)}
    try:
        # A user's executor or backend imports torch at once, a registered one only when it builds or runs.
        with nursery(torch=":" in name).runner(f"{kind} {name}", ASKED) as runner:
            return dict(runner.ask(call, told, MAX_ASKED_S).told)
    except UnsupportedError as error:
        return str(error)
    except RunnerFaultError as error:
        return f"the {kind} {name!r} cannot be loaded: {error}"
    except RunnerDiedError as died:
        return f"the {kind} {name!r} cannot be loaded: {died}"

"""The protocol between the judge and a runner: frames of JSON and raw bytes, and programs as data.

Nothing is ever unpickled, because the program at the other end may have taken the process over. A frame is the length
of its JSON text, the number of its parts, the length of each part, and then the text and the parts. `memory` is the
descriptor of a shared-memory block that comes with a request.
"""

from __future__ import annotations

import json
import os
import select
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, Final, cast, get_type_hints

from pydantic import TypeAdapter, ValidationError

from megamoe.contract import (
    BufferArg,
    Case,
    HostProgram,
    Launch,
    PackedFields,
    Program,
    ScalarArg,
    ShapeArg,
    StreamArg,
    TensorArg,
    TensorMapArg,
)
from megamoe.contract.counted import counted

MAX_JSON: Final = 16 << 20
MAX_PARTS: Final = 16
MAX_BYTES: Final = 512 << 20
"""Limit for one frame. A runner that sends more is ended."""
MAX_SENTENCE: Final = 4000
MAX_SEEN: Final = 80
"""Characters of a value that a message repeats."""
_HEAD: Final = struct.Struct("<II")
_PART: Final = struct.Struct("<Q")

Json = Mapping[str, Any]


class WireError(Exception):
    """A malformed frame. The text says what was wrong with it."""


class SilenceError(Exception):
    """The other end has closed its side, or has sent nothing by the deadline (`late`)."""

    def __init__(self, late: bool) -> None:
        super().__init__(late)
        self.late = late

    def __str__(self) -> str:
        return "the time is up" if self.late else "the other end is closed"


@dataclass(frozen=True, slots=True)
class Frame:
    """`told`: JSON data. `parts`: bytes. `memory`: a descriptor that came with the frame; its owner closes it."""

    told: Json
    parts: tuple[bytes, ...] = ()
    memory: int | None = None


def send(pipe: socket.socket, frame: Frame) -> None:
    """Sends a frame. Raises OSError if the other end is gone."""
    text = json.dumps({**frame.told, "memory": frame.memory is not None}).encode()
    head = _HEAD.pack(len(text), len(frame.parts)) + b"".join(_PART.pack(len(part)) for part in frame.parts)
    pipe.sendall(head + text)
    for part in frame.parts:
        pipe.sendall(part)
    if frame.memory is not None:
        socket.send_fds(pipe, [b"m"], [frame.memory])


def receive(pipe: socket.socket, deadline: float | None = None, life: int | None = None) -> Frame:
    """The next frame. Raises WireError for a malformed one, SilenceError at `deadline` (time.monotonic) or at end of
    file.

    `life`: a descriptor that becomes readable when the other process ends. Data sent before that is still received.
    """
    length, count = _HEAD.unpack(_exactly(pipe, _HEAD.size, deadline, life))
    if length > MAX_JSON or count > MAX_PARTS:
        raise WireError(f"a message of {length} characters and {count} parts; at most {MAX_JSON} and {MAX_PARTS}")
    sizes = [_PART.unpack(_exactly(pipe, _PART.size, deadline, life))[0] for _ in range(count)]
    if sum(sizes) > MAX_BYTES:
        raise WireError(f"a message of {sum(sizes)} bytes; at most {MAX_BYTES}")
    text = _exactly(pipe, length, deadline, life)
    parts = tuple(_exactly(pipe, size, deadline, life) for size in sizes)
    try:
        told: object = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WireError(f"a message that is not JSON: {error}") from None
    if not isinstance(told, dict):
        raise WireError("a message that is no JSON object")
    known = cast("dict[str, Any]", told)
    return Frame(known, parts, _descriptor(pipe, deadline) if known.pop("memory", False) is True else None)


def _exactly(pipe: socket.socket, size: int, deadline: float | None, life: int | None) -> bytes:
    taken = bytearray()
    while len(taken) < size:
        _wait(pipe, deadline, life)
        part = pipe.recv(min(size - len(taken), 1 << 20))
        if not part:
            raise SilenceError(late=False)
        taken += part
    return bytes(taken)


def _wait(pipe: socket.socket, deadline: float | None, life: int | None) -> None:
    if deadline is None and life is None:
        return
    watched = [pipe.fileno(), *([] if life is None else [life])]
    left = None if deadline is None else max(0.0, deadline - time.monotonic())
    ready, _, _ = select.select(watched, [], [], left)
    if not ready:
        raise SilenceError(late=True)
    if pipe.fileno() not in ready and not select.select([pipe.fileno()], [], [], 0)[0]:
        raise SilenceError(late=False)


def _descriptor(pipe: socket.socket, deadline: float | None) -> int | None:
    _wait(pipe, deadline, None)
    _, descriptors, _, _ = socket.recv_fds(pipe, 1, 1)
    for extra in descriptors[1:]:
        os.close(extra)
    return descriptors[0] if descriptors else None


_CLASSES: Final[Mapping[str, type]] = {
    one.__name__: one
    for one in (
        BufferArg, ScalarArg, TensorMapArg, Launch, Program, PackedFields, TensorArg, StreamArg, ShapeArg, HostProgram,
    )
}  # fmt: skip


def encoded(program: Program | HostProgram) -> Frame:
    """A program as data: its PTX and host object are parts, the rest is JSON. Raises WireError for anything else."""
    parts = [_text(program).encode()]
    left_out: dict[str, object] = {"ptx": ""}
    if isinstance(program, HostProgram):
        if not isinstance(program.host_object, bytes):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise WireError(f"the program's host_object is of type {type(program.host_object).__name__}, not bytes")
        parts.append(program.host_object)
        left_out["host_object"] = b""
    known = HostProgram if isinstance(program, HostProgram) else Program
    told: dict[str, object] = {"kind": known.__name__}
    for one in fields(known):
        told[one.name] = "" if one.name in left_out else _plain(getattr(program, one.name))
    try:
        json.dumps(told)
    except (TypeError, ValueError) as error:
        raise WireError(f"the program holds what is no data: {error}") from None
    return Frame({"program": told}, tuple(parts))


def _text(program: Program | HostProgram) -> str:
    # Read once, because a property may return something else next time. What is sent is what is hashed and run.
    ptx: object = program.ptx
    if not isinstance(ptx, str):
        raise WireError(f"the program's ptx is of type {type(ptx).__name__}; it must be text")
    return str.__str__(ptx)


def _plain(value: object) -> object:
    kind = type(value).__name__
    if _CLASSES.get(kind) is type(value):
        return {"kind": kind, **{one.name: _plain(getattr(value, one.name)) for one in fields(cast("Any", value))}}
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in cast("Mapping[object, object]", value).items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in cast("Sequence[object]", value)]
    # Convert numbers of NumPy and similar types to Python's.
    if hasattr(value, "item") and not isinstance(value, str | bytes):
        return cast("Any", value).item()
    return value


def decoded(frame: Frame) -> Program | HostProgram:
    """The program in a frame. Raises WireError, with the field, for anything else."""
    told = dict(cast("Json", frame.told.get("program") or {}))
    kind = told.get("kind")
    wanted = {"Program": 1, "HostProgram": 2}.get(str(kind))
    if wanted is None or len(frame.parts) != wanted:
        raise WireError(f"a program of kind {str(kind)[:40]!r} in {counted(len(frame.parts), 'part')}")
    try:
        told["ptx"] = frame.parts[0].decode()
    except UnicodeDecodeError as error:
        raise WireError(f"the program's ptx is not UTF-8: {error}") from None
    if kind == "HostProgram":
        told["host_object"] = frame.parts[1]
    return cast("Program | HostProgram", _instance(told, "the program"))


def _instance(value: object, where: str) -> object:
    if isinstance(value, list):
        return tuple(_instance(part, f"{where}[{i}]") for i, part in enumerate(cast("list[object]", value)))
    if not isinstance(value, dict):
        return value
    told = {name: _instance(part, f"{where}.{name}") for name, part in cast("dict[str, object]", value).items()}
    kind = told.get("kind")
    if not isinstance(kind, str) or kind not in _CLASSES:
        return told
    del told["kind"]
    unknown = sorted(told.keys() - {one.name for one in fields(_CLASSES[kind])})
    if unknown:
        raise WireError(f"{where}, of a {kind}, has no field {unknown[0][:40]!r}")
    checked = {name: _checked(kind, name, part, where) for name, part in told.items()}
    try:
        return _CLASSES[kind](**checked)
    except TypeError as error:
        raise WireError(f"{where}, of a {kind}: {error}") from None


def _checked(kind: str, name: str, value: object, where: str) -> Any:
    try:
        return _fields(kind)[name].validate_python(value, strict=True)
    except ValidationError:
        wanted = next(one.type for one in fields(_CLASSES[kind]) if one.name == name)
        raise WireError(f"{where}.{name} is {repr(value)[:MAX_SEEN]}; a {kind} has {wanted} there") from None


@cache
def _fields(kind: str) -> Mapping[str, TypeAdapter[Any]]:
    return {name: TypeAdapter(annotation) for name, annotation in get_type_hints(_CLASSES[kind]).items()}


def told_case(case: Case) -> Json:
    """A case as data."""
    return {"op": case.op, "axes": [list(axis) for axis in case.axes], "inputs": case.inputs, "seed": case.seed,
            "id": case.id}  # fmt: skip


def case_of(told: Json) -> Case:
    """Inverse of `told_case`."""
    axes = tuple((name, value) for name, value in told["axes"])
    return Case(told["op"], axes, told["inputs"], told["seed"], told["id"])

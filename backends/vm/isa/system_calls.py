"""System functions of CUDA's device runtime: printf, assert, malloc and free.

CUDA programming guide: formatted output, assertion, dynamic global memory allocation.

backends.vm.bind.calls keeps a `call` of one of these functions, with registers for operands, and inlines all other
calls.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from backends.vm.bind.binder import Binder
from backends.vm.bind.forms import Step, opcode
from backends.vm.faults import Fault
from backends.vm.machine import access
from backends.vm.machine.warp import Warp
from backends.vm.memory.strong_writes import Strong
from backends.vm.ptx.ast import Symbol, Vector

MAX_STRING = 4096
"""Bytes of a format or string argument that are searched for a NUL."""
MAX_WIDTH = 1024
"""Largest width or precision in characters, because a kernel's format may ask for any number."""
_CONVERSION = re.compile(r"%([-+ #0]*)(\*|\d+)?(?:\.(\*|\d+))?(hh|h|ll|l|z|j|t|q)?([diouxXeEfFgGaAcspn%])")


@opcode("call{.uni}", section="9.7.12.5", counter="control")
def call(b: Binder) -> Step:
    """Call a system function once for each active lane."""
    results, target, given = b.operands
    if not isinstance(target, Symbol) or not isinstance(given, Vector) or target.name not in _FUNCTIONS:
        raise b.error(f"the functions that can be called so are {', '.join(_FUNCTIONS)}")
    function = _FUNCTIONS[target.name]
    rows = [b.source(one, "u64") for one in given.items]
    results = results.items if isinstance(results, Vector) else ()
    result = b.destination(results[0], "u64") if results else None

    def step(warp: Warp) -> None:
        for lane in access.active(warp).tolist():
            answer = function(warp, lane, [int(warp.u64[row][lane]) for row in rows])
            if result is not None and answer is not None:
                warp.u64[result][lane] = answer

    return step


def _printf(warp: Warp, lane: int, given: list[int]) -> None:
    form, at = given
    text = _string(warp, lane, form)
    pieces, last = list[str](), 0
    reader = _Arguments(warp, lane, at)
    for found in _CONVERSION.finditer(text):
        pieces.append(text[last : found.start()])
        pieces.append(_converted(found, reader))
        last = found.end()
    pieces.append(text[last:])
    warp.cta.machine.printed("".join(pieces))


class _Arguments:
    """The packed arguments of one printf. Each is 4 or 8 bytes, aligned to its size."""

    def __init__(self, warp: Warp, lane: int, at: int) -> None:
        self._warp, self._lane, self._at = warp, lane, at

    def take(self, size: int) -> bytes:
        """The bytes of the next argument."""
        self._at = -(-self._at // size) * size
        raw = _read(self._warp, self._lane, self._at, size)
        self._at += size
        return raw

    def integer(self, size: int, *, signed: bool) -> int:
        """The next argument as an integer."""
        return int.from_bytes(self.take(size), "little", signed=signed)

    def string(self) -> str:
        """The string that the next argument points to."""
        return _string(self._warp, self._lane, self.integer(8, signed=False))


def _converted(found: re.Match[str], reader: _Arguments) -> str:
    flags, width, precision, length, kind = found.groups(default="")
    if kind == "%":
        return "%"
    width = _bounded(found, reader.integer(4, signed=True) if width == "*" else width)
    precision = _bounded(found, reader.integer(4, signed=True) if precision == "*" else precision)
    # C17, 7.21.6.1: a negative precision counts as absent, a negative width as the flag "-" plus a width.
    precision = "" if precision.startswith("-") else precision
    spec = f"%{flags}{width}{f'.{precision}' if precision else ''}"
    size = 8 if length in ("l", "ll", "z", "j", "t", "q") else 4
    if kind in "di":
        return f"{spec}d" % reader.integer(size, signed=True)
    if kind in "ouxX":
        return f"{spec}{'d' if kind == 'u' else kind}" % reader.integer(size, signed=False)
    if kind in "eEfFgG":
        return f"{spec}{kind}" % float(np.frombuffer(reader.take(8), np.float64)[0])
    if kind in "aA":
        return float(np.frombuffer(reader.take(8), np.float64)[0]).hex()
    if kind == "c":
        return f"{spec}c" % chr(reader.integer(4, signed=False) & 0xFF)
    if kind == "s":
        return f"{spec}s" % reader.string()
    if kind == "p":
        return f"{spec}s" % hex(reader.integer(8, signed=False))
    raise Fault("printf", f"the conversion {found[0]!r}, which device printf does not have")


def _bounded(found: re.Match[str], asked: int | str) -> str:
    """A width or precision as written in a format, "" for none."""
    text = str(asked)
    # Python refuses to convert numbers of more than 4,300 digits.
    if len(text) > 8 or abs(int(text or 0)) > MAX_WIDTH:
        raise Fault(
            "printf", f"the conversion {found[0]:.40} asks for {text:.20} characters; at most {MAX_WIDTH} are made"
        )
    return text


def _assert_failed(warp: Warp, lane: int, given: list[int]) -> None:
    message, file, line, function, _ = given
    says, where, of = (_string(warp, lane, one) for one in (message, file, function))
    raise Fault("assert", f"assertion `{says}` failed in {of}, {where}:{line & 0xFFFFFFFF}", lane=lane)


def _read(warp: Warp, lane: int, address: int, size: int) -> bytes:
    lanes = np.array([lane])
    # Signed like all address registers: addresses of the upper half are in no window.
    at = np.array([address % 2**64], np.uint64).view(np.int64)
    return access.load(warp, "", at, size, strong=Strong(kind="load"), lanes=lanes)[0].tobytes()


def _string(warp: Warp, lane: int, address: int) -> str:
    raw = bytearray()
    while len(raw) < MAX_STRING and (byte := _read(warp, lane, address + len(raw), 1)) != b"\0":
        raw += byte
    return raw.decode("utf-8", "replace")


def _malloc(warp: Warp, lane: int, given: list[int]) -> int:
    (size,) = given
    return warp.cta.machine.heap.allocate(size, f"the malloc of PTX line {warp.line}")


def _free(warp: Warp, lane: int, given: list[int]) -> int:
    (address,) = given
    if not warp.cta.machine.heap.free(address):
        raise Fault("device-heap", "a kernel frees an address that malloc has not returned, or that was freed before",
                    lane=lane)  # fmt: skip
    return 0


_FUNCTIONS: dict[str, Callable[[Warp, int, list[int]], int | None]] = {
    "vprintf": _printf,
    "__assertfail": _assert_failed,
    "malloc": _malloc,
    "free": _free,
}

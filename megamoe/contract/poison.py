"""Seeds for the noise that workspaces hold before a program runs. They differ by row, and a rerun has the same ones."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Final

from megamoe.contract.program import HostProgram, Program

SAMPLE: Final = 4096
"""Bytes at the start of each tensor that the noise depends on."""


def poison_seeds(program: Program | HostProgram, tensors: Mapping[str, tuple[int, bytes]]) -> dict[str, int]:
    """A 32-bit seed for each workspace of `program`, by name.

    It depends on the program's text, its arguments (shapes and scalars), and of each of `tensors` the size in bytes and
    the first SAMPLE bytes. The noise must not be a value that a kernel may take for an empty slot (0, -1), so that a
    dropped initialisation has an effect.
    """
    arguments = program.launches if isinstance(program, Program) else program.args
    row = zlib.crc32(repr(arguments).encode(), zlib.crc32(program.ptx.encode()))
    for name, (size, head) in tensors.items():
        row = zlib.crc32(head[:SAMPLE], zlib.crc32(f"{name} {size}".encode(), row))
    return {name: zlib.crc32(name.encode(), row) for name in program.scratch}

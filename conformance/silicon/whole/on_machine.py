"""The machine's answer to a whole program, and the recorded form of an answer."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from zlib import crc32

import numpy as np
import numpy.typing as npt

from backends.vm.faults import Findings
from backends.vm.load import LoadedModule
from backends.vm.machine.machine import Machine
from backends.vm.ptx.parser import parse
from backends.vm.tensor.tensor_map import Im2col, encode_tensor_map
from conformance.silicon.whole import drawn
from conformance.silicon.whole.drawn import FUNCTIONS, HEAD, INPUT_WORDS, MAPS, Drawn
from conformance.silicon.whole.on_device import WHOLE_BYTES, hashed
from conformance.silicon.whole.programs import Bytes, TiledMap, Whole, given

ROW = 1024
"""Bytes of an output that share one checksum."""


@dataclass(frozen=True)
class Answer:
    """The output of a program, the rules that it broke, and the opcodes that it ran."""

    output: Bytes
    found: list[str]
    opcodes: frozenset[str]

    @property
    def hash(self) -> int:
        """Hash of the output, as in drawn.npz."""
        return hashed(self.output)


def encoded(tensor_map: TiledMap | None, address: int) -> bytes:
    """Returns the 128 bytes of the map of a tensor at `address`, or zeros for None."""
    if tensor_map is None:
        return bytes(128)
    one = tensor_map
    corners = None if one.corners is None else Im2col(*one.corners)
    return encode_tensor_map(address, one.dtype, one.dims, one.strides, one.box, swizzle=one.swizzle,
                             element_strides=one.element_strides, oob_fill="nan" if one.fill == "nan" else "zero",
                             target="sm_90a", im2col=corners)  # fmt: skip


def drawn_map(number: int) -> TiledMap:
    """Returns map `number` of drawn.MAPS: INPUT as u32 [INPUT_WORDS / 32, 32]."""
    swizzle, box = MAPS[number]
    return TiledMap("u32", (32, INPUT_WORDS // 32), (128,), box, swizzle)


def schedule_of(number: int) -> str:
    """Returns the schedule of a drawn program: for most the quickest one, for some another."""
    return ("lazy", f"random:{number}")[number // 16 % 2] if number % 16 == 1 else "eager"


def answer(program: Whole | Drawn, schedule: str = "eager") -> Answer:
    """Runs the program. Fault for a broken rule that ends the launch."""
    machine = Machine(schedule, accumulate="hopper")
    machine.findings = Findings()
    if isinstance(program, Drawn):
        data, size, tensor_map = given("bits"), drawn.OUTPUT_BYTES, drawn_map(program.map_number)
        shared = FUNCTIONS if "table" in program.text or "call" in program.text else ""
        grid, cluster = 1, 1
    else:
        data, size, tensor_map, shared = given(program.given), WHOLE_BYTES, program.tensor_map, ""
        grid, cluster = program.grid, program.cluster
    output = np.zeros(size, np.uint8)
    read = machine.memory.add("input", data, writable=False).base
    written = machine.memory.add("output", output).base
    over = written if tensor_map is not None and tensor_map.over_output else read
    params = [struct.pack("<Q", read), struct.pack("<Q", written), encoded(tensor_map, over)]
    entry = LoadedModule(parse(HEAD + shared + program.text)).entry(program.entry)
    machine.launch(entry, (grid, 1, 1), (program.threads, 1, 1), params, (cluster, 1, 1))
    found = [str(fault) for fault in machine.findings.by_site.values()]
    return Answer(output, found, frozenset(".".join(parts) for parts in machine.opcodes_run()))


def checksums(output: Bytes) -> npt.NDArray[np.uint32]:
    """Returns the checksum of each row of a whole program's output."""
    return np.array([crc32(row.tobytes()) for row in output.reshape(-1, ROW)], np.uint32)


def rows_that_differ(output: Bytes, wanted: npt.NDArray[np.uint32]) -> list[int]:
    """Returns the rows whose checksums differ from `wanted`."""
    return [int(row) for row in np.flatnonzero(checksums(output) != wanted)]

"""ldmatrix and stmatrix of 8-bit elements, and of 4- and 6-bit ones that become bytes (PTX ISA 9.7.14.5.15, .16).

The ISA shows the maps only in figures. These are the maps of CuTeDSL's copy atoms. CUTLASS's copy traits
(SM100_SU4_DU8x16_x1_LDSM_N, SM100_U8x4_STSM_T and their larger relatives) agree, and so does SM100_U8x8_LDSM_T after
its own permutation of bytes. None was measured here.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from backends.vm.bind.binder import Binder
from backends.vm.bind.forms import Step, opcode
from backends.vm.isa.warp_mma import in_shared, whole_warp
from backends.vm.machine import access
from backends.vm.machine.warp import Warp
from backends.vm.tensor.tmem_layout import decompressed

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint32]

_ROW_BYTES = 16
_LANE = np.arange(32)
_SPACES = "shared shared::cta"
_FORMATS = "b6x16_p32 b4x16_p64"


def _transposed(rows: Bytes, height: int) -> Words:
    """Registers of matrices of `height` rows, two per matrix.

    Lane l holds rows 4 (l % 4) to 4 (l % 4) + 3: their column l / 4 in the first register, l / 4 + 8 in the second.
    """
    registers = [
        [rows[height * matrix + 4 * (_LANE % 4) + row, _LANE // 4 + column] for row in range(4)]
        for matrix in range(len(rows) // height) for column in (0, 8)
    ]  # fmt: skip
    return np.ascontiguousarray(np.moveaxis(np.array(registers), 1, 2)).view("<u4")[..., 0]


@opcode("ldmatrix.sync.aligned.m16n16.<count>.trans{.<space>}.b8", section="9.7.14.5.15", counter="memory",
        count="x1 x2", space=_SPACES)  # fmt: skip
@opcode("ldmatrix.sync.aligned.m16n16.<count>.trans{.<space>}.b8x16.<format>", section="9.7.14.5.15", counter="memory",
        count="x1 x2", space=_SPACES, format=_FORMATS)  # fmt: skip
@opcode("ldmatrix.sync.aligned.m8n16.<count>{.<space>}.b8x16.<format>", section="9.7.14.5.15", counter="memory",
        count="x1 x2 x4", space=_SPACES, format=_FORMATS)  # fmt: skip
def ldmatrix_bytes(b: Binder) -> Step:
    """Load matrices of bytes. The lower lanes give the addresses of the 16-byte rows. 16x16 ones are transposed."""
    d, address = b.expect(2)
    square = "m16n16" in b.instruction.parts
    height, matrices = (16 if square else 8), int(b.words["count"][1:])
    rows = [b.destination(item, "u32") for item in b.braced(d, matrices * height // 8)]
    addresses_of, what, space = b.address(address), b.instruction.opcode, b.words["space"]
    packed = b.words.get("format", "")

    def step(warp: Warp) -> None:
        whole_warp(warp, what)
        where, addresses = in_shared(space, addresses_of(warp)[: height * matrices], what)
        data = access.load(warp, where, addresses, _ROW_BYTES)
        if packed:
            data = decompressed(data, packed)
        registers = _transposed(data, 16) if square else data.reshape(matrices, 32, 4).view("<u4")[..., 0]
        for row, words in zip(rows, registers, strict=True):
            warp.u32[row][...] = words

    return step


@opcode("stmatrix.sync.aligned.m16n8.<count>.trans{.<space>}.b8", section="9.7.14.5.16", counter="memory",
        count="x1 x2 x4", space=_SPACES)  # fmt: skip
def stmatrix_bytes(b: Binder) -> Step:
    """Store transposed 16x8 matrices of bytes: eight rows of 16 bytes each."""
    address, source = b.expect(2)
    matrices = int(b.words["count"][1:])
    held = [b.source(item, "u32") for item in b.braced(source, matrices)]
    addresses_of, what, space = b.address(address), b.instruction.opcode, b.words["space"]
    line = b.instruction.line

    def step(warp: Warp) -> None:
        whole_warp(warp, what)
        where, addresses = in_shared(space, addresses_of(warp)[: 8 * matrices], what)
        data = np.zeros((8 * matrices, _ROW_BYTES), np.uint8)
        for matrix, row in enumerate(held):
            elements = warp.u32[row].view(np.uint8).reshape(32, 4)
            for place in range(4):
                data[8 * matrix + 2 * (_LANE % 4) + place % 2, _LANE // 4 + 8 * (place // 2)] = elements[:, place]
        access.store(warp, where, addresses, data, line, lanes=np.arange(len(addresses)))

    return step

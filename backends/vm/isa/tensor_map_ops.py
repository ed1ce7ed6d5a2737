"""Tensor maps changed by the kernel: tensormap.replace and tensormap.cp_fenceproxy (PTX ISA 9.7.9.28, 9.7.13.16).

Global memory keeps no record of proxies here, so a missing fence.proxy.tensormap is not found.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from backends.vm.bind.binder import Binder
from backends.vm.bind.forms import Step, opcode
from backends.vm.faults import Fault
from backends.vm.machine.access import resolve
from backends.vm.machine.warp import Warp
from backends.vm.tensor.tensor_map import MAP_BYTES
from backends.vm.tensor.tensor_map_fields import ORDINALS, replace_field

_SPACES = "global shared::cta"
_HALF = MAP_BYTES // 2
"""What memory is read and written in: a map need not lie at a multiple of its size."""


def _changed(warp: Warp, space: str, address: int, lane: int, line: int, change: Callable[[bytes], bytes]) -> None:
    """Replace the tensor map at `address` by what `change` makes of it."""
    if address % 64:
        raise Fault("misaligned", "a tensor map must lie at a multiple of 64 bytes", lane=lane, address=address)
    where, found = resolve(space, np.array([address], np.int64))
    at, memory = int(found[0]), warp.cta.machine.memory
    if where.startswith("shared"):
        at = warp.cta.own_offset(at, "tensormap.replace")
        warp.cta.smem.store(_halves(at), _bytes(change(_from_smem(warp, at))), warp.clock, warp.stamp, line)
    elif where == "global":
        memory.store(_halves(at), _bytes(change(memory.load(_halves(at), _HALF).tobytes())))
    else:
        raise Fault("out-of-bounds", f"tensormap.replace in {where} memory; it takes global and shared::cta",
                    lane=lane, address=address)  # fmt: skip


def _halves(at: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    return np.array([at, at + _HALF], np.int64)


def _from_smem(warp: Warp, offset: int) -> bytes:
    return warp.cta.smem.load(_halves(offset), _HALF, warp.clock, warp.stamp).tobytes()


def _bytes(raw: bytes) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    return np.frombuffer(raw, np.uint8).reshape(2, _HALF)


@opcode("tensormap.replace.tile.<field>{.<space>}.b1024.b64", section="9.7.9.28", counter="tma", space=_SPACES,
        field="global_address global_stride")  # fmt: skip
@opcode("tensormap.replace.tile.<field>{.<space>}.b1024.b32", section="9.7.9.28", counter="tma", space=_SPACES,
        field="rank box_dim global_dim element_stride elemtype interleave_layout swizzle_mode swizzle_atomicity "
        "fill_mode")  # fmt: skip
def replace(b: Binder) -> Step:
    """`[addr] {, ordinal}, value`: one field of the map in memory."""
    field, space = b.words["field"], b.words["space"].partition("::")[0]
    counted = field in ORDINALS
    operands = b.expect(3 if counted else 2)
    ordinal = b.immediate(operands[1]) if counted else 0
    if counted and not 0 <= ordinal < ORDINALS[field]:
        raise b.error(f"the ordinal {ordinal} of {field}; it must be 0..{ORDINALS[field] - 1}")
    view = "u64" if b.instruction.parts[-1] == "b64" else "u32"
    address, row, line = b.address(operands[0]), b.source(operands[-1], view), b.instruction.line

    def step(warp: Warp) -> None:
        values = warp.u64[row] if view == "u64" else warp.u32[row]
        for lane in np.flatnonzero(warp.mask).tolist():
            value = int(values[lane])

            def change(raw: bytes, value: int = value) -> bytes:
                return replace_field(raw, field, ordinal, value)

            _changed(warp, space, int(address(warp)[lane]), lane, line, change)

    return step


@opcode("tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.<scope>.sync.aligned",
        section="9.7.13.16", counter="tma", scope="cta cluster gpu sys")  # fmt: skip
def copy_and_fence(b: Binder) -> Step:
    """`[global], [shared], 128`: copy a map to where the TMA unit will read it, once for the warp."""
    destination, source, size = b.expect(3)
    if b.immediate(size) != MAP_BYTES:
        raise b.error(f"the size is {b.immediate(size)}; it must be {MAP_BYTES}")
    to, origin = b.address(destination), b.address(source)

    def step(warp: Warp) -> None:
        warp.converged("tensormap.cp_fenceproxy")
        lane = int(warp.mask.argmax())
        offset = warp.cta.own_offset(int(origin(warp)[lane]), "tensormap.cp_fenceproxy")
        target = int(to(warp)[lane])
        if target % 64:
            raise Fault("misaligned", "a tensor map must lie at a multiple of 64 bytes", lane=lane, address=target)
        warp.cta.machine.memory.store(_halves(target), _bytes(_from_smem(warp, offset)))

    return step

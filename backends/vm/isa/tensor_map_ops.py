"""Tensor maps that a kernel changes: tensormap.replace, tensormap.cp_fenceproxy and the fences of their proxy.

PTX ISA 9.7.9.28, 9.7.13.16, 9.7.13.4. memory/map_fences.py checks that the fences are there.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from backends.vm.bind.binder import Binder
from backends.vm.bind.forms import Step, opcode
from backends.vm.faults import ByLanes, Fault, report
from backends.vm.isa.barrier import order_memory
from backends.vm.machine.access import Bytes, active, resolve, store
from backends.vm.machine.warp import Warp
from backends.vm.memory.map_fences import MAP_BYTES, MAP_HALF, check_map_address
from backends.vm.tensor.tensor_map import ORDINALS, replace_field

_SPACES = "global shared::cta"


def _changed(warp: Warp, space: str, address: int, lane: int, line: int, change: Callable[[Bytes], Bytes]) -> None:
    """Apply `change` to the lower half of the tensor map at `address`."""
    memory = warp.cta.machine.memory
    check_map_address(memory, address, lane)
    where, found = resolve(space, np.array([address], np.int64))
    at = int(found[0])
    if where.startswith("shared"):
        at = warp.cta.own_offset(at, "tensormap.replace")
        lower = np.array([at], np.int64)
        with ByLanes([lane]):
            if warp.cta.smem.store(lower, change(_from_smem(warp, at)), warp.clock, warp.stamp, line):
                warp.cta.machine.engine.repeat()
    elif where == "global":
        lower = np.array([at], np.int64)
        with ByLanes([lane]):
            held = memory.load(lower, MAP_HALF)
        store(warp, "global", lower, change(held), line, lanes=np.array([lane]))
    else:
        raise Fault("out-of-bounds", f"tensormap.replace in {where} memory; it takes global and shared::cta",
                    lane=lane, address=address)  # fmt: skip


def _from_smem(warp: Warp, offset: int) -> Bytes:
    """Half of a map. Reports an undefined byte in it."""
    smem = warp.cta.smem
    found, missing = smem.load(np.array([offset], np.int64), MAP_HALF, warp.clock, warp.stamp)
    if missing is not None:
        at = offset + int(missing.argmax())
        report(smem.origin_of(at, 0).fault(f"byte {at - offset} of half a tensor map decides a copy", address=at))
    return found


_MOST = {"elemtype": 15, "interleave_layout": 2, "swizzle_mode": 4, "swizzle_atomicity": 3, "fill_mode": 1}
"""The fields whose new value is a constant, and the largest one (PTX ISA 9.7.9.28, Table 33)."""


@opcode("tensormap.replace.tile.<field>{.<space>}.b1024.b64", section="9.7.9.28", counter="tma", space=_SPACES,
        field="global_address global_stride")  # fmt: skip
@opcode("tensormap.replace.tile.<field>{.<space>}.b1024.b32", section="9.7.9.28", counter="tma", space=_SPACES,
        field="rank box_dim global_dim element_stride elemtype interleave_layout swizzle_mode swizzle_atomicity "
        "fill_mode")  # fmt: skip
def replace(b: Binder) -> Step:
    """`[addr] {, ordinal}, value`: replace one field of the map in memory."""
    field, space = b.words["field"], b.words["space"].partition("::")[0]
    counted = field in ORDINALS
    operands = b.expect(3 if counted else 2)
    ordinal = b.immediate(operands[1]) if counted else 0
    if counted and not 0 <= ordinal < ORDINALS[field]:
        raise b.error(f"the ordinal {ordinal} of {field}; it must be 0..{ORDINALS[field] - 1}")
    if field in _MOST and not 0 <= (value := b.immediate(operands[-1])) <= _MOST[field]:
        raise b.error(f"the new {field} is {value}; it must be 0..{_MOST[field]}")
    view = "u64" if b.instruction.parts[-1] == "b64" else "u32"
    address, row, line = b.address(operands[0]), b.source(operands[-1], view), b.instruction.line

    def step(warp: Warp) -> None:
        values = warp.u64[row] if view == "u64" else warp.u32[row]
        for lane in active(warp).tolist():
            value = int(values[lane])

            def change(half: Bytes, value: int = value) -> Bytes:
                return np.frombuffer(replace_field(half.tobytes(), field, ordinal, value), np.uint8)[None]

            _changed(warp, space, int(address(warp)[lane]), lane, line, change)

    return step


@opcode("tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.<scope>.sync.aligned",
        section="9.7.13.16", counter="tma", scope="cta cluster gpu sys")  # fmt: skip
def copy_and_fence(b: Binder) -> Step:
    """`[global], [shared], 128`: copy a map to global memory for the TMA unit, once per warp."""
    destination, source, size = b.expect(3)
    if b.immediate(size) != MAP_BYTES:
        raise b.error(f"the size is {b.immediate(size)}; it must be {MAP_BYTES}")
    to, origin, line = b.address(destination), b.address(source), b.instruction.line
    scope = b.words["scope"]

    def step(warp: Warp) -> None:
        warp.meet("tensormap.cp_fenceproxy")
        lane = int(warp.mask.argmax())
        offset = warp.cta.own_offset(int(origin(warp)[lane]), "tensormap.cp_fenceproxy")
        target = int(to(warp)[lane])
        check_map_address(warp.cta.machine.memory, target, lane)
        for half in (0, MAP_HALF):
            if not half or warp.cta.smem.defined[offset + half : offset + half + MAP_HALF].all():
                at = np.array([target + half], np.int64)
                with ByLanes([lane]):
                    held = _from_smem(warp, offset + half)
                store(warp, "global", at, held, line, lanes=np.array([lane]))
        warp.cta.machine.races.maps.release(warp)
        order_memory(warp, scope, acquires=False)
        warp.meetings += 1

    return step


@opcode("fence.proxy.tensormap::generic.release.<scope>", section="9.7.13.4", counter="fence",
        scope="cta cluster gpu sys")  # fmt: skip
def release(b: Binder) -> Step:
    """Let others acquire the tensor maps that have been changed before."""
    b.expect(0)
    scope = b.words["scope"]

    def step(warp: Warp) -> None:
        warp.cta.machine.races.maps.release(warp)
        order_memory(warp, scope, acquires=False)

    return step


@opcode("fence.proxy.tensormap::generic.acquire.<scope>", section="9.7.13.4", counter="fence",
        scope="cta cluster gpu sys")  # fmt: skip
def acquire(b: Binder) -> Step:
    """`[map], 128`: let later copies see what has changed the map before."""
    address, size = b.expect(2)
    if b.immediate(size) != MAP_BYTES:
        raise b.error(f"the size is {b.immediate(size)}; it must be {MAP_BYTES}")
    at, scope = b.address(address), b.words["scope"]

    def step(warp: Warp) -> None:
        order_memory(warp, scope, releases=False)
        machine = warp.cta.machine
        for place in np.unique(at(warp)[warp.mask]).tolist():
            machine.races.maps.acquire(machine.memory, place, warp)

    return step

"""Bulk copies, tensor (TMA) and linear: loads, stores, reductions, groups, prefetches (PTX ISA 9.7.9.25, .27)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from backends.vm.bind.binder import Binder
from backends.vm.bind.forms import Step, opcode
from backends.vm.faults import ByLanes, Fault, OtherAccess, counted, report
from backends.vm.machine.access import active, check_acquired, resolve
from backends.vm.machine.code import Wait
from backends.vm.machine.cta import Cta
from backends.vm.machine.engine import Copy, CopyGroups, ThreadGroups, submit
from backends.vm.machine.warp import Warp, bits_of
from backends.vm.memory.clocks import Clock, stamp
from backends.vm.memory.definedness import Missing, lost_in_reduction
from backends.vm.memory.global_memory import Buffer, GlobalMemory
from backends.vm.memory.global_races import Pieces
from backends.vm.memory.map_fences import MAP_HALF, check_map_address
from backends.vm.memory.mbarrier import MBarrier
from backends.vm.memory.pieces import read_pieces, write_pieces
from backends.vm.memory.shared import MAX_DYNAMIC, OFFSET_MASK, RANK_SHIFT
from backends.vm.memory.strong_writes import PLAIN_ATOMIC
from backends.vm.numpy_calls import count_nonzero
from backends.vm.ptx.ast import Address, Operand
from backends.vm.tensor.tensor_map import TensorMap, decode_tensor_map
from backends.vm.tensor.tma_box import (
    REDUCED_TYPES,
    BoxPlan,
    check_reduction,
    plan_box,
    plan_gather4,
    plan_im2col,
    reduced,
    reduced_bytes,
    rounded_to_tf32,
)

Granules = npt.NDArray[np.int64]
Read = tuple[npt.NDArray[np.uint8], Missing | None]
"""The pieces that a copy reads, and their undefined bytes."""
_DIMS = "1d 2d 3d 4d 5d"
_MODES = "tile tile::gather4 im2col"


def granules_of(addresses: npt.NDArray[np.int64], size: int) -> Granules:
    """The 4-byte granules of pieces of `size` bytes at shared `addresses`."""
    if size >= 4:
        return ((addresses[:, None] >> 2) + np.arange(size // 4)).ravel()
    return np.unique(addresses >> 2)


def _copy_clock(warp: Warp, agent: int, serial: int) -> Clock:
    clock = warp.clock.of_copy()
    clock.seen[agent] = clock.fenced[agent] = serial
    return clock


def _shared_targets(warp: Warp, address: int, mask: int | None) -> list[tuple[Cta, int]]:
    """The CTAs that a copy writes, each with its offset: one, or those in a multicast mask."""
    cluster = warp.cta.cluster
    if mask is None:
        cta = cluster.cta_of(address, "a bulk copy into shared memory")
        cta.check_started(warp, "a bulk copy into shared memory")
        return [(cta, address & OFFSET_MASK)]
    ranks = [rank for rank in range(16) if mask >> rank & 1]
    if not ranks or ranks[-1] >= cluster.size:
        raise Fault("remote-shared", f"multicast mask {mask:#x} in a cluster of {cluster.size} CTAs", address=address)
    for rank in ranks:
        cluster.ctas[rank].check_running(warp, "a multicast copy into shared memory")
    return [(cluster.ctas[rank], address & OFFSET_MASK) for rank in ranks]


def _barrier_for(warp: Warp, cta: Cta, address: int, *, multicast: bool, pair: bool) -> MBarrier:
    """The mbarrier to signal for data that lands in `cta`."""
    found = _signalled(warp, cta, address, multicast=multicast, pair=pair)
    if not found.announced and warp.clock.fenced[found.creator] < found.created:
        other = OtherAccess(warp.agents.name(found.creator), "initialised", found.line)
        report(Fault("mbarrier-init-unfenced", f"a copy signals the mbarrier that {other.who} initialised at PTX line "
                     f"{found.line}, with no fence.mbarrier_init or fence.proxy.async in between", address=found.offset,
                     other=other))  # fmt: skip
    return found


def _signalled(warp: Warp, cta: Cta, address: int, *, multicast: bool, pair: bool) -> MBarrier:
    """The mbarrier by the rules of .multicast and .cta_group (PTX ISA 9.7.9.27.1.2)."""
    offset = address & OFFSET_MASK
    if pair:
        parity = address >> RANK_SHIFT & 1
        rank = cta.place.cta_rank & ~1 | parity
        return warp.cta.cluster.ctas[rank].mbarrier(offset, warp.clock)
    if multicast:
        return cta.mbarrier(offset, warp.clock)
    return warp.cta.cluster.cta_of(address, "mbarrier operand").mbarrier(offset, warp.clock)


def _lanes(warp: Warp) -> list[int]:
    return active(warp).tolist()


def _issuers(b: Binder) -> Callable[[Warp], list[int]]:
    """The lanes that issue a store whose operands are bound. One lane issues if all active lanes have equal operands.

    Without an elected lane, ptxas compiles a store to one operation of the warp (as in FlashAttention-4 and quack). It
    compiles loads, whose bytes an mbarrier counts, and reductions to a loop: each active lane issues its own (SASS of
    ptxas 13.0 and 13.5; reductions on an H200: issued_programs in conformance/silicon/whole/copies.py).
    """
    keys = tuple((f"u{width}", row) for width, row in dict.fromkeys(b.uses) if width > 1)

    def lanes(warp: Warp) -> list[int]:
        active = _lanes(warp)
        if len(active) == 1:
            return active
        values = (getattr(warp, view)[row][warp.mask] for view, row in keys)
        return active if any(count_nonzero(one != one[0]) for one in values) else active[:1]

    return lanes


def _note_issue(warp: Warp, groups: ThreadGroups, lane: int, copy: Copy, issuers: list[int]) -> None:
    """Add a copy to the open group of `lane`, which issues it alone or for all active lanes."""
    groups.open.append(copy)
    groups.issuers |= warp.active_bits() if len(issuers) == 1 else 1 << lane


def _check_lanes(warp: Warp, lane: int, granules: Granules) -> None:
    """If one lane alone issues a copy, check that stores to the source, by other lanes or awaited by them alone, are
    ordered before it. A copy issued by all lanes needs no check."""
    if count_nonzero(warp.mask) == 1:
        offsets, by = 4 * granules, np.full(granules.size, lane)
        with ByLanes(by):
            warp.cta.smem.check_lanes(offsets, 4, by, (warp.agent, warp.meetings), "copied by")
            check_acquired(warp, warp.cta, offsets, 4, by)


def shared_address(b: Binder, operand: Operand) -> Callable[[Warp, int], int]:
    """Resolves a shared or generic operand to a 32-bit shared address (rank bits included), by lane."""
    address = b.address(operand)
    wide = b.width(getattr(operand, "base", operand)) == 64

    def at(warp: Warp, lane: int) -> int:
        value = address(warp)[lane : lane + 1]
        return int((resolve("", value)[1] if wide else value)[0])

    return at


class _TensorOperand:
    """`[map, {coordinates}]`: a tensor map and the coordinates of a box."""

    def __init__(self, b: Binder, operand: Operand) -> None:
        if not isinstance(operand, Address) or not operand.coordinates:
            raise b.error("the tensor operand must be [map, {coordinates}]")
        self._address = b.address(Address(operand.base, operand.offset))
        items = [item for part in operand.coordinates for item in b.vector(part)]
        needed = 5 if b.words["mode"] in ("tile::gather4", "tile::scatter4") else int(b.words["dim"][0])
        if len(items) != needed:
            raise b.error(f"{counted(len(items), 'coordinate')} where {needed} are needed")
        self._rows = [b.source(item, "s32") for item in items]

    def tensor_map(self, warp: Warp, lane: int) -> TensorMap:
        """The decoded map. Reads its lower half, which holds all fields, from whatever space the kernel keeps it in."""
        address = int(self._address(warp)[lane])
        machine = warp.cta.machine
        check_map_address(machine.memory, address, lane)
        machine.races.maps.use(machine.memory, address, warp, lane)
        with ByLanes([lane]):
            held = machine.read_generic(address, MAP_HALF)
        return decode_tensor_map(held.tobytes())

    def note_read(self, warp: Warp, lane: int, agent: int, serial: int) -> None:
        """Record that copy number `serial`, whose end is an action of `agent`, reads the map."""
        machine = warp.cta.machine
        machine.races.map_reads.note(machine.memory, int(self._address(warp)[lane]), warp, lane, agent, serial)

    def coordinates(self, warp: Warp, lane: int) -> list[int]:
        """Coordinates, dimension 0 first."""
        return [int(warp.s32[row][lane]) for row in self._rows]


def _plan(
    b: Binder, tensor_map: TensorMap, coordinates: list[int], address: int, offsets: list[int], *, store: bool = False
) -> BoxPlan:
    direction = "store" if store else "load"
    if b.words.get("mode", "").startswith("im2col"):
        return plan_im2col(tensor_map, coordinates, offsets, address, direction)
    if "gather4" in b.words.get("mode", "") or "scatter4" in b.words.get("mode", ""):
        return plan_gather4(tensor_map, coordinates[0], coordinates[1:], address, direction)
    rank = int(b.words["dim"][0])
    if rank != tensor_map.rank:
        raise Fault("tensor-map", f"a .{b.words['dim']} copy with a map of {counted(tensor_map.rank, 'dimension')}")
    return plan_box(tensor_map, coordinates, address, direction)


def _check_base(warp: Warp, lane: int, tensor_map: TensorMap, coordinates: list[int], plan: BoxPlan) -> None:
    """Report a load whose box begins outside of its tensor if the map's base address is not in the tensor's buffer.

    For such a box an H200 reads the byte at the base address, even if no other byte of the box is in memory. It does
    not for a box that begins inside, nor for a store, reduction or prefetch (facts.md 6.4). If that byte is in another
    buffer than the map has loaded from, the load works only by the luck of the allocation.
    """
    base, memory = tensor_map.address, warp.cta.machine.memory
    sides = zip(coordinates, tensor_map.dims, strict=True)
    axis = next((axis for axis, (start, extent) in enumerate(sides) if not 0 <= start < extent), None)
    if axis is None:
        tensor = memory.holding(int(plan.global_addresses[0]))
        if tensor is not None:
            memory.loaded_by_map[base] = tensor
        return
    begins = memory.holding(base)
    tensor = memory.loaded_by_map.get(base, begins)
    if begins is None or begins is not tensor:
        where = f"in no buffer{memory.nearest(base)}" if begins is None else f"in `{begins.name}`"
        of = "its tensor" if tensor is None else f"`{tensor.name}`"
        report(Fault("tensor-base", f"a box that begins at {coordinates}, outside of {of} (dimension {axis} is "
                     f"{tensor_map.dims[axis]}), is loaded with a map that begins {where}",
                     lane=lane))  # fmt: skip


def _offsets(b: Binder, operand: Operand) -> list[int]:
    """Register rows of the im2col offsets, width first: one per dimension between channels and images."""
    return [b.source(item, "u16") for item in b.braced(operand, int(b.words["dim"][0]) - 2)]


def _read_global(warp: Warp, plan: BoxPlan, tensor_map: TensorMap) -> Read:
    pieces = np.empty((plan.smem_addresses.size, plan.piece_bytes), np.uint8)
    inside = plan.in_bounds
    addresses = plan.global_addresses if plan.all_in_bounds else plan.global_addresses[inside]
    if not plan.all_in_bounds:
        pieces[~inside] = plan.fill
    if not addresses.size:
        return pieces, None
    buffer = warp.cta.machine.memory.find_span(addresses, plan.piece_bytes, "tensor copy")
    found = read_pieces(buffer.data, addresses - buffer.base, plan.piece_bytes)
    if tensor_map.element.tf32:
        found = rounded_to_tf32(found.view(np.uint32)).view(np.uint8)
    missing = _missing(buffer, addresses - buffer.base, plan.piece_bytes)
    if plan.all_in_bounds:
        return found, missing
    pieces[inside] = found
    if missing is not None:
        hidden = np.zeros(pieces.shape, np.bool_)
        hidden[inside] = missing.bytes_
        missing = Missing(hidden, missing.origin)
    return pieces, missing


def _missing(buffer: Buffer, offsets: npt.NDArray[np.int64], piece_bytes: int) -> Missing | None:
    """The undefined bytes of pieces of a buffer, None if there are none."""
    hidden = buffer.missing(offsets, piece_bytes)
    if hidden is None:
        return None
    piece, byte = np.argwhere(hidden)[0].tolist()
    return Missing(hidden, buffer.origin_of(int(offsets[piece]) + byte, 0))


@opcode("cp.async.bulk.tensor.<dim>.<dst>.global{.<mode>}.mbarrier::complete_tx::bytes{.multicast::cluster}"
        "{.<group>}{.L2::cache_hint}", section="9.7.9.27.1.2", counter="tma", dim=_DIMS,
        dst="shared::cluster shared::cta", mode=_MODES, group="cta_group::1 cta_group::2")  # fmt: skip
def tensor_load(b: Binder) -> Step:
    """Copy a box from global to shared memory and signal complete_tx on an mbarrier."""
    multicast, pair = bool(b.words["multicast::cluster"]), b.words["group"] == "cta_group::2"
    pixels, tiled = b.words["mode"] == "im2col", b.words["mode"] in ("", "tile")
    destination, source, barrier, *rest = b.hinted(3 + pixels + multicast)
    offset_rows = _offsets(b, rest.pop(0)) if pixels else []
    tensor, to, signal = _TensorOperand(b, source), shared_address(b, destination), shared_address(b, barrier)
    mask_row = b.source(rest[0], "u16") if multicast else None
    line, text = b.instruction.line, b.instruction.text

    def step(warp: Warp) -> None:
        for lane in _lanes(warp):
            tensor_map, address = tensor.tensor_map(warp, lane), to(warp, lane)
            if warp.cta.machine.ring and tensor_map.element.tf32:
                raise b.outside_ring()  # A tf32 load rounds.
            mask = int(warp.u16[mask_row][lane]) if mask_row is not None else None
            offsets = [int(warp.u16[row][lane]) for row in offset_rows]
            coordinates = tensor.coordinates(warp, lane)
            plan = _plan(b, tensor_map, coordinates, address & OFFSET_MASK, offsets)
            if tiled:
                _check_base(warp, lane, tensor_map, coordinates, plan)
            counters = warp.cta.machine.counters
            counters["tma_loads"] += 1
            counters["tma_load_bytes"] += int(plan.in_bounds.sum()) * plan.piece_bytes
            for cta, _ in _shared_targets(warp, address, mask):
                signalled = _barrier_for(warp, cta, signal(warp, lane), multicast=multicast, pair=pair)
                serial = _begin_load(
                    warp, cta, plan, signalled, lambda p=plan, m=tensor_map: _read_global(warp, p, m), line, text
                )
                _note_read(warp, plan, stamp(signalled.copy_agent, serial), lane)
                tensor.note_read(warp, lane, signalled.copy_agent, serial)
        warp.next_epoch()

    return step


def _note_read(warp: Warp, plan: BoxPlan, mark: int, lane: int) -> None:
    addresses = plan.global_addresses if plan.all_in_bounds else plan.global_addresses[plan.in_bounds]
    machine = warp.cta.machine
    if addresses.size:
        by = np.full(addresses.size, lane) if count_nonzero(warp.mask) == 1 else None
        machine.races.copied_from(machine.memory, addresses, plan.piece_bytes, warp, mark, by, bulk=True)


def _begin_load(
    warp: Warp,
    cta: Cta,
    plan: BoxPlan,
    barrier: MBarrier,
    read: Callable[[], Read],
    line: int,
    text: str,
    combine: tuple[str, str] = ("", ""),
) -> int:
    """Submit a load and return its serial number. `combine`: operation and element type of an atomic reduction into
    shared memory."""
    serial = warp.cta.cluster.next_copy()
    granules = granules_of(plan.smem_addresses, plan.piece_bytes)
    if not combine[0]:
        if warp.knows_unevenly() and count_nonzero(warp.mask) == 1:
            lanes = np.full(granules.size, int(warp.mask.argmax()))
            with ByLanes(lanes):
                check_acquired(warp, cta, 4 * granules, 4, lanes, writes=True)
        cta.smem.async_write_begins(granules, warp.clock, line, "the bulk copy")
    landed = _copy_clock(warp, barrier.copy_agent, serial)

    def perform() -> None:
        pieces, missing = read()
        if combine[0]:
            under = cta.smem.missing(plan.smem_addresses, plan.piece_bytes)
            missing = lost_in_reduction(missing, under, reduced_bytes(combine[1]))
            old = read_pieces(cta.smem.data, plan.smem_addresses, plan.piece_bytes)
            pieces = reduced(old, np.ascontiguousarray(pieces), *combine)
        write_pieces(cta.smem.data, plan.smem_addresses, pieces)
        cta.smem.async_write_ends(granules, stamp(barrier.copy_agent, serial), line)
        if missing is not None:
            origin = missing.origin.read_at(line).stored_at(line, warp.name)
            cta.smem.undefine(plan.smem_addresses, missing.bytes_, origin)
        barrier.complete_transactions(plan.transaction_bytes, landed, f"the copy of PTX line {line}")

    if cta is not warp.cta:
        cta.visit(barrier.copy_agent, serial, line)
    barrier.last_copy = submit(warp, "a bulk copy", line, text, perform, signals=(barrier,))
    barrier.last_copy_serial = serial
    return serial


@opcode("cp.async.bulk.<dst>.global.mbarrier::complete_tx::bytes{.multicast::cluster}{.L2::cache_hint}",
        "cp.async.bulk.<dst>.shared::cta.mbarrier::complete_tx::bytes", section="9.7.9.25.4.1", counter="tma",
        dst="shared::cluster shared::cta")  # fmt: skip
@opcode("cp.reduce.async.bulk.<dst>.shared::cta.mbarrier::complete_tx::bytes.<op>.<type>", section="9.7.9.25.4.2",
        counter="tma", dst="shared::cluster", op="and or xor", type="b32")  # fmt: skip
@opcode("cp.reduce.async.bulk.<dst>.shared::cta.mbarrier::complete_tx::bytes.<op>.<type>", section="9.7.9.25.4.2",
        counter="tma", dst="shared::cluster", op="add min max", type="u32 s32")  # fmt: skip
@opcode("cp.reduce.async.bulk.<dst>.shared::cta.mbarrier::complete_tx::bytes.<op>.<type>", section="9.7.9.25.4.2",
        counter="tma", dst="shared::cluster", op="inc dec", type="u32")  # fmt: skip
@opcode("cp.reduce.async.bulk.<dst>.shared::cta.mbarrier::complete_tx::bytes.<op>.<type>", section="9.7.9.25.4.2",
        counter="tma", dst="shared::cluster", op="add", type="u64")  # fmt: skip
def linear_load(b: Binder) -> Step:
    """Copy a run of bytes from global to shared memory, or from this CTA's shared memory to another CTA's, where a
    reduction may combine it with the old content."""
    multicast = bool(b.words.get("multicast::cluster"))
    combine = (b.words.get("op", ""), b.words.get("type", ""))
    destination, source, size, barrier, *rest = b.hinted(4 + multicast)
    local = "global" not in b.instruction.parts
    to, signal, count = shared_address(b, destination), shared_address(b, barrier), b.source(size, "u32")
    origin = shared_address(b, source) if local else None
    address_of = None if local else b.address(source)
    mask_row = b.source(rest[0], "u16") if multicast else None
    line, text = b.instruction.line, b.instruction.text

    def step(warp: Warp) -> None:
        memory = warp.cta.machine.memory
        for lane in _lanes(warp):
            bytes_, address = int(warp.u32[count][lane]), to(warp, lane)
            start = origin(warp, lane) if origin is not None else int(address_of(warp)[lane]) if address_of else 0
            _check_linear(address, start, bytes_, lane, memory, "" if local else "source")
            plan = _linear_plan(address & OFFSET_MASK, bytes_)
            warp.cta.machine.counters["tma_load_bytes"] += bytes_
            mask = int(warp.u16[mask_row][lane]) if mask_row is not None else None
            for cta, _ in _shared_targets(warp, address, mask):
                signalled = _barrier_for(warp, cta, signal(warp, lane), multicast=multicast, pair=False)
                read = _linear_reader(warp, start, bytes_, signalled, local=local)
                serial = _begin_load(warp, cta, plan, signalled, read, line, text, combine)
                if local and cta is not warp.cta:
                    warp.cta.visit(signalled.copy_agent, serial, line, own=True)
                if not local:
                    origin_plan = _linear_plan(start, bytes_)
                    _note_read(warp, origin_plan, stamp(signalled.copy_agent, serial), lane)
        warp.next_epoch()

    return step


def _check_linear(destination: int, source: int, size: int, lane: int, memory: GlobalMemory, in_global: str) -> None:
    """`in_global`: which end lies in global memory; "" if none does."""
    for what, value in (("destination", destination), ("source", source)):
        if value % 16:
            place = memory.spot(value) if what == in_global else f" {value:#x}"
            raise Fault("misaligned", f"the {what}{place} of a bulk copy is not a multiple of 16", lane=lane)
    if size <= 0 or size % 16:
        said = f"a bulk copy of {size} bytes, where a positive multiple of 16 is possible"
        raise Fault("bulk-copy", said, lane=lane)
    if size > MAX_DYNAMIC:  # Check before any piece is built.
        raise Fault("out-of-bounds", f"a bulk copy of {size} bytes; the shared memory of a CTA has at most "
                    f"{MAX_DYNAMIC}", lane=lane)  # fmt: skip


def _linear_plan(offset: int, size: int) -> BoxPlan:
    addresses = offset + np.arange(0, size, 16, dtype=np.int64)
    inside = np.ones(addresses.size, np.bool_)
    return BoxPlan(16, addresses, addresses, inside, True, np.zeros(16, np.uint8), size)


def _linear_reader(warp: Warp, start: int, size: int, barrier: MBarrier, *, local: bool) -> Callable[[], Read]:
    machine, cta = warp.cta.machine, warp.cta
    if local:
        offset = start & OFFSET_MASK
        pieces = offset + np.arange(0, size, 16, dtype=np.int64)
        mark = stamp(barrier.copy_agent, cta.cluster.next_copy())
        whole = cta.smem.async_read(granules_of(pieces, 16), warp.clock, mark, "the bulk copy")
        return lambda: (
            cta.smem.data[offset : offset + size].reshape(-1, 16),
            None if whole else cta.smem.missing(pieces, 16),
        )

    def read() -> Read:
        buffer = machine.memory.find(start, size, "bulk copy")
        first = start - buffer.base
        offsets = first + np.arange(0, size, 16, dtype=np.int64)
        return buffer.data[first : first + size].reshape(-1, 16), _missing(buffer, offsets, 16)

    return read


_REDUCTIONS = " ".join(REDUCED_TYPES)


@opcode("cp.async.bulk.tensor.<dim>.global.shared::cta{.<mode>}.bulk_group{.L2::cache_hint}", section="9.7.9.27.1.2",
        counter="tma", dim=_DIMS, mode="tile tile::scatter4 im2col_no_offs")  # fmt: skip
@opcode("cp.reduce.async.bulk.tensor.<dim>.global.shared::cta.<op>{.<mode>}.bulk_group{.L2::cache_hint}",
        section="9.7.9.27.1.3", counter="tma", dim=_DIMS, mode="tile im2col_no_offs", op=_REDUCTIONS)  # fmt: skip
def tensor_store(b: Binder) -> Step:
    """Copy a box from shared to global memory, clipped to the tensor. With an operation, reduce it into memory."""
    destination, source = b.hinted(2)
    no_offsets = [0] * (int(b.words["dim"][0]) - 2)
    tensor, origin = _TensorOperand(b, destination), shared_address(b, source)
    operation = b.words.get("op", "")
    line, text = b.instruction.line, b.instruction.text
    issuers = _lanes if operation else _issuers(b)

    def step(warp: Warp) -> None:
        written: list[Pieces] = []
        for lane in (lanes := issuers(warp)):
            tensor_map, address = tensor.tensor_map(warp, lane), origin(warp, lane)
            if operation:
                check_reduction(operation, tensor_map.element)
                if warp.cta.machine.ring and tensor_map.element.floating:
                    raise b.outside_ring()
            offset = warp.cta.own_offset(address, "tensor store")
            plan = _plan(b, tensor_map, tensor.coordinates(warp, lane), offset, no_offsets, store=True)
            serial, groups = warp.cta.cluster.next_copy(), CopyGroups.of(warp.copies.bulk, lane, warp.agents)
            tensor.note_read(warp, lane, groups.agent, serial)
            reader = stamp(groups.agent, serial)
            granules = granules_of(plan.smem_addresses, plan.piece_bytes)
            _check_lanes(warp, lane, granules)
            whole = warp.cta.smem.async_read(granules, warp.clock, reader, "the tensor store")
            counters = warp.cta.machine.counters
            counters["tma_stores"] += 1
            counters["tma_store_bytes"] += int(plan.in_bounds.sum()) * plan.piece_bytes
            written.append((plan.global_addresses[plan.in_bounds], plan.piece_bytes, stamp(groups.writer, serial)))
            perform = _store_performer(warp, plan, tensor_map, operation, line, doubtful=not whole)
            done = submit(warp, "a tensor store", line, text, perform)
            _note_issue(warp, groups, lane, Copy(done, serial), lanes)
        machine = warp.cta.machine
        machine.races.copied_to(machine.memory, written, warp, line, strong=PLAIN_ATOMIC if operation else None)

    return step


def _store_performer(
    warp: Warp, plan: BoxPlan, tensor_map: TensorMap, operation: str, line: int, *, doubtful: bool
) -> Callable[[], None]:
    """Makes the function that performs the store of PTX `line`. `doubtful`: some of the source is undefined."""
    smem, memory = warp.cta.smem, warp.cta.machine.memory

    def perform() -> None:
        inside = plan.in_bounds
        if not count_nonzero(inside):
            return
        addresses = plan.global_addresses[inside]
        pieces = read_pieces(smem.data, plan.smem_addresses, plan.piece_bytes)[inside]
        buffer = memory.find_span(addresses, plan.piece_bytes, "tensor store", writing=True)
        missing = smem.missing(plan.smem_addresses[inside], plan.piece_bytes) if doubtful else None
        if operation:
            under = _missing(buffer, addresses - buffer.base, plan.piece_bytes)
            missing = lost_in_reduction(missing, under, reduced_bytes(tensor_map.element.name))
            old = read_pieces(buffer.data, addresses - buffer.base, plan.piece_bytes)
            pieces = reduced(old, pieces, operation, tensor_map.element.name)
        write_pieces(buffer.data, addresses - buffer.base, np.ascontiguousarray(pieces))
        buffer.mark_written(addresses - buffer.base, plan.piece_bytes)
        if missing is not None:
            origin = missing.origin.read_at(line).stored_at(line, warp.name)
            buffer.undefine(addresses - buffer.base, missing.bytes_, origin)

    return perform


@opcode("cp.async.bulk.global.shared::cta.bulk_group{.L2::cache_hint}", section="9.7.9.25.4.1", counter="tma")
@opcode("cp.reduce.async.bulk.global.shared::cta.bulk_group{.L2::cache_hint}.<op>{.noftz}.<type>",
        section="9.7.9.25.4.2", counter="tma", op=_REDUCTIONS,
        type="b32 u32 s32 b64 u64 s64 f16 bf16 f32 f64")  # fmt: skip
def linear_store(b: Binder) -> Step:
    """Copy a run of bytes from shared to global memory, or reduce it into memory."""
    destination, source, size = b.hinted(3)
    address_of, origin, count = b.address(destination), shared_address(b, source), b.source(size, "u32")
    operation, element = b.words.get("op", ""), b.words.get("type", "")
    line, text = b.instruction.line, b.instruction.text
    issuers = _lanes if operation else _issuers(b)

    def step(warp: Warp) -> None:
        written, memory = list[Pieces](), warp.cta.machine.memory
        for lane in (lanes := issuers(warp)):
            bytes_, target, start = int(warp.u32[count][lane]), int(address_of(warp)[lane]), origin(warp, lane)
            _check_linear(target, start, bytes_, lane, memory, "destination")
            offset, serial = warp.cta.own_offset(start, "bulk copy"), warp.cta.cluster.next_copy()
            pieces = offset + np.arange(0, bytes_, 16, dtype=np.int64)
            groups = CopyGroups.of(warp.copies.bulk, lane, warp.agents)
            granules, mark = granules_of(pieces, 16), stamp(groups.agent, serial)
            _check_lanes(warp, lane, granules)
            whole = warp.cta.smem.async_read(granules, warp.clock, mark, "the bulk copy")
            warp.cta.machine.counters["tma_store_bytes"] += bytes_

            written.append((target + np.arange(0, bytes_, 16, dtype=np.int64), 16, stamp(groups.writer, serial)))

            def perform(target: int = target, offset: int = offset, bytes_: int = bytes_, whole: bool = whole) -> None:
                buffer = memory.find_span(np.array([target]), bytes_, "bulk copy", writing=True)
                into = buffer.data[target - buffer.base : target - buffer.base + bytes_]
                data = warp.cta.smem.data[offset : offset + bytes_]
                steps = np.arange(0, bytes_, 16, dtype=np.int64)
                at = target - buffer.base + steps
                missing = None if whole else warp.cta.smem.missing(offset + steps, 16)
                if operation:
                    missing = lost_in_reduction(missing, _missing(buffer, at, 16), reduced_bytes(element))
                into[:] = reduced(into.copy(), data.copy(), operation, element) if operation else data
                buffer.mark_written(at, 16)
                if missing is not None:
                    origin = missing.origin.read_at(line).stored_at(line, warp.name)
                    buffer.undefine(at, missing.bytes_, origin)

            done = submit(warp, "a bulk copy", line, text, perform)
            _note_issue(warp, groups, lane, Copy(done, serial), lanes)
        strong = PLAIN_ATOMIC if operation else None
        warp.cta.machine.races.copied_to(memory, written, warp, line, strong=strong)

    return step


@opcode("cp.async.bulk.commit_group", section="9.7.9.27.2.1", counter="tma")
def commit_group(b: Binder) -> Step:
    """Close the thread's open bulk group."""

    def step(warp: Warp) -> None:
        for lane in _lanes(warp):
            CopyGroups.of(warp.copies.bulk, lane, warp.agents).commit(warp.cta.cluster.copy_serial)

    return step


@opcode("cp.async.bulk.wait_group{.read}", section="9.7.9.27.2.2", kind="tail", counter="tma")
def wait_group(b: Binder) -> Step:
    """Wait until at most N of the thread's latest bulk groups are pending. A source counts as read only when the copy
    ends. After .read the destination may still be unwritten."""
    allowed, reads = b.immediate(b.expect(1)[0]), bool(b.words["read"])

    def step(warp: Warp) -> object:
        groups = {lane: CopyGroups.of(warp.copies.bulk, lane, warp.agents) for lane in _lanes(warp)}

        def finish() -> None:
            for lane, group in groups.items():
                warp.cta.machine.races.map_reads.wait(warp, lane, group.issued(allowed))
                _learn(warp, group, group.waited(allowed), 0 if reads else group.written(allowed))

        return Wait(
            ready=lambda: not any(group.outstanding(allowed) for group in groups.values()),
            reason=lambda: f"all but {allowed} of its bulk groups to end",
            finish=finish,
        )

    return step


def _learn(warp: Warp, group: ThreadGroups, read: int, written: int) -> None:
    """After a wait by the active lanes: those that issued the copies of `group` know the end of those up to number
    `read`, and of the writes of those up to number `written`."""
    seen, knowing = warp.clock.seen, warp.active_bits() & group.issuers
    if read <= seen[group.agent] and written <= seen[group.writer]:
        return
    if not bits_of(warp.alive) & ~knowing:
        warp.learn(group.agent, read)
        warp.learn(group.writer, written)
        return
    before = warp.known()
    seen[group.agent] = max(int(seen[group.agent]), read)
    seen[group.writer] = max(int(seen[group.writer]), written)
    warp.have_acquired(before, group.issuers)


@opcode("cp.async.bulk.prefetch.tensor.<dim>.L2.global{.<mode>}{.L2::cache_hint}", section="9.7.9.27.1.4",
        counter="tma", dim=_DIMS, mode=_MODES)  # fmt: skip
@opcode("cp.async.bulk.prefetch.L2.global{.L2::cache_hint}", section="9.7.9.25.4.3", counter="tma")
@opcode("prefetch{.<space>}.tensormap", section="9.7.9.15", counter="tma", space="param const")
def prefetch(b: Binder) -> Step:
    """Do nothing: caches do not change results here."""
    if "dim" in b.words:
        pixels = b.words["mode"] == "im2col"
        source, *rest = b.hinted(1 + pixels)
        _TensorOperand(b, source)
        for offsets in rest:
            _offsets(b, offsets)
    elif "L2" in b.words:
        place, size = b.hinted(2)
        b.address(place)
        b.source(size, "u32")
    else:
        b.address(b.expect(1)[0])
    return lambda warp: None

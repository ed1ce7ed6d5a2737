"""Lane-wise access to any state space: the one place that knows windows, ranks, ordering and counters."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from backends.vm.faults import ByLanes, Fault, counted, report
from backends.vm.machine.code import LANES
from backends.vm.memory.clocks import Flag
from backends.vm.memory.definedness import Mask, Missing, Origin
from backends.vm.memory.global_memory import PARAM_WINDOW, SHARED_WINDOW, WINDOW_SHIFT, Buffer, check_alignment
from backends.vm.memory.pieces import read_pieces
from backends.vm.memory.shared import OFFSET_MASK, RANK_SHIFT, wavefronts
from backends.vm.memory.strong_writes import Strong
from backends.vm.numpy_calls import count_nonzero

if TYPE_CHECKING:
    from backends.vm.machine.cta import Cta
    from backends.vm.machine.machine import Machine
    from backends.vm.machine.warp import Warp

Bytes = npt.NDArray[np.uint8]
Addresses = npt.NDArray[np.int64]

_ALL_LANES = np.arange(LANES)
_ALL_LANES.flags.writeable = False
_SPACE_OF_WINDOW = {0: "global", 1: "shared::cluster", 2: "local", 3: "param"}


def active(warp: Warp) -> Addresses:
    """The numbers of the active lanes."""
    return _ALL_LANES if warp.where is True else np.flatnonzero(warp.mask)


def uniform(values: npt.NDArray[np.integer], what: str) -> int:
    """The value that all active lanes hold. `values` contains only the active lanes."""
    if count_nonzero(values != values[0]):
        raise Fault("diverged", f"{what} must be the same in all lanes; they hold {sorted(set(values.tolist()))[:4]}")
    return int(values[0])


def resolve(space: str, addresses: Addresses) -> tuple[str, Addresses]:
    """The state space of generic addresses (`space` ""), and their addresses within it."""
    if space:
        return space, addresses
    windows = addresses >> WINDOW_SHIFT
    window = int(windows[0])
    if count_nonzero(windows != window):
        raise Fault("mixed-windows", "lanes of one generic access fall into different state spaces")
    if window not in _SPACE_OF_WINDOW:
        raise Fault("out-of-bounds", "a generic address outside of every window", lane=0, address=int(addresses[0]))
    return _SPACE_OF_WINDOW[window], addresses if window in (0, 3) else addresses & ((1 << WINDOW_SHIFT) - 1)


def owner(warp: Warp, space: str, addresses: Addresses, access: str) -> tuple[Cta, Addresses]:
    """The CTA whose shared memory `addresses` lie in, and the offsets there. All lanes must address the same CTA."""
    ranks = addresses >> RANK_SHIFT
    cluster = warp.cta.cluster
    outside = (ranks < 0) | (ranks >= cluster.size)
    if count_nonzero(outside):
        lane = int(outside.argmax())
        said = f"shared {access} at an address of CTA rank {ranks[lane]} of a cluster of {cluster.size}"
        # Through .shared, it is an address astray rather than a wrong rank.
        rule = "remote-shared" if space == "shared::cluster" else "out-of-bounds"
        raise Fault(rule, said, lane=lane, address=int(addresses[lane]))
    if space != "shared::cluster" and count_nonzero(ranks != warp.cta.place.cta_rank):
        lane = int((ranks != warp.cta.place.cta_rank).argmax())
        try:
            warp.cta.own_offset(int(addresses[lane]), access)
        except Fault as fault:
            fault.lane = lane
            raise
    cta = cluster.ctas[int(ranks[0])]
    if cta is not warp.cta:
        cta.check_running(warp, f"a shared {access}")
        visit(warp, cta, warp.line)
    return cta, addresses & OFFSET_MASK


def visit(warp: Warp, cta: Cta, line: int) -> None:
    """Record that `warp` uses the memory of `cta`, another CTA, which must outlive the access."""
    cta.visit(warp.agent, int(warp.clock.seen[warp.agent]), line)


def load(
    warp: Warp, space: str, addresses: Addresses, size: int, *, strong: Strong | None = None,
    lanes: Addresses | None = None,
) -> Bytes:  # fmt: skip
    """As `take`, for an instruction that depends on each byte: reports a Fault if one is undefined."""
    lanes = active(warp) if lanes is None else lanes
    values, missing = take(warp, space, addresses, size, strong=strong, lanes=lanes)
    if missing is not None:
        lane, byte = np.argwhere(missing.bytes_)[0].tolist()
        what = f"this instruction depends on byte {byte} of the {size} that it loads"
        where, found = resolve(space, addresses[lane : lane + 1])
        at = None if where == "global" else int(found[0]) + byte
        report(missing.origin.fault(what, lane=int(lanes[lane]), address=at))
    return values


def take(
    warp: Warp,
    space: str,
    addresses: Addresses,
    size: int,
    *,
    strong: Strong | None = None,
    lanes: Addresses | None = None,
    constant: bool = False,
) -> tuple[Bytes, Missing | None]:
    """`size` bytes at each address, uint8 [n, size], and which of them are undefined (None: none).

    `lanes` own the addresses, by default the active ones. `constant`: a load with .nc.
    """
    lanes = active(warp) if lanes is None else lanes
    groups = _groups(space, addresses)
    if groups is not None:
        values, hidden, origin = (
            np.empty((addresses.size, size), np.uint8),
            np.zeros((addresses.size, size), bool),
            None,
        )
        for group in groups:
            values[group], missing = take(
                warp, space, addresses[group], size, strong=strong, lanes=lanes[group], constant=constant
            )
            if missing is not None:
                hidden[group], origin = missing.bytes_, missing.origin
        return values, None if origin is None else Missing(hidden, origin)
    with ByLanes(lanes):
        return _take(warp, space, addresses, size, lanes, strong=strong, constant=constant)


def _take(
    warp: Warp, space: str, addresses: Addresses, size: int, lanes: Addresses, *, strong: Strong | None, constant: bool
) -> tuple[Bytes, Missing | None]:
    space, addresses = resolve(space, addresses)
    if space.startswith("shared"):
        cta, offsets = owner(warp, space, addresses, "load")
        count_banks(warp, offsets, size)
        if not strong:
            cta.smem.check_lanes(offsets, size, lanes, (warp.agent, warp.meetings), "read by")
            check_acquired(warp, cta, offsets, size, lanes)
        by = lanes if lanes.size == offsets.size else _ALL_LANES[: offsets.size]
        if not strong:
            warp.agents.reads.read(warp.agent, warp.meetings, int((1 << by).sum()))
        values, hidden = cta.smem.load(
            offsets, size, warp.clock, warp.stamp, strong=strong, lanes=by, meetings=warp.meetings
        )
        if strong is not None and warp.watch is not None:
            warp.watch.note(cta.smem.data, offsets, values)
        return values, None if hidden is None else Missing(hidden, cta.smem.origin_of(_first(offsets, hidden), 0))
    if space == "param":
        return load_parameter(warp, addresses, size), None
    if space == "local":
        return _load_local(warp, addresses, size, lanes)
    machine = warp.cta.machine
    buffer, offsets = machine.memory.locate(addresses, size, "load")
    if buffer is None:
        return _split_load(warp, addresses, size, lanes, strong=strong, constant=constant)
    if buffer.writable and strong is None:
        machine.races.read(buffer, addresses, size, warp, warp.stamp, lanes=lanes, constant=constant)
    elif buffer.writable and strong is not None and strong.kind == "load":
        machine.races.read_strongly(buffer, addresses, size, warp, strong)
    values = read_pieces(buffer.data, offsets, size)
    if strong is not None and warp.watch is not None:
        warp.watch.note(buffer.data, offsets, values)
    return values, missing_in(buffer, offsets, size)


def check_acquired(
    warp: Warp, cta: Cta, offsets: Addresses, size: int, lanes: Addresses, *, writes: bool = False
) -> None:
    """Report that `lanes` [n] access shared memory that only other lanes of the warp have acquired."""
    if lanes.size == offsets.size and warp.knows_unevenly():
        cta.smem.check_acquired(offsets, size, lanes, warp.acquires, (warp.clock, warp.agent), writes=writes)


def missing_in(buffer: Buffer, offsets: Addresses, size: int) -> Missing | None:
    """The undefined bytes among `size` at each of `offsets` [n] in global memory."""
    hidden = None if buffer.state is None else buffer.missing(offsets, size)
    return None if hidden is None else Missing(hidden, buffer.origin_of(_first(offsets, hidden), 0))


def _first(offsets: Addresses, hidden: Mask) -> int:
    """The offset of the first undefined byte of an access."""
    lane, byte = np.argwhere(hidden)[0].tolist()
    return int(offsets[lane]) + byte


def _load_local(warp: Warp, addresses: Addresses, size: int, lanes: Addresses) -> tuple[Bytes, Missing | None]:
    local, index = warp.local, _local_index(warp, addresses, size, lanes)
    defined = local.defined[index]
    if count_nonzero(defined) == defined.size:
        return local.data[index], None
    at = _first(addresses, ~defined)
    origin = local.sources.by_unit.get(at >> 2)
    if origin is None:
        origin = Origin("uninitialised-local", f"byte {at} of local memory, which was never written in this lane")
    return local.data[index], Missing(~defined, origin)


def store(
    warp: Warp,
    space: str,
    addresses: Addresses,
    values: Bytes,
    line: int,
    *,
    strong: Strong | None = None,
    lanes: Addresses | None = None,
) -> None:
    """Write uint8 [n, size] at each address. `lanes` own the addresses, by default the active ones."""
    lanes = active(warp) if lanes is None else lanes
    groups = _groups(space, addresses)
    if groups is not None:
        for group in groups:
            store(warp, space, addresses[group], values[group], line, strong=strong, lanes=lanes[group])
        return
    with ByLanes(lanes):
        _store(warp, space, addresses, values, line, lanes, strong=strong)


def _store(
    warp: Warp, space: str, addresses: Addresses, values: Bytes, line: int, lanes: Addresses, *, strong: Strong | None
) -> None:
    space, addresses = resolve(space, addresses)
    engine = warp.cta.machine.engine
    if space.startswith("shared"):
        cta, offsets = owner(warp, space, addresses, "store")
        count_banks(warp, offsets, values.shape[1])
        if not strong:
            check_acquired(warp, cta, offsets, values.shape[1], lanes, writes=True)
        changed = cta.smem.store(offsets, values, warp.clock, warp.stamp, line, strong=strong)
        cta.smem.note_lanes(offsets, values.shape[1], lanes, 0 if strong else warp.meetings)
        if not strong:
            warp.stored_at = warp.meetings
        engine.repeatable += changed and strong is None
    elif space == "local":
        local, index = warp.local, _local_index(warp, addresses, values.shape[1], lanes)
        changed = local.data[index].tobytes() != values.tobytes() or not local.defined[index].all()
        local.data[index], local.defined[index] = values, True
    elif space == "param":
        raise Fault("read-only", "store to parameter space", lane=0, address=int(addresses[0]))
    else:
        _note_store(warp, addresses, values, line, lanes, strong=strong)
        changed = warp.cta.machine.memory.store(addresses, values)
    engine.events += changed


def compare(warp: Warp, space: str, addresses: Addresses, size: int, strong: Strong, lanes: Addresses) -> None:
    """After a `take` by compare-and-swaps: note those at `addresses`, by `lanes`, as `strong` reads; they have failed.

    One on an input is a fault all the same, because whether it fails is a matter of timing.
    """
    groups = _groups(space, addresses)
    if groups is not None:
        for group in groups:
            compare(warp, space, addresses[group], size, strong, lanes[group])
        return
    with ByLanes(lanes):
        where, own = resolve(space, addresses)
        if where.startswith("shared"):
            cta, offsets = owner(warp, where, own, "load")
            cta.smem.note_comparison(offsets, size, warp.clock, warp.stamp, strong)
        elif where == "global":
            _note_comparison(warp, own, size, strong, lanes)


def _note_comparison(warp: Warp, addresses: Addresses, size: int, strong: Strong, lanes: Addresses) -> None:
    machine = warp.cta.machine
    buffer, _ = machine.memory.locate(addresses, size, "store")
    if buffer is not None:
        machine.memory.check_writable(buffer, addresses)
        machine.races.compare(buffer, addresses, size, warp, warp.stamp, strong)
        return
    for i in range(addresses.size):
        with ByLanes(lanes[i : i + 1]):
            _note_comparison(warp, addresses[i : i + 1], size, strong, lanes[i : i + 1])


def undefine(
    warp: Warp, space: str, addresses: Addresses, missing: Mask, origin: Origin, *, lanes: Addresses | None = None
) -> None:
    """After a `store`: mark the bytes `missing` [n, size] of it undefined, with `origin` as their source."""
    lanes = active(warp) if lanes is None else lanes
    rows = np.flatnonzero(missing.any(axis=1))
    lanes, addresses, missing = lanes[rows], addresses[rows], missing[rows]
    for group in _groups(space, addresses) or [np.arange(rows.size)]:
        where, own = resolve(space, addresses[group])
        here = missing[group]
        if where.startswith("shared"):
            cta, offsets = owner(warp, where, own, "store")
            cta.smem.undefine(offsets, here, origin)
        elif where == "local":
            warp.local.defined[_local_index(warp, own, here.shape[1], lanes[group])] = ~here
            warp.local.sources.note(own >> 2, origin)
        else:
            _undefine_global(warp, own, here, origin)


def _undefine_global(warp: Warp, addresses: Addresses, missing: Mask, origin: Origin) -> None:
    buffer, offsets = warp.cta.machine.memory.locate(addresses, missing.shape[1], "store")
    if buffer is not None:
        buffer.undefine(offsets, missing, origin)
        return
    for i in range(addresses.size):
        _undefine_global(warp, addresses[i : i + 1], missing[i : i + 1], origin)


def _split_load(
    warp: Warp, addresses: Addresses, size: int, lanes: Addresses, *, strong: Strong | None, constant: bool
) -> tuple[Bytes, Missing | None]:
    """A load whose lanes lie in several buffers, done lane by lane."""
    one = [slice(i, i + 1) for i in range(addresses.size)]
    parts = [take(warp, "global", addresses[i], size, strong=strong, lanes=lanes[i], constant=constant) for i in one]
    values = np.concatenate([values for values, _ in parts])
    origins = [missing.origin for _, missing in parts if missing is not None]
    if not origins:
        return values, None
    none = np.zeros((1, size), np.bool_)
    hidden = np.concatenate([none if missing is None else missing.bytes_ for _, missing in parts])
    return values, Missing(hidden, origins[0])


def _note_store(
    warp: Warp, addresses: Addresses, values: Bytes, line: int, lanes: Addresses, *, strong: Strong | None
) -> None:
    """Check a store that is about to happen for races."""
    machine, size = warp.cta.machine, values.shape[1]
    buffer, _ = machine.memory.locate(addresses, size, "store")
    if buffer is not None:
        if buffer.writable:
            machine.races.write(
                buffer, addresses, size, warp, warp.stamp, line, strong=strong, lanes=lanes, values=values
            )
            if not strong:
                warp.stored_globally_at = warp.meetings
        return
    for i in range(addresses.size):
        with ByLanes(lanes[i : i + 1]):
            _note_store(warp, addresses[i : i + 1], values[i : i + 1], line, lanes[i : i + 1], strong=strong)


def _groups(space: str, addresses: Addresses) -> list[Addresses] | None:
    """Positions of the lanes, grouped by state space (generic) or CTA (shared::cluster). None if there is one group."""
    if space not in ("", "shared::cluster"):
        return None
    keys = addresses >> WINDOW_SHIFT
    shared = (keys == SHARED_WINDOW >> WINDOW_SHIFT) | (space != "")
    keys = np.where(shared, keys << 32 | (addresses >> RANK_SHIFT & 0xFF), keys)
    if not count_nonzero(keys != keys[0]):
        return None
    return [np.flatnonzero(keys == key) for key in dict.fromkeys(keys.tolist())]


def load_parameter(warp: Warp, addresses: Addresses, size: int) -> Bytes:
    """`size` bytes at each parameter-space address, plain or generic: uint8 [n, size]."""
    params = warp.cta.machine.params
    offsets = addresses - PARAM_WINDOW if int(addresses[0]) >= PARAM_WINDOW else addresses
    check_alignment(offsets, size, "parameter load")
    outside = (offsets < 0) | (offsets + size > params.size)
    if count_nonzero(outside):
        lane = int(outside.argmax())
        raise Fault("out-of-bounds", f"parameter load of {counted(size, 'byte')} outside of the "
                    f"{counted(params.size, 'byte')} of parameters",
                    lane=lane, address=int(offsets[lane]))  # fmt: skip
    return params[offsets[:, None] + np.arange(size)]


def _local_index(
    warp: Warp, addresses: Addresses, size: int, lanes: Addresses
) -> tuple[npt.NDArray[np.intp], Addresses]:
    check_alignment(addresses, size, "local access")
    outside = (addresses < 0) | (addresses + size > warp.local.data.shape[1])
    if count_nonzero(outside):
        lane = int(outside.argmax())
        raise Fault("out-of-bounds", f"local access of {counted(size, 'byte')}; a thread has "
                    f"{counted(warp.local.data.shape[1], 'byte')}",
                    lane=lane, address=int(addresses[lane]))  # fmt: skip
    return lanes[:, None].astype(np.intp), addresses[:, None] + np.arange(size)


def count_banks(warp: Warp, offsets: Addresses, size: int) -> None:
    """Count the bank passes of an access of `size` bytes a lane."""
    counters = warp.cta.machine.counters
    least, taken = wavefronts(offsets, size)
    counters["smem_wavefronts"] += taken
    counters["smem_bank_conflicts"] += taken - least


def count_served(machine: Machine, groups: int) -> None:
    """Count `groups` groups of lanes that the banks have served without a conflict."""
    machine.counters["smem_wavefronts"] += groups
    machine.counters["smem_bank_conflicts"] += 0


def synchronise(
    warp: Warp, space: str, addresses: Addresses, sem: str, scope: str, *, acquire: bool = False, release: bool = False,
    overwrites: bool = False, meetings: int | None = None,
) -> None:  # fmt: skip
    """A strong operation on flags: a release stores the warp's clock in them, an acquire takes over the clocks there.

    Call it before the access for an acquire, after it for a release. A relaxed operation needs the fences of the ISA's
    patterns (8.8): it stores what a fence has covered, and what it finds is known after a fence. `.volatile` and an
    atomic without an order are relaxed. `overwrites`: the release is a store. Who reads it sees no earlier release to
    the flag, as only atomics continue those (8.9.2), but for those of the storing thread (8.8). `meetings`: the warp's
    count before an acquire by the same operation, because that acquire does not order what other lanes stored before
    it.
    """
    races, narrow = warp.cta.machine.races, scope == "cta"
    takes, gives = sem in ("acquire", "acq_rel"), sem in ("release", "acq_rel")
    before = warp.acquiring() if acquire else None
    for address in dict.fromkeys(addresses.tolist()):
        where, place = space, address
        if not space:
            where, own = resolve(space, np.array([address], np.int64))
            place = int(own[0])
        flags, key = warp.cta.cluster.flags, (where.partition("::")[0], place)
        wide = where == "global" and scope not in ("cta", "cluster")
        if acquire:
            if wide:
                races.acquire(place, warp, ordered=takes)
            if key in flags:
                warp.take(flags[key], flags[key], relaxed=not takes, narrow=narrow)
        if release:
            held = flags.setdefault(key, Flag())
            if gives:
                held.releasers.add(warp.agent)
            ordered = gives or (overwrites and warp.agent in held.releasers)
            if overwrites:
                held.parts.clear()
                races.flags.pop(place, None)
            for clock, rank, only in warp.given(relaxed=not ordered, narrow=narrow):
                held.give(clock, rank, narrow=only)
            if wide:
                races.release(place, warp, ordered=ordered)
    if before is not None:
        warp.have_acquired(before)
    if release:
        warp.next_epoch(warp.active_bits(), meetings)

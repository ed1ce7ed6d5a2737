"""Lane-wise access to any state space: the one place that knows windows, ranks, ordering and counters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from backends.vm.faults import Fault
from backends.vm.memory.clocks import Carried
from backends.vm.memory.global_memory import PARAM_WINDOW, SHARED_WINDOW, WINDOW_SHIFT, check_alignment
from backends.vm.memory.shared import OFFSET_MASK, RANK_SHIFT, wavefronts

if TYPE_CHECKING:
    from backends.vm.machine.cta import Cta
    from backends.vm.machine.warp import Warp

Bytes = npt.NDArray[np.uint8]
Addresses = npt.NDArray[np.int64]
Needed = Callable[[], Iterable[tuple[int, int]]]

_SPACE_OF_WINDOW = {0: "global", 1: "shared::cluster", 2: "local", 3: "param"}


def uniform(values: npt.NDArray[np.integer], what: str) -> int:
    """The value that all active lanes hold; `values` are theirs alone."""
    if np.count_nonzero(values != values[0]):
        raise Fault("diverged", f"{what} must be the same in all lanes; they hold {sorted(set(values.tolist()))[:4]}")
    return int(values[0])


def resolve(space: str, addresses: Addresses) -> tuple[str, Addresses]:
    """The state space that generic addresses fall into (`space` ""), with addresses of that space."""
    if space:
        return space, addresses
    windows = addresses >> WINDOW_SHIFT
    window = int(windows[0])
    if np.count_nonzero(windows != window):
        raise Fault("mixed-windows", "lanes of one generic access fall into different state spaces")
    if window not in _SPACE_OF_WINDOW:
        raise Fault("out-of-bounds", "a generic address outside of every window", lane=0, address=int(addresses[0]))
    return _SPACE_OF_WINDOW[window], addresses if window in (0, 3) else addresses & ((1 << WINDOW_SHIFT) - 1)


def owner(warp: Warp, space: str, addresses: Addresses, access: str) -> tuple[Cta, Addresses]:
    """The CTA whose shared memory `addresses` lie in, and offsets in it. All lanes must mean the same CTA."""
    ranks = addresses >> RANK_SHIFT
    cluster = warp.cta.cluster
    outside = (ranks < 0) | (ranks >= cluster.size)
    if np.count_nonzero(outside):
        lane = int(outside.argmax())
        raise Fault("out-of-bounds", f"shared {access} at an address of CTA rank {ranks[lane]} of a cluster of "
                    f"{cluster.size}", lane=lane, address=int(addresses[lane]))  # fmt: skip
    if space != "shared::cluster" and np.count_nonzero(ranks != warp.cta.place.cta_rank):
        lane = int((ranks != warp.cta.place.cta_rank).argmax())
        try:
            warp.cta.own_offset(int(addresses[lane]), access)
        except Fault as fault:
            fault.lane = lane
            raise
    cta = cluster.ctas[int(ranks[0])]
    visit(warp, cta, f"a shared {access}", warp.line)
    return cta, addresses & OFFSET_MASK


def visit(warp: Warp, cta: Cta, what: str, line: int) -> None:
    """`warp` uses the memory of `cta`: another CTA must be there, and must not end before this is over."""
    if cta is not warp.cta:
        cta.check_present(what)
        cta.visit(warp.agent, int(warp.clock.seen[warp.agent]), line)


def load(
    warp: Warp,
    space: str,
    addresses: Addresses,
    size: int,
    *,
    strong: bool = False,
    lanes: Addresses | None = None,
    needed: Needed | None = None,
) -> Bytes:
    """`size` bytes at each address, uint8 [n, size]. `lanes` own the addresses: the active ones unless given.

    `needed` gives offset and size of the parts that the kernel uses (None: all): only these must have been written.
    """
    lanes = np.flatnonzero(warp.mask) if lanes is None else lanes
    groups = _groups(space, addresses)
    if groups is not None:
        values = np.empty((addresses.size, size), np.uint8)
        for group in groups:
            values[group] = load(warp, space, addresses[group], size, strong=strong, lanes=lanes[group], needed=needed)
        return values
    try:
        return _load(warp, space, addresses, size, lanes, strong=strong, needed=needed)
    except Fault as fault:
        raise _of_lane(fault, lanes) from None


def _load(
    warp: Warp,
    space: str,
    addresses: Addresses,
    size: int,
    lanes: Addresses,
    *,
    strong: bool,
    needed: Needed | None,
) -> Bytes:
    space, addresses = resolve(space, addresses)
    if space.startswith("shared"):
        cta, offsets = owner(warp, space, addresses, "load")
        _count_banks(warp, offsets, size)
        return cta.smem.load(offsets, size, warp.clock, warp.stamp, strong=strong)
    if space == "param":
        return _load_param(warp, addresses, size)
    if space == "local":
        return warp.local[_local_index(warp, addresses, size, lanes)]
    machine = warp.cta.machine
    buffer, offsets = machine.memory.locate(addresses, size, "load")
    if buffer is None:
        return _split_load(warp, addresses, size, lanes, strong=strong, needed=needed)
    if buffer.writable and not strong:
        machine.races.read(buffer, addresses, size, warp, warp.stamp)
    if buffer.written is not None:
        for first, bytes_ in ((0, size),) if needed is None else needed():
            buffer.check_written(offsets + first, bytes_, "this load")
    return buffer.data[offsets[:, None] + np.arange(size)]


def store(
    warp: Warp,
    space: str,
    addresses: Addresses,
    values: Bytes,
    line: int,
    *,
    strong: bool = False,
    lanes: Addresses | None = None,
) -> None:
    """Write uint8 [n, size] at each address. `lanes` own the addresses: the active ones unless given."""
    lanes = np.flatnonzero(warp.mask) if lanes is None else lanes
    groups = _groups(space, addresses)
    if groups is not None:
        for group in groups:
            store(warp, space, addresses[group], values[group], line, strong=strong, lanes=lanes[group])
        return
    try:
        _store(warp, space, addresses, values, line, lanes, strong=strong)
    except Fault as fault:
        raise _of_lane(fault, lanes) from None


def _store(
    warp: Warp, space: str, addresses: Addresses, values: Bytes, line: int, lanes: Addresses, *, strong: bool
) -> None:
    space, addresses = resolve(space, addresses)
    warp.cta.machine.engine.events += 1
    if space.startswith("shared"):
        cta, offsets = owner(warp, space, addresses, "store")
        _count_banks(warp, offsets, values.shape[1])
        cta.smem.store(offsets, values, warp.clock, warp.stamp, line, strong=strong)
    elif space == "local":
        warp.local[_local_index(warp, addresses, values.shape[1], lanes)] = values
    elif space == "param":
        raise Fault("read-only", "store to parameter space", lane=0, address=int(addresses[0]))
    else:
        _note_store(warp, addresses, values, line, strong=strong)
        warp.cta.machine.memory.store(addresses, values)


def _split_load(
    warp: Warp, addresses: Addresses, size: int, lanes: Addresses, *, strong: bool, needed: Needed | None
) -> Bytes:
    """A load whose lanes lie in several buffers."""
    one = [slice(i, i + 1) for i in range(addresses.size)]
    parts = [_load(warp, "global", addresses[i], size, lanes[i], strong=strong, needed=needed) for i in one]
    return np.concatenate(parts)


def _note_store(warp: Warp, addresses: Addresses, values: Bytes, line: int, *, strong: bool) -> None:
    """Check a store that is about to happen for races."""
    machine, size = warp.cta.machine, values.shape[1]
    buffer, _ = machine.memory.locate(addresses, size, "store")
    if buffer is not None:
        if buffer.writable:
            machine.races.write(buffer, addresses, size, warp, warp.stamp, line, strong=strong, values=values)
        return
    for i in range(addresses.size):
        _note_store(warp, addresses[i : i + 1], values[i : i + 1], line, strong=strong)


def _groups(space: str, addresses: Addresses) -> list[Addresses] | None:
    """Positions of the lanes by state space (generic) or CTA (shared::cluster). None if there is one group."""
    if space not in ("", "shared::cluster"):
        return None
    keys = addresses >> WINDOW_SHIFT
    shared = (keys == SHARED_WINDOW >> WINDOW_SHIFT) | (space != "")
    keys = np.where(shared, keys << 32 | (addresses >> RANK_SHIFT & 0xFF), keys)
    if not np.count_nonzero(keys != keys[0]):
        return None
    return [np.flatnonzero(keys == key) for key in dict.fromkeys(keys.tolist())]


def _of_lane(fault: Fault, lanes: Addresses) -> Fault:
    """`fault` with its lane counted in the warp: memories count the addresses of one access."""
    if fault.lane is not None:
        fault.lane = int(lanes[fault.lane])
    return fault


def _load_param(warp: Warp, addresses: Addresses, size: int) -> Bytes:
    params = warp.cta.machine.params
    offsets = addresses - PARAM_WINDOW if int(addresses[0]) >= PARAM_WINDOW else addresses
    check_alignment(offsets, size, "parameter load")
    outside = (offsets < 0) | (offsets + size > params.size)
    if np.count_nonzero(outside):
        lane = int(outside.argmax())
        raise Fault("out-of-bounds", f"parameter load of {size} bytes outside of the {params.size} bytes of parameters",
                    lane=lane, address=int(offsets[lane]))  # fmt: skip
    return params[offsets[:, None] + np.arange(size)]


def _local_index(
    warp: Warp, addresses: Addresses, size: int, lanes: Addresses
) -> tuple[npt.NDArray[np.intp], Addresses]:
    check_alignment(addresses, size, "local access")
    outside = (addresses < 0) | (addresses + size > warp.local.shape[1])
    if np.count_nonzero(outside):
        lane = int(outside.argmax())
        raise Fault("out-of-bounds", f"local access of {size} bytes; a thread has {warp.local.shape[1]} bytes",
                    lane=lane, address=int(addresses[lane]))  # fmt: skip
    return lanes[:, None].astype(np.intp), addresses[:, None] + np.arange(size)


def _count_banks(warp: Warp, offsets: Addresses, size: int) -> None:
    counters = warp.cta.machine.counters
    least, taken = wavefronts(offsets, size)
    counters["smem_wavefronts"] += taken
    counters["smem_bank_conflicts"] += taken - least


def synchronise(
    warp: Warp, space: str, addresses: Addresses, sem: str, scope: str, *, acquire: bool, release: bool
) -> None:
    """A strong operation on flags: a release carries the warp's clock to them, an acquire takes over what they carry.

    An acquire comes before the access, a release after it. In global memory, a relaxed operation of a scope beyond the
    cluster needs the fence of the ISA's patterns (backends.vm.memory.clocks). Elsewhere it counts as both.
    """
    races = warp.cta.machine.races
    for address in dict.fromkeys(addresses.tolist()):
        where, own = resolve(space, np.array([address], np.int64))
        place = int(own[0])
        wide = where == "global" and scope not in ("cta", "cluster")
        takes, gives = not wide or sem in ("acquire", "acq_rel"), not wide or sem in ("release", "acq_rel")
        if wide and acquire:
            races.acquire(place, warp, ordered=takes)
        if wide and release:
            races.release(place, warp, ordered=gives)
        flags, key = warp.cta.cluster.flags, (where.partition("::")[0], place)
        rank, narrow = warp.cta.place.cta_rank, scope == "cta"
        if acquire and takes and key in flags:
            flags[key].take(warp.clock, rank, narrow=narrow)
        if release and gives:
            flags.setdefault(key, Carried()).give(warp.clock, rank, narrow=narrow)
    if release:
        warp.next_epoch()

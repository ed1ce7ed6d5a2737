"""Pieces of PTX that many little kernels share: mbarriers, waits, tensor memory, matrix operands."""

from __future__ import annotations

import itertools

_labels = itertools.count()

ELECT = "elect.sync _|%p15, 0xffffffff;"
"""%p15: this lane is the leader of its warp."""
FENCE = "fence.proxy.async.shared::cta;"
SYNC = "bar.sync 0;"


def wait(mbarrier: str, parity: str | int) -> str:
    """Loop around try_wait.parity until the phase of `parity` is over."""
    label = f"WAIT_{next(_labels)}"
    return f"{label}: mbarrier.try_wait.parity.shared::cta.b64 %p14, [{mbarrier}], {parity};\n@!%p14 bra {label};"


def init(*mbarriers: str, count: int = 1) -> str:
    """Thread 0 initialises the mbarriers; everybody knows after a barrier."""
    lines = [f"@%p13 mbarrier.init.shared::cta.b64 [{name}], {count};" for name in mbarriers]
    return "\n".join(["setp.eq.u32 %p13, %tx, 0;", *lines, "fence.mbarrier_init.release.cluster;", SYNC])


def tmem_alloc(columns: int = 32) -> str:
    """Warp 0 allocates; %r40 holds the address in every thread. Needs `.shared .align 4 .b32 taddr`."""
    return f"""setp.eq.u32 %p12, %warp, 0;
@%p12 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [taddr], {columns};
{SYNC}
ld.shared.u32 %r40, [taddr];"""


def tmem_free(columns: int = 32) -> str:
    """Everybody is done; warp 0 gives the columns back."""
    return f"""{SYNC}
@%p12 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r40, {columns};"""


def f16_idesc(m: int, n: int, *, d_f32: bool = True, bf16: bool = False, extra: int = 0) -> int:
    """An instruction descriptor of kind::f16 (PTX ISA 9.7.16.4.2)."""
    return int(d_f32) << 4 | (int(bf16) << 7) | (int(bf16) << 10) | (n >> 3) << 17 | (m >> 4) << 24 | extra

"""The vocabulary that kernels are written in: Python that reads like PTX and emits PTX that reads as if typed by hand.

    x = Builder("scale", target="sm_100a", version=(8, 6), block=128)
    n = x.param("n", "u32")
    x.section("every thread")
    i = x.let("i", "mov.u32", TID_X)
    beyond = x.let("beyond", "setp.ge.u32", i, n)
    with x.unless(beyond, "in_range"):
        ...
    x.emit("ret")
    print(x.text())

`let` declares the register it writes, with the type implied by the mnemonic. `emit` writes to existing registers. Both
check every operand against the table in signatures.py immediately. `text` refuses labels that were never placed and
registers that are read but never written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from backends.ptx.emitter import Emitter, Predicate
from backends.ptx.operands import SINK, Address, Elected, Label, Negated, Register, Special, Vector, at

TID_X, LANEMASK_LT = Special("%tid.x", "u32"), Special("%lanemask_lt", "u32")
CTAID_X, CTAID_Y, CTAID_Z = (Special(f"%ctaid.{axis}", "u32") for axis in "xyz")
NCTAID_X, NCTAID_Z = Special("%nctaid.x", "u32"), Special("%nctaid.z", "u32")
FULL_WARP = 0xFFFFFFFF
"""The member mask of all 32 lanes."""
MBARRIER_BYTES = 8
COMPLETE_TX = "mbarrier::complete_tx::bytes"
SHARED_CTA_VERSION = (8, 6)
"""From this PTX ISA on, tensor copies may name .shared::cta as their destination; before, only .shared::cluster."""


@dataclass(frozen=True, slots=True)
class Loop:
    """The labels of a loop: `again` is its first instruction, `done` the one after it."""

    again: Label
    done: Label


class Builder(Emitter):
    """An entry with one method per idiom."""

    # Control flow

    @contextmanager
    def when(self, predicate: Predicate, name: str) -> Iterator[None]:
        """Runs the body in threads whose predicate holds; the others branch over it."""
        inverse = predicate.register if isinstance(predicate, Negated) else ~predicate
        with self.unless(inverse, name):
            yield

    @contextmanager
    def unless(self, predicate: Predicate, name: str) -> Iterator[None]:
        """Runs the body in threads whose predicate does not hold."""
        done = self.label(f"{name}_done")
        self.emit("bra", done, guard=predicate)
        yield
        self.place(done)

    @contextmanager
    def loop(self, name: str) -> Iterator[Loop]:
        """An endless loop; the body leaves it with `emit("bra", loop.done, guard=p)`."""
        loop = Loop(self.label(name), self.label(f"{name}_done"))
        self.place(loop.again)
        yield loop
        self.emit("bra", loop.again)
        self.place(loop.done)

    @contextmanager
    def while_below(
        self, name: str, index: Register, end: Register, finished: str, *steps: tuple[Register, Register | int]
    ) -> Iterator[None]:
        """Runs the body while `index` < `end` (u32). After each pass it adds to each register of `steps` the value
        paired with it.

        `finished` names the predicate that ends the loop.
        """
        is_finished = self.reg(finished, "pred")
        with self.loop(name) as loop:
            self.emit("setp.ge.u32", is_finished, index, end)
            self.emit("bra", loop.done, guard=is_finished)
            yield
            for register, step in steps:
                self.emit("add.u32", register, register, step)

    def elect(self, leader: Register) -> Register:
        """Makes the predicate `leader` true in one lane of the warp."""
        self.emit("elect.sync", Elected(leader), FULL_WARP)
        return leader

    def sync_cta(self, note: str = "") -> None:
        """Barrier for all threads of the CTA."""
        self.emit("bar.sync", 0, note=note)

    def sync_warp(self) -> None:
        """Barrier for all lanes of the warp."""
        self.emit("bar.warp.sync", FULL_WARP)

    def setmaxnreg(self, direction: Literal["inc", "dec"], registers: int, note: str = "") -> None:
        """Sets the number of registers that a thread of this warpgroup may use."""
        self.emit(f"setmaxnreg.{direction}.sync.aligned.u32", registers, note=note)

    # Addresses and tables

    def indexed(self, name: str, base: Register, index: Register, stride: int) -> Register:
        """The 32-bit address `base + index * stride`."""
        return self.let(name, "mad.lo.u32", index, stride, base)

    def indexed_wide(self, name: str, base: Register, index: Register, stride: int) -> Register:
        """The 64-bit address `base + index * stride`."""
        return self.let(name, "mad.wide.u32", index, stride, base)

    def entry_of(self, name: str, table: Register, index: Register) -> Register:
        """Entry `index` of a u32 table in global memory."""
        return self.let(name, "ld.global.u32", at(self.indexed_wide(f"{name}_at", table, index, 4)))

    def packed_bf16(self, name: str, values: Sequence[Register]) -> Vector:
        """f32 `values` as pairs of bf16, rounded to nearest even."""
        pairs = self.regs(name, "b32", len(values) // 2)
        for pair, even, odd in zip(pairs, values[::2], values[1::2], strict=True):
            self.emit("cvt.rn.bf16x2.f32", pair, odd, even)
        return pairs

    # mbarriers

    def init_mbarrier(self, place: Address, arrivals: int, note: str) -> None:
        """Initialises an mbarrier with `arrivals` arrivals per phase."""
        self.emit("mbarrier.init.shared::cta.b64", place, arrivals, note=note)

    def fence_mbarrier_init(self) -> None:
        """Makes initialised mbarriers visible to the async proxy."""
        self.emit("fence.mbarrier_init.release.cluster")

    def wait(self, barrier: Address, parity: Register | int, name: str) -> None:
        """Blocks until the phase `parity` of an mbarrier has completed (PTX ISA, mbarrier.try_wait).

        On a fresh barrier parity 1 counts as completed, parity 0 does not.
        """
        completed = self.reg(f"{name}_completed", "pred")
        again = self.label(f"wait_{name}")
        self.place(again)
        self.emit("mbarrier.try_wait.parity.shared::cta.b64", completed, barrier, parity)
        self.emit("bra", again, guard=~completed)

    def arrive(self, barrier: Address, guard: Predicate | None = None, note: str = "") -> None:
        """One arrival per executing thread, with release semantics."""
        self.emit("mbarrier.arrive.shared::cta.b64", SINK, barrier, guard=guard, note=note)

    def expect_tx(self, barrier: Address, size: int, note: str = "") -> None:
        """One arrival that also announces `size` bytes of copies."""
        self.emit("mbarrier.arrive.expect_tx.shared::cta.b64", SINK, barrier, size, note=note)

    # Bulk copies (TMA)

    def bulk_load(self, target: Address, source: Address, size: Register | int, barrier: Address) -> None:
        """Copies `size` contiguous bytes, a multiple of 16; completion counts bytes on `barrier`."""
        self.emit(f"cp.async.bulk.shared::cluster.global.{COMPLETE_TX}", target, source, size, barrier)

    def prefetch_maps(self, maps: Sequence[Register], guard: Predicate | None = None) -> None:
        """Prefetches tensor maps before their first use."""
        for tensor_map in maps:
            self.emit("prefetch.tensormap", at(tensor_map), guard=guard)

    def tma_load(self, target: Address, source: Address, barrier: Address) -> None:
        """Copies the box at the coordinates of `source` to shared memory; completion counts bytes on `barrier`."""
        space = "shared::cta" if self.version >= SHARED_CTA_VERSION else "shared::cluster"
        self.emit(f"{_tensor_copy(source)}.{space}.global.tile.{COMPLETE_TX}", target, source, barrier)

    def tma_gather4(self, target: Address, source: Address, barrier: Address) -> None:
        """Like `tma_load`, for four rows of a matrix: the coordinates are a column and the rows."""
        self.emit(f"cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.{COMPLETE_TX}", target, source, barrier)

    def tma_store(self, target: Address, source: Address, guard: Predicate) -> None:
        """Copies a box of shared memory to the coordinates of `target`, in the thread's current bulk group."""
        self.emit(f"{_tensor_copy(target)}.global.shared::cta.tile.bulk_group", target, source, guard=guard)

    def commit_stores(self, guard: Predicate) -> None:
        """Commits the thread's bulk group."""
        self.emit("cp.async.bulk.commit_group", guard=guard)

    def wait_stores_read(self, guard: Predicate, note: str = "") -> None:
        """Blocks until the thread's bulk groups have read their shared memory."""
        self.emit("cp.async.bulk.wait_group.read", 0, guard=guard, note=note)

    def fence_proxy_async(self, note: str = "") -> None:
        """Orders this thread's accesses to shared memory, and those it waited for, before later copies and MMAs."""
        self.emit("fence.proxy.async.shared::cta", note=note)

    # Tensor cores

    def matrix_descriptor(self, name: str, data: Register, constant: int, start: str = "") -> Register:
        """The descriptor of the shared memory operand at `data`; `constant` holds all fields but the address.

        `start` names the register of the address in units of 16 bytes.
        """
        sixteenths = self.let(start or f"{name}_start", "shr.u32", data, 4)
        descriptor = self.let(name, "cvt.u64.u32", sixteenths)
        self.emit("or.b64", descriptor, descriptor, constant)
        return descriptor

    def wgmma_fence(self) -> None:
        """Orders the warpgroup's register accesses before its next wgmma."""
        self.emit("wgmma.fence.sync.aligned")

    def wgmma_finish(self) -> None:
        """Commits the wgmmas issued so far and waits for them."""
        self.emit("wgmma.commit_group.sync.aligned")
        self.emit("wgmma.wait_group.sync.aligned", 0)

    def tmem_alloc(self, base: Address, columns: int) -> None:
        """Allocates tensor memory, stores its address at `base` in shared memory, and gives up the permit."""
        self.emit("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32", base, columns)
        self.emit("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned")

    def tmem_dealloc(self, tmem: Register, columns: int) -> None:
        """Deallocates tensor memory."""
        self.emit("tcgen05.dealloc.cta_group::1.sync.aligned.b32", tmem, columns)

    def tmem_load(self, values: Vector, columns: Address) -> None:
        """One register per column: lane l of the warp reads lane l of the warp's quarter of tensor memory."""
        self.emit(f"tcgen05.ld.sync.aligned.32x32b.x{len(values)}.b32", values, columns)

    def tmem_store(self, columns: Address, values: Vector) -> None:
        """The inverse of `tmem_load`."""
        self.emit(f"tcgen05.st.sync.aligned.32x32b.x{len(values)}.b32", columns, values)

    def wait_tmem_loads(self) -> None:
        """Blocks until the thread's loads from tensor memory are done."""
        self.emit("tcgen05.wait::ld.sync.aligned")

    def wait_tmem_stores(self) -> None:
        """Blocks until the thread's stores to tensor memory are done."""
        self.emit("tcgen05.wait::st.sync.aligned")

    def before_thread_sync(self) -> None:
        """Orders this thread's earlier tcgen05 instructions before its next synchronisation."""
        self.emit("tcgen05.fence::before_thread_sync")

    def after_thread_sync(self) -> None:
        """Orders this thread's last synchronisation before its next tcgen05 instructions."""
        self.emit("tcgen05.fence::after_thread_sync")

    def commit_mma(self, barrier: Address, note: str = "") -> None:
        """Arrives on `barrier` when all MMAs and copies that this thread has issued are done."""
        self.emit("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64", barrier, note=note)


def _tensor_copy(place: Address) -> str:
    """The head of the mnemonic. A tensor map has as many dimensions as the address has coordinates."""
    return f"cp.async.bulk.tensor.{len(place.coordinates)}d"

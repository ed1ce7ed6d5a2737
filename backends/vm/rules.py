"""The rules of the machine: each with its grade, what goes wrong, the section of the PTX ISA, and how to fix it.

The rule grades a finding. `error`: undefined by the ISA, wrong on silicon, or a result that depends on a race.
`portability`: the ISA does not promise it, yet production kernels rely on it; `reliance` names some. `note`: worth a
look. docs/rules/README.md is generated from this table. Sections are PTX ISA 9.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

Grade = Literal["error", "portability", "note"]


@dataclass(frozen=True, slots=True)
class MachineRule:
    """One rule. `wrong`: what goes wrong on silicon. `missing`: the order that is missing, "" where none would help.

    `mend`: what to do, as a sentence. `section`: of the PTX ISA, or of the CUDA programming guide. `reliance`: who
    relies on more than the ISA promises.
    """

    slug: str
    grade: Grade
    section: str
    wrong: str
    mend: str
    missing: str = ""
    reliance: str = ""

    @property
    def page(self) -> str:
        """The page about its family, in the repository; the list of all rules if its family has none."""
        return f"docs/rules/{next((page for page, rules in FAMILIES.items() if self.slug in rules), 'README')}.md"

    @property
    def leads_to(self) -> tuple[str, ...]:
        """The rules of which violations may follow from this one's, at any line of the kernel."""
        return LEADS_TO.get(self.slug, ())


def _error(slug: str, section: str, wrong: str, mend: str, missing: str = "") -> MachineRule:
    return MachineRule(slug, "error", section, wrong, mend, missing)


def _relied(slug: str, section: str, wrong: str, reliance: str, mend: str, missing: str = "") -> MachineRule:
    return MachineRule(slug, "portability", section, wrong, mend, missing, reliance)


_CTA_SYNC: Final = "bar.sync (`__syncthreads()`)"
_WARP_SYNC: Final = "bar.warp.sync (`__syncwarp()`)"
_CLUSTER_SYNC: Final = "barrier.cluster.arrive and .wait (`cluster.sync()`)"
_DEPENDENT_SYNC: Final = "griddepcontrol.wait (`cudaGridDependencySynchronize()`)"
"""Instructions, with what CUDA C++ calls them: a mend is read by those who write either."""
_BARRIER: Final = "a barrier, an mbarrier wait, or a wait for the group of the copy, between the two accesses"

# fmt: off
_ALL = (
    # Races and waits.
    _error(
        "race", "8.7.1",
        "Two accesses to the same shared memory, of which one is a write, are not ordered: the result depends on "
        "timing. Only two writes of the same value do not race, nor do two strong accesses.",
        f"Put a barrier between the two accesses, such as {_CTA_SYNC}, or let the second wait for an mbarrier that the "
        "first arrives at.",
        _BARRIER,
    ),
    _error(
        "global-race", "8.7.1",
        "Two accesses to the same global memory, of which one is a write, are not ordered. Only two writes of the same "
        "value do not race, nor do two strong accesses (atomics, volatile, relaxed and up); a plain load beside "
        "another thread's atomic does.",
        "Within a CTA, put a barrier between the accesses (`__syncthreads()`, `tl.debug_barrier()`). Between CTAs, "
        "publish with a release and read after an acquire, both of gpu scope, or use atomics. Beside an atomic, load "
        "with ld.relaxed (cuda::atomic_ref, volatile).",
        "a barrier within the CTA, or a release and an acquire of gpu scope between CTAs",
    ),
    _error(
        "scope-too-narrow", "8.10.3",
        "A strong access (an atomic, volatile, relaxed and up) follows a strong write to the same memory, nothing "
        "orders the two, and the scope of one leaves out the other's thread: .cta reaches no other CTA, .cluster no "
        "other cluster. Atomics are then not atomic to each other, and an update may be lost. A load may go on "
        "returning an older value.",
        "Use a scope that includes both threads: .cluster within a cluster, .gpu beyond (`atomicAdd`, not "
        "`atomicAdd_block`; `cuda::thread_scope_device`, not `thread_scope_block`).",
        "a scope that includes both threads",
    ),
    _error(
        "copy-not-awaited", "9.7.9.25",
        "Shared memory is accessed while a copy into it is in flight: a read gets old, new or mixed bytes, and a "
        "write may be overwritten by the copy.",
        "Before the access, wait for the mbarrier that the copy signals, or for its group.",
        "a wait for the end of the copy",
    ),
    _error(
        "missing-proxy-fence", "9.7.13.4",
        "The asynchronous proxy (TMA, tensor core) accesses what threads wrote, with no proxy fence in between, and "
        "may see the old contents.",
        "Execute fence.proxy.async after the writes and before the barrier, or after the barrier in the thread that "
        "issues the copy.",
        "fence.proxy.async between the generic write and the asynchronous access",
    ),
    _error(
        "tensor-map-not-acquired", "9.7.13.4",
        "A copy uses a tensor map that the kernel has changed in global memory, with no acquire since. An H200 then "
        "copies through the old map if the SM has used it before.",
        "Execute fence.proxy.tensormap::generic.acquire.gpu of the map's 128 bytes in the threads that issue copies, "
        "after the change is ordered before them.",
        "fence.proxy.tensormap::generic.acquire of the map between the change and the copy",
    ),
    _error(
        "tensor-map-in-use", "9.7.9.25.1",
        "A tensor map in global memory is overwritten while a copy that was issued before may still read it. The copy "
        "may then move a box of the wrong tensor.",
        "Before the change, wait for the mbarriers of the loads through the map, and for the bulk groups of the stores "
        "(cp.async.bulk.wait_group.read). Between threads, put a barrier after the wait.",
        "a wait for the end of the copy between the copy and the change",
    ),
    _error(
        "dependent-launch-not-awaited", "9.7.13.13",
        "A dependent launch accesses memory that the previous launch, which may still be running, reads or writes.",
        f"Execute {_DEPENDENT_SYNC} before the access.",
        _DEPENDENT_SYNC,
    ),
    _error(
        "exit-with-pending-operation", "9.7.9.25",
        "A CTA ends while a copy or an MMA still reads or writes its memory, which may already belong to another CTA.",
        "Wait for the operation before the CTA ends.",
        "a wait for the end of the operation",
    ),
    _error(
        "peer-not-started", "9.7.9.23",
        "A CTA of the cluster accesses the memory of another one, and nothing orders that after the start of the other "
        "CTA. The CUDA programming guide (distributed shared memory) requires that it has started. An H200 that other "
        "processes share can end such a launch: the target block is not present.",
        "Begin the kernel with a cluster barrier (`cluster.sync()`). A relaxed arrival is enough.",
        f"{_CLUSTER_SYNC} before the first access",
    ),
    _error(
        "ended-cta", "9.7.9.23",
        "A CTA of the cluster accesses the shared memory of another CTA that has ended, or that may end at any time.",
        "End the kernel with a cluster barrier (`cluster.sync()`).",
        f"{_CLUSTER_SYNC} after the last access",
    ),
    _error(
        "cancel-after-failure", "9.7.13.17",
        "A CTA executes clusterlaunchcontrol.try_cancel after it has observed that an earlier one failed: the "
        "behaviour is undefined.",
        "Leave the loop once query_cancel.is_canceled is false, and ask no more.",
    ),
    _error(
        "deadlock", "9.7.13", "All warps wait or spin, and nothing can change any more.",
        "Find out who should end the wait that the finding names. An mbarrier needs its arrivals and its bytes, and a "
        "wait the right parity; a barrier needs all its threads; a flag needs the CTA that sets it, to the value and "
        "in the place that the loop polls, before it waits itself; tensor memory needs columns that another one frees.",
    ),
    _error(
        "runaway", "", "The launch executes more steps than its budget.",
        "Look for a loop that does not end, or raise step_budget.",
    ),
    # Tensor memory.
    _error(
        "tmem-race", "9.7.16.6",
        "Tensor memory is accessed while an MMA, a copy or another warp accesses it, and the two are not ordered. Nor "
        "are the reads and the writes of one MMA, if D overlaps another operand.",
        f"Wait for the tcgen05.commit of the MMA, or put a barrier between the warps, such as {_CTA_SYNC}. Give D "
        "columns of its own.",
        "tcgen05.commit and a wait for its mbarrier, or a barrier",
    ),
    _error(
        "tmem-store-not-waited", "9.7.16.8.5", "Tensor memory is accessed while a tcgen05.st into it is in flight.",
        "Execute tcgen05.wait::st in the warp that stores, before the other access.", "tcgen05.wait::st",
    ),
    _error(
        "tmem-load-not-waited", "9.7.16.8.5", "Tensor memory is overwritten while a tcgen05.ld may still read it.",
        "Execute tcgen05.wait::ld in the warp that loads, before the other access.", "tcgen05.wait::ld",
    ),
    _error(
        "tmem-alloc", "9.7.16.7.1", "An allocation of tensor memory that hardware refuses, or that blocks forever.",
        "Allocate a power of two in 32..512 columns, not more than in the last allocation, and before "
        "relinquish_alloc_permit.",
    ),
    _error(
        "tmem-dealloc", "9.7.16.7.1",
        "A dealloc of tensor memory that was not allocated like that, or an access after one CTA of the pair has "
        "deallocated it.",
        "Deallocate exactly what was allocated, after both CTAs are done with it.",
    ),
    _error(
        "tmem-leak", "9.7.16.7.1", "A CTA ends with tensor memory allocated: later CTAs on the SM cannot get it.",
        "Execute tcgen05.dealloc before the CTA ends.",
    ),
    _error(
        "tmem-not-allocated", "9.7.16.7.1", "An access to tensor memory that no live allocation covers.",
        "Allocate the columns, and read the address after the barrier that follows the allocation.",
    ),
    _error(
        "tmem-out-of-bounds", "9.7.16.1", "An address outside the 128 lanes and 512 columns of tensor memory.",
        "Check the column offset and the shape.",
    ),
    _error(
        "tmem-shape", "9.7.16.8", "A shape of tcgen05.ld, st, cp or mma that has no layout.",
        "Use a shape that the ISA lists.",
    ),
    _error(
        "tmem-lane", "9.7.16.10.5", "An accumulator or scale factors start at a lane that the layout does not allow.",
        "Start at the lane that the layout of the MMA requires, usually 0.",
    ),
    _error(
        "scale-factor-replicas", "9.7.16.10.7",
        "The four quarters of tensor memory hold different scale factors; it is undefined which of them the tensor "
        "core reads.",
        "Copy with .warpx4, or store the same values to all quarters.",
    ),
    _error(
        "cta-group", "9.7.16.7.1", "One kernel mixes cta_group::1 and cta_group::2.",
        "Use one cta_group in all tcgen05 instructions of a kernel.",
    ),
    _error(
        "cta-pair", "9.7.16.7.1", "The two CTAs of a pair do not execute the same collective instruction.",
        "Let both CTAs execute it with the same operands.",
    ),
    # wgmma.
    _error(
        "missing-wgmma-fence", "9.7.15.7.1",
        "A wgmma uses registers that other instructions accessed before, with no wgmma.fence in between.",
        "Execute wgmma.fence.sync.aligned before the first wgmma, and after other uses of its registers.",
        "wgmma.fence",
    ),
    _error(
        "register-in-flight", "9.7.15.7", "A register is used while a wgmma still reads or writes it.",
        "Execute wgmma.commit_group and wgmma.wait_group before the use.", "wgmma.wait_group",
    ),
    _error(
        "warpgroup-diverged", "9.7.15", "The warps of a warpgroup do not all execute the same instruction.",
        "Let all four warps execute it with the same operands.",
    ),
    _error(
        "register-pool", "9.7.19.5",
        "setmaxnreg requests what the launch cannot provide: more registers for a warpgroup than the whole CTA was "
        "launched with, more for all warps than an SM has, .dec to more than the warp holds, or .inc to fewer.",
        "Launch with more registers per thread (.maxnreg, or fewer threads in .reqntid), or request fewer.",
    ),
    # Barriers.
    _error(
        "mbarrier-misuse", "9.7.13.15",
        "An mbarrier is used before its initialisation, is initialised again or accessed as ordinary memory while it "
        "is live, or gets more arrivals than its count.",
        "Initialise it once, publish that with a barrier, and make as many arrivals per phase as the count says.",
    ),
    _error(
        "barrier-misuse", "9.7.13.1",
        "A barrier gets a wrong number, count or mask, or more threads arrive than it waits for.",
        "Use the same count everywhere, and arrive once per phase.",
    ),
    _error(
        "barrier-phase-unordered", "9.7.13.1",
        "A warp arrives at a named barrier, and nothing orders that after the barrier's last phase: its arrival may "
        "count for that phase, which then ends without another warp.",
        "Give different groups of warps different barriers. After bar.arrive, arrive again only after something that "
        "follows the end of the phase.",
        "a wait, between the two arrivals, for something that follows the end of the first phase",
    ),
    _error(
        "diverged", "9.7.13", "Only some threads of a warp execute an instruction that all must execute together.",
        "Move it out of the branch, or elect one thread if it is meant for one.",
    ),
    _error(
        "issued-by-many", "9.7.16.10", "Several threads issue an instruction that one thread must issue.",
        "Elect one thread with elect.sync.",
    ),
    # Undefined values.
    *(
        _error(
            slug, "8.1", f"A value that was never written decides something: {what} holds leftover data.",
            "Write before reading, or mask the part that was not written.",
        )
        for slug, what in (
            ("uninitialised-register", "a register"), ("uninitialised-shared", "shared memory"),
            ("uninitialised-global", "an output or a workspace"), ("uninitialised-tmem", "tensor memory"),
            ("uninitialised-local", "local memory"),
        )
    ),
    # Addresses and operands.
    _error(
        "out-of-bounds", "5.1", "An access outside the memory that its address is meant for.",
        "Mask the access or clamp the address.",
    ),
    _error(
        "misaligned", "6.4.1", "An address that is not aligned as the access requires: hardware traps.",
        "Align the address, or use a narrower access.",
    ),
    _error("read-only", "5.1", "A store to read-only memory.", "Store to writable memory."),
    _error(
        "mixed-windows", "5.1",
        "Lanes of one generic access address different state spaces; the machine does not split such an access.",
        "Use addresses of a single state space per instruction.",
    ),
    _error(
        "wrong-space", "5.1", "An operand is in another state space than the instruction accepts.",
        "Convert the address with cvta, or name the right state space.",
    ),
    _error(
        "remote-shared", "5.1.7",
        "An instruction accesses another CTA's shared memory through .shared, or names a rank outside the cluster.",
        "Use .shared::cluster with an address from mapa, and ranks inside the cluster.",
    ),
    _error(
        "async-without-cluster", "9.7.9.12",
        "An st.async or a red.async in a launch without clusters, which an H200 ends with an illegal instruction.",
        "Launch a cluster of at least two CTAs, or use st.shared::cta or red.shared::cta and an arrival at the "
        "mbarrier.",
    ),
    _error(
        "branch-index", "9.7.12.4", "brx.idx with an index beyond its list of labels.", "Check the index first.",
    ),
    _error(
        "tensor-map", "5.5", "A tensor map that does not fit the copy, or memory that holds none.",
        "Encode the map for this rank, box and element type.",
    ),
    _error(
        "tensor-coordinates", "5.5", "Coordinates that the copy does not accept.",
        "Pass one coordinate per dimension, in range.",
    ),
    _error(
        "tensor-base", "5.5",
        "A tensor load of a box that starts outside its tensor, with a map whose base address is outside the tensor's "
        "memory. For such a box an H200 reads the byte at the base address, and faults with an illegal address if it "
        "is not mapped (results/records/h200-tma-out-of-bounds.json).",
        "Let the map start where the tensor does, or do not load boxes that start outside the tensor.",
    ),
    _error(
        "bulk-copy", "9.7.9.25",
        "A bulk copy of a size that is no positive multiple of 16, or a reduction that its element type does not "
        "support.",
        "Copy a multiple of 16 bytes. Use an element type in the map that the operation supports.",
    ),
    _error("bulk-store", "9.7.9.13", "A st.bulk of a size that hardware refuses.", "Store a multiple of 8 bytes."),
    _error(
        "cp-async", "9.7.9.25.3", "A cp.async whose src-size exceeds its cp-size.", "Clamp src-size.",
    ),
    _error(
        "matrix-descriptor", "9.7.16.4", "A matrix descriptor with an invalid combination of fields.",
        "Encode the start address, offsets and swizzle for this operand.",
    ),
    _error(
        "instruction-descriptor", "9.7.16.4.2", "An instruction descriptor with an invalid combination of fields.",
        "Encode types, M and N that this kind supports.",
    ),
    _error(
        "sparsity-metadata", "9.7.14.6.1",
        "The metadata of a sparse matrix does not name two elements of a chunk: the product is undefined.",
        "Store the two indices of each chunk, the lower one in the lower bits.",
    ),
    _error(
        "scale-selector", "9.7.14.3",
        "A scale-factor selector of mma names bytes or threads that hold no scale factor.",
        "Use byte 0 to 3 (with two blocks 0 or 2, with four blocks 0), and thread 0 or 1 for A, 0 to 3 for B.",
    ),
    # Calls.
    _error("trap", "9.7.19.4", "The kernel executed trap.", "Look for the check that failed."),
    _error("assert", "", "An assertion in the kernel failed.", "Look for the condition that the finding names."),
    _error("printf", "", "A conversion that device printf does not support.", "Use a supported conversion."),
    _error(
        "device-heap", "", "A kernel frees memory that malloc did not return, or frees it twice.",
        "Free what malloc returned, once.",
    ),
    _error(
        "schedule-dependent", "8.7.1", "The results depend on when asynchronous work ends.",
        "Look for a missing wait: `megamoe check` found different results under two schedules.",
    ),
    # What the ISA does not promise and production kernels rely on.
    _relied(
        "exit-with-pending-store", "9.7.9.25",
        "A thread exits without waiting for its bulk store. The ISA does not say that the source in shared memory "
        "outlives the CTA.",
        "DeepGEMM, CUTLASS's Hopper attention and Triton exit like this.",
        "Execute cp.async.bulk.commit_group and cp.async.bulk.wait_group 0 before the thread exits.",
        "cp.async.bulk.wait_group",
    ),
    _relied(
        "copy-missing-proxy-fence", "9.7.13.4",
        "The tensor core reads what cp.async wrote through the generic proxy, with no proxy fence in between.",
        "CUTLASS's C++ mainloops with cp.async have no fence.",
        "Execute fence.proxy.async after cp.async.wait_group, before the barrier.",
        "fence.proxy.async between the completion of the cp.async and the asynchronous read",
    ),
    _relied(
        "tensor-map-not-released", "9.7.13.4",
        "A kernel changes a tensor map in global memory, acquires it and copies through it, but nothing has released "
        "the change. An H200 sees it all the same.",
        "None of the kernels in results/public.jsonl and results/witness.jsonl.",
        "Execute fence.proxy.tensormap::generic.release.gpu after the change, or write the map with "
        "tensormap.cp_fenceproxy.",
        "fence.proxy.tensormap::generic.release after the change",
    ),
    _relied(
        "unfenced-overwrite", "9.7.13.4",
        "A bulk copy overwrites what threads have read, with a barrier but no proxy fence in between. By the ISA only "
        "such a fence orders the proxies, so the earlier read may see the copy.",
        "CUTLASS's and Triton's pipelines release stages with an mbarrier alone. DeepEP, TransformerEngine and NCCL "
        "have fixed it.",
        "Execute fence.proxy.async after the reads, before the arrival that releases the stage.",
        "fence.proxy.async between the generic read and the copy",
    ),
    _relied(
        "mbarrier-reinitialised", "9.7.13.15.9",
        "An unused mbarrier is initialised again with the same count. This is undefined, since the memory already "
        "holds an mbarrier.",
        "CUTLASS kernels in which every warp initialises the same mbarriers.",
        "Let one elected thread initialise it, then execute a barrier.",
    ),
    _relied(
        "mbarrier-init-unfenced", "9.7.13.4",
        "A copy signals an mbarrier, and no fence has made its initialisation visible to the asynchronous proxy.",
        "Kernels with only a barrier after mbarrier.init.",
        "Execute fence.mbarrier_init.release.cluster or fence.proxy.async after mbarrier.init, before the barrier.",
        "fence.mbarrier_init.release.cluster",
    ),
    _relied(
        "tmem-lane-ignored", "9.7.16.8.1",
        "tcgen05.ld or st names lanes outside the quarter of tensor memory that its warp can access, and relies on "
        "hardware ignoring these bits of the address.",
        "DeepGEMM gives every warp the same address.",
        "Add 32 * (warp % 4) to the lane of the address.",
    ),
    _relied(
        "descriptor-bit-ignored", "9.7.16.4.2",
        "The instruction descriptor of an mma of kind::mxf4 or mxf4nvf4 sets a reserved bit, which sm_100a does not "
        "read.",
        "CuTeDSL's descriptor builder sets bit 12 by default and calls it a version of sparsity.",
        "Clear bit 12 of the instruction descriptor.",
    ),
    _relied(
        "missing-tcgen05-fence", "9.7.16.11.1",
        "Threads order their tcgen05 operations with a barrier alone. By the ISA such operations may move across it.",
        "Many kernels omit one of the two fences where a wait for the mbarrier of a commit is order enough.",
        "Execute tcgen05.fence::before_thread_sync before the barrier, and tcgen05.fence::after_thread_sync after it.",
        "tcgen05.fence::before_thread_sync and tcgen05.fence::after_thread_sync around the barrier",
    ),
    _relied(
        "tmem-copy-unordered", "9.7.16.6.2",
        "tcgen05.cp overwrites what an earlier mma, not known to be complete, reads. The ISA orders a copy before a "
        "later mma, not an mma before a later copy.",
        "quack-kernels' block-scaled GEMMs.",
        "Wait for a tcgen05.commit of the mma before the copy, or use other columns.",
        "tcgen05.commit and a wait for its mbarrier",
    ),
    _relied(
        "tmem-load-used-unwaited", "9.7.16.8.5",
        "Tensor memory is overwritten after a tcgen05.ld from it whose registers were used, but for which no "
        "tcgen05.wait::ld was executed.",
        "Kernels that treat the register dependence as a wait.",
        "Execute tcgen05.wait::ld before the registers are used.",
        "tcgen05.wait::ld",
    ),
    _relied(
        "tmem-mma-unordered", "9.7.16.6.2",
        "An mma overwrites what an earlier mma with another accumulator, not known to be complete, reads. The ISA "
        "orders only MMAs with the same accumulator.",
        "FlashAttention-4 lets S overwrite the P that the previous MMA reads.",
        "Wait for a tcgen05.commit of the earlier mma, or use other columns.",
        "tcgen05.commit and a wait for its mbarrier",
    ),
    _relied(
        "wgmma-fence-early", "9.7.15.7.1",
        "Other instructions use registers of a wgmma after the last wgmma.fence. The ISA requires the fence between "
        "that use and the wgmma.",
        "NVIDIA's compiler moves writes to accumulators across the fence (CuTeDSL's Hopper GEMM).",
        "Execute wgmma.fence.sync.aligned directly before the first wgmma.",
        "wgmma.fence",
    ),
    _relied(
        "lanes-unordered", "8.7.1",
        "A lane uses what another lane of its warp wrote, with no order in between: lanes are independent threads. "
        "The same holds if another warp uses it, or overwrites what the lane has read, after a release by other lanes "
        "only, or if a lane relies on a wait (at an mbarrier, for copies) or an acquire of a flag that only other "
        "lanes executed.",
        "Kernels that assume that the lanes of a warp run in lockstep.",
        f"Execute {_WARP_SYNC} between the access and the other lane's use or release, and after a wait or an acquire.",
        _WARP_SYNC,
    ),
    _relied(
        "tmem-hold-and-wait", "9.7.16.7.1",
        "A CTA frees tensor memory only after it has got more, and an SM has room for CTAs that can so each hold what "
        "the others wait for. The ISA says that an alloc blocks until its columns are free. It does not say that a CTA "
        "gets all that it asks for before another one gets any.",
        "No kernel that we know of. NVIDIA/Fuser#3795 says that CTAs run one after another until "
        "relinquish_alloc_permit; then they cannot wait for each other. No Blackwell was at hand to ask.",
        "Allocate all columns at once, or ask for so much shared memory that an SM has room for one CTA. If registers "
        "leave room for one only, state their number by .maxnreg.",
    ),
    _relied(
        "wide-bit-field", "9.7.1.19",
        "A position or a length of a 64-bit bfe or bfi exceeds 255. The ISA restricts both to 0..255, and an H200 does "
        "not do there what its pseudo-code says.",
        "None of the kernels in results/public.jsonl and results/witness.jsonl.",
        "Clamp the operand, or take its low byte.",
    ),
    _relied(
        "constant-load-of-written", "9.7.9.8",
        "ld.global.nc loads what the same launch writes. The ISA requires that memory is read-only for as long as the "
        "kernel runs, and the load may return an old value.",
        "DeepEP reads buffers that other GPUs write with ld.global.nc.L1::no_allocate; its option "
        "DISABLE_AGGRESSIVE_PTX_INSTRS turns this off.",
        "Load without .nc (in CUDA C++, without __ldg and without const __restrict__).",
    ),
    _relied(
        "setmaxnreg-unsynchronised", "9.7.19.5",
        "A warp executes setmaxnreg again, and the warps of its warpgroup have not synchronised since the one before.",
        "Triton's warp specialisation: its fused attention and persistent matmul, and Gluon's tutorials.",
        "Put a barrier of the warpgroup between the two.",
        "a barrier of the warpgroup, between the two setmaxnreg",
    ),
    _relied(
        "async-to-own-cta", "9.7.13.7",
        "A red.async whose destination lies in the executing CTA, or an st.async in a cluster of one CTA. The ISA "
        "defines a red.async into another CTA of the cluster only, and both for clusters of more than one CTA "
        "(9.7.9.12). An H200 stores and reduces all the same.",
        "No kernel that we know of.",
        "Use st.shared::cta or red.shared::cta and an arrival at the mbarrier.",
    ),
    # Worth a look. A remainder by zero is no more than that because correct kernels compute one that they do not use:
    # 7 of the 447 runs in results/public.jsonl, of three GEMMs among CuTeDSL's examples.
    MachineRule(
        "unspecified-result", "note", "9.7.1.9",
        "A remainder by zero, for which the ISA defines no result. Compilers compute some that nobody uses.",
        "Make sure that the result is not used.",
    ),
    MachineRule(
        "wait-result-unread", "note", "9.7.13.15.16",
        "Nothing reads the predicate of an mbarrier.try_wait or test_wait. Both may return false before the phase is "
        "over, so such a wait orders nothing; the machine goes on as after a false one.",
        "Branch back to the wait as long as its predicate is false.",
        "a loop around the wait",
    ),
)
# fmt: on
RULES: Final[Mapping[str, MachineRule]] = {rule.slug: rule for rule in _ALL}
"""Every rule by its slug."""
COLLECTED_ONLY: Final = frozenset(
    {
        "unfenced-overwrite", "mbarrier-init-unfenced", "missing-tcgen05-fence", "tmem-copy-unordered",
        "tmem-load-used-unwaited", "unspecified-result", "tmem-mma-unordered", "wgmma-fence-early", "lanes-unordered",
        "wide-bit-field", "setmaxnreg-unsynchronised", "wait-result-unread",
    }
)  # fmt: skip
"""Rules on which only a door fails. A judged row counts violations and does not fail on them."""
COUNTERS: Final[Mapping[str, str]] = {
    "mbarrier-init-unfenced": "mbarrier_inits_unfenced",
    "missing-tcgen05-fence": "tcgen05_fences_missing",
    "tmem-mma-unordered": "tmem_unordered_mmas",
    "wgmma-fence-early": "wgmma_fences_early",
    "lanes-unordered": "lanes_unordered",
    "setmaxnreg-unsynchronised": "setmaxnreg_unsynchronised",
    "wait-result-unread": "waits_unread",
}
"""By rule of COLLECTED_ONLY that nothing else counts: the counter of a judged row, absent where the rule is kept."""
PAGES: Final[Mapping[str, str]] = {
    "async-proxy": "proxy fences",
    "unawaited-copies": "bulk copies without a wait",
    "mbarrier": "phases, counts and parity",
    "races": "races of generic memory and scopes",
    "lanes": "lanes of one warp",
    "cluster-life": "lifetimes in a cluster",
    "tcgen05-order": "tcgen05 fences and waits",
    "tensor-memory": "allocation and lanes",
    "wgmma": "wgmma fences and waits",
    "undefined-values": "undefined values",
    "uniform-warps": "elect, sync masks, setmaxnreg",
}
"""The pages of docs/rules, one per family: their names and subjects."""
FAMILIES: Final[Mapping[str, frozenset[str]]] = {
    page: frozenset(rules.split())
    for page, rules in {
        "async-proxy": "missing-proxy-fence tensor-map-not-acquired copy-missing-proxy-fence unfenced-overwrite "
        "tensor-map-not-released",
        "unawaited-copies": "copy-not-awaited exit-with-pending-operation tensor-map-in-use exit-with-pending-store",
        "mbarrier": "mbarrier-misuse mbarrier-reinitialised mbarrier-init-unfenced wait-result-unread",
        "races": "race global-race scope-too-narrow dependent-launch-not-awaited schedule-dependent",
        "lanes": "lanes-unordered",
        "cluster-life": "ended-cta peer-not-started remote-shared cta-pair async-to-own-cta async-without-cluster",
        "tcgen05-order": "tmem-store-not-waited tmem-load-not-waited tmem-race missing-tcgen05-fence "
        "tmem-copy-unordered tmem-load-used-unwaited",
        "tensor-memory": "tmem-alloc tmem-dealloc tmem-leak tmem-not-allocated tmem-out-of-bounds tmem-lane tmem-shape "
        "cta-group tmem-lane-ignored tmem-hold-and-wait",
        "wgmma": "register-in-flight missing-wgmma-fence",
        "undefined-values": "uninitialised-shared uninitialised-register uninitialised-tmem uninitialised-global "
        "uninitialised-local",
        "uniform-warps": "diverged warpgroup-diverged register-pool setmaxnreg-unsynchronised issued-by-many "
        "barrier-misuse barrier-phase-unordered",
    }.items()
}
"""The rules of which each page says most."""
_BEHIND_A_WAIT: Final = ("race", "global-race", "mbarrier-misuse", "deadlock", "runaway")
LEADS_TO: Final[Mapping[str, tuple[str, ...]]] = {
    "scope-too-narrow": ("copy-not-awaited", *_BEHIND_A_WAIT),
    "wait-result-unread": ("copy-not-awaited", *_BEHIND_A_WAIT),
    "copy-not-awaited": _BEHIND_A_WAIT,
}
"""By rule that a thread breaks where it waits for others, or should: the rules that the rest of the kernel may break,
because the thread has not acquired what the others did and may run ahead of them."""
AT_SHARED: Final = frozenset(
    {
        "race", "scope-too-narrow", "lanes-unordered", "copy-not-awaited", "missing-proxy-fence",
        "copy-missing-proxy-fence", "unfenced-overwrite", "mbarrier-misuse", "mbarrier-reinitialised",
        "mbarrier-init-unfenced", "uninitialised-shared",
    }
)  # fmt: skip
"""Rules whose findings have an address in the shared memory of a CTA."""


def as_markdown() -> str:
    """The table for readers: docs/rules/README.md."""
    grades: dict[Grade, str] = {
        "error": "The behaviour is undefined by the ISA, wrong on silicon, or gives a result that depends on a race.",
        "portability": "The ISA does not promise it, but production kernels rely on it, and it runs on today's GPUs.",
        "note": "Worth a look.",
    }
    lines = [
        "# Rules",
        "",
        f"The machine checks {len(RULES)} rules. "
        "[Bring your kernel](../bring-your-kernel.md) says how to read a finding, choose a profile and suppress one.",
        "Sections refer to PTX ISA 9.1. `python -m backends.vm.rules > docs/rules/README.md` writes this page.",
        "",
        "Eleven families of rules have a page, with what goes wrong, the smallest kernel that shows it, the finding, "
        "the fix, and public bugs of this kind.",
        "",
        *(f"- [{name}]({name}.md): {about}" for name, about in PAGES.items()),
    ]
    for grade, meaning in grades.items():
        relied = " who relies on it |" if grade == "portability" else ""
        lines += ["", f"## {grade}", "", meaning, ""]
        lines += [f"| rule | what goes wrong |{relied} how to mend it | PTX ISA |"]
        lines += [f"|---|---|{'---|' * bool(relied)}---|---|"]
        for rule in RULES.values():
            if rule.grade == grade:
                by = f" {rule.reliance} |" if relied else ""
                lines.append(f"| `{rule.slug}` | {rule.wrong} |{by} {rule.mend} | {rule.section} |")
    relied = [f"`{rule.slug}`" for rule in RULES.values() if rule.slug in COLLECTED_ONLY and rule.grade != "note"]
    lines += [
        "",
        "## Rows of `megamoe run`",
        "",
        "A row of the matrix fails on `error` and on `portability`, like the profile `strict` at the doors, except for "
        f"{len(relied)} rules: {', '.join(relied)}.",
        "The doors (`megamoe check`, `megamoe.vm`, `megamoe.triton`, `megamoe.cutedsl`, pytest) report these rules, "
        "and `strict` fails on them. A row only counts violations of them, and `megamoe gate` fails if a count grows; "
        "for a backend that is not registered, `megamoe run` prints the counts.",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(as_markdown(), end="")

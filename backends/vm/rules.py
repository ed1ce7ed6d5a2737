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


def _error(slug: str, section: str, wrong: str, mend: str, missing: str = "") -> MachineRule:
    return MachineRule(slug, "error", section, wrong, mend, missing)


def _relied(slug: str, section: str, wrong: str, reliance: str, mend: str, missing: str = "") -> MachineRule:
    return MachineRule(slug, "portability", section, wrong, mend, missing, reliance)


_BARRIER: Final = "a barrier, an mbarrier wait, or a wait for the group of the copy, between the two accesses"

# fmt: off
_ALL = (
    # Races and waits.
    _error(
        "race", "8.7.1",
        "Two accesses of shared memory meet, one of them writes another value, and nothing orders them: the result "
        "depends on timing.",
        "Put a barrier between the two accesses, or let the second wait for an mbarrier that the first arrives at.",
        _BARRIER,
    ),
    _error(
        "global-race", "8.7.1",
        "Two accesses of global memory meet, one of them writes another value, and nothing orders them.",
        "Within a CTA, put a barrier between the accesses (`__syncthreads()`, `tl.debug_barrier()`). Between CTAs, "
        "publish with a release of gpu scope and take over with an acquire, or use atomics.",
        "a barrier within the CTA, or a release and an acquire of gpu scope between CTAs",
    ),
    _error(
        "copy-not-awaited", "9.7.9.25",
        "Shared memory is used while a copy into it is in flight: old, new or mixed bytes are read, or the copy "
        "overwrites what was stored.",
        "Wait for the mbarrier that the copy signals, or for its group, before the access.",
        "a wait for the end of the copy",
    ),
    _error(
        "missing-proxy-fence", "9.7.13.4",
        "The asynchronous proxy (TMA, tensor core) uses what threads wrote, and may see what lay there before.",
        "Execute fence.proxy.async after the writes and before the barrier, or after the barrier in the thread that "
        "issues the copy.",
        "fence.proxy.async between the generic write and the asynchronous access",
    ),
    _error(
        "dependent-launch-not-awaited", "9.7.13.13",
        "A dependent launch touches what the launch before it, which may still run, reads or writes.",
        "Execute griddepcontrol.wait before the access.",
        "griddepcontrol.wait",
    ),
    _error(
        "exit-with-pending-operation", "9.7.9.25",
        "A CTA ends while a copy or an MMA still reads or writes its memory, which may be another CTA's by then.",
        "Wait for the operation before the CTA ends.",
        "a wait for the end of the operation",
    ),
    _error(
        "ended-cta", "9.7.9.23",
        "A CTA of the cluster uses the shared memory of one that has ended, or that may end at any time.",
        "End the kernel with a barrier of the cluster.",
        "barrier.cluster.arrive and .wait behind the last access",
    ),
    _error(
        "deadlock", "9.7.13", "Nothing can move any more.",
        "Compare who waits with who arrives: counts, phases and transaction bytes of the barriers that are named.",
    ),
    _error(
        "runaway", "", "The launch executes more steps than its budget.",
        "Look for a loop that does not end, or raise step_budget.",
    ),
    # Tensor memory.
    _error(
        "tmem-race", "9.7.16.6",
        "Tensor memory is used while an MMA, a copy or another warp uses it, and nothing orders the two.",
        "Wait for the tcgen05.commit of the MMA, or put a barrier between the warps.",
        "tcgen05.commit and a wait for its mbarrier, or a barrier",
    ),
    _error(
        "tmem-store-not-waited", "9.7.16.8.5", "Tensor memory is used while a tcgen05.st into it is in flight.",
        "Execute tcgen05.wait::st in the warp that stores, before the other access.", "tcgen05.wait::st",
    ),
    _error(
        "tmem-load-not-waited", "9.7.16.8.5", "Tensor memory is overwritten while a tcgen05.ld may still read it.",
        "Execute tcgen05.wait::ld in the warp that loads, before the other access.", "tcgen05.wait::ld",
    ),
    _error(
        "tmem-alloc", "9.7.16.7.1", "An allocation of tensor memory that hardware refuses or that blocks for ever.",
        "Ask for a power of two in 32..512 columns, not more than before, and before the permit is given up.",
    ),
    _error(
        "tmem-dealloc", "9.7.16.7.1",
        "Tensor memory is given back that was not allocated so, or used after one CTA of the pair gave it back.",
        "Give back exactly what was allocated, after both CTAs are done with it.",
    ),
    _error(
        "tmem-leak", "9.7.16.7.1", "A CTA ends with tensor memory allocated: later CTAs of the SM cannot have it.",
        "Execute tcgen05.dealloc before the CTA ends.",
    ),
    _error(
        "tmem-not-allocated", "9.7.16.7.1", "Tensor memory is used that no live allocation covers.",
        "Allocate the columns, and read the address after the barrier that follows the allocation.",
    ),
    _error(
        "tmem-out-of-bounds", "9.7.16.1", "An address outside of the 128 lanes and 512 columns of tensor memory.",
        "Check the column offset and the shape.",
    ),
    _error(
        "tmem-shape", "9.7.16.8", "A shape of tcgen05.ld, st, cp or mma that has no layout.",
        "Use a shape that the ISA lists.",
    ),
    _error(
        "tmem-lane", "9.7.16.10.5", "An accumulator or scale factors begin at a lane where the tensor core has none.",
        "Begin at the lane that the layout of the MMA names, mostly 0.",
    ),
    _error(
        "scale-factor-replicas", "9.7.16.10.7",
        "The four quarters of tensor memory hold unlike scale factors: which the tensor core reads is undefined.",
        "Copy with .warpx4, or store the same values in all quarters.",
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
        "missing-wgmma-fence", "9.7.15.7.1", "A wgmma uses registers that other instructions wrote or read before.",
        "Execute wgmma.fence.sync.aligned before the first wgmma, and after other uses of its registers.",
        "wgmma.fence",
    ),
    _error(
        "register-in-flight", "9.7.15.7", "A register is used while a wgmma still reads or writes it.",
        "Execute wgmma.commit_group and wgmma.wait_group before the use.", "wgmma.wait_group",
    ),
    _error(
        "warpgroup-diverged", "9.7.15", "The warps of a warpgroup do not execute the same instruction.",
        "Let all four warps execute it with the same operands.",
    ),
    _error(
        "register-pool", "9.7.19.5",
        "setmaxnreg asks for what the launch cannot give: a warpgroup for more registers than the whole CTA was "
        "launched with, or .dec for more than the warp holds.",
        "Launch with more registers a thread (.maxnreg, or fewer threads in .reqntid), or ask for fewer.",
    ),
    # Barriers.
    _error(
        "mbarrier-misuse", "9.7.13.15", "An mbarrier is used before its initialisation, over it, or beyond its count.",
        "Initialise once, make that visible with a barrier, and let as many arrive as the count says.",
    ),
    _error(
        "barrier-misuse", "9.7.13.1", "A barrier is given other counts or threads than it waits for.",
        "Use the same count everywhere, and arrive once a phase.",
    ),
    _error(
        "diverged", "9.7.13", "An instruction that all threads of a warp execute together is executed by some.",
        "Move it out of the branch, or let one elected thread execute what is meant for one.",
    ),
    _error(
        "issued-by-many", "9.7.16.10", "Several threads issue what one thread issues.", "Elect one thread: elect.sync.",
    ),
    # Undefined values.
    *(
        _error(
            slug, "8.1", f"A value that nobody wrote decides something: {what} holds what was left there.",
            "Write before reading, or mask the part that nothing was written to.",
        )
        for slug, what in (
            ("uninitialised-register", "a register"), ("uninitialised-shared", "shared memory"),
            ("uninitialised-global", "an output or a workspace"), ("uninitialised-tmem", "tensor memory"),
            ("uninitialised-local", "local memory"),
        )
    ),
    # Addresses and operands.
    _error("out-of-bounds", "5.1", "An address outside of the memory that it is meant for.", "Mask or clamp it."),
    _error(
        "misaligned", "6.4.1", "An address that is not a multiple of what the access needs: hardware traps.",
        "Align the address, or use a narrower access.",
    ),
    _error("read-only", "5.1", "A store to memory that may only be read.", "Store elsewhere."),
    _error(
        "mixed-windows", "5.1", "Lanes of one generic access fall into unlike state spaces; the machine splits none.",
        "Use addresses of one state space an instruction.",
    ),
    _error(
        "wrong-space", "5.1", "An operand lies in another state space than the instruction takes.",
        "Convert the address with cvta, or name the right state space.",
    ),
    _error(
        "remote-shared", "5.1.7", "Shared memory of another CTA is named where the instruction reaches only its own.",
        "Use .shared::cluster with an address of mapa, and ranks inside the cluster.",
    ),
    _error(
        "branch-index", "9.7.12.4", "brx.idx with an index beyond its list of labels.", "Check the index first.",
    ),
    _error(
        "tensor-map", "5.5", "A tensor map that does not fit the copy, or memory that holds none.",
        "Encode the map for this rank, box and element type.",
    ),
    _error(
        "tensor-coordinates", "5.5", "Coordinates that the copy does not take.", "Give one a dimension, in range.",
    ),
    _error(
        "tensor-base", "5.5",
        "A tensor load of a box that begins outside of its tensor, with a map that begins outside of the tensor's "
        "memory: an H200 reads the first byte of the map for such a box, and ends in an illegal address if nothing is "
        "there (results/records/h200-tma-out-of-bounds.json).",
        "Let the map begin where the tensor does, or issue no load of a box that begins outside.",
    ),
    _error(
        "bulk-copy", "9.7.9.25", "A bulk copy of a size that hardware refuses, or a reduction that its elements lack.",
        "Copy a multiple of 16 bytes. Give the map elements of a type that the operation takes.",
    ),
    _error("bulk-store", "9.7.9.13", "A st.bulk of a size that hardware refuses.", "Store a multiple of 8 bytes."),
    _error(
        "cp-async", "9.7.9.25.3", "A cp.async whose src-size exceeds its cp-size.", "Clamp src-size.",
    ),
    _error(
        "matrix-descriptor", "9.7.16.4", "A matrix descriptor with fields that mean nothing together.",
        "Encode the start address, offsets and swizzle for this operand.",
    ),
    _error(
        "instruction-descriptor", "9.7.16.4.2", "An instruction descriptor with fields that mean nothing together.",
        "Encode the types, M and N of this kind.",
    ),
    _error(
        "sparsity-metadata", "9.7.14.6.1",
        "The metadata of a sparse matrix names no two elements of a chunk: the product is undefined.",
        "Give the two indices of each chunk, the lower one in the lower bits.",
    ),
    _error(
        "scale-selector", "9.7.14.3", "A selector of the scale factors of mma names bytes or threads that hold none.",
        "Byte 0 to 3, of two blocks 0 or 2, of four 0; thread 0 or 1 for A, 0 to 3 for B.",
    ),
    # Calls.
    _error("trap", "9.7.19.4", "The kernel executed trap.", "Look for the check that failed."),
    _error("assert", "", "An assertion of the kernel failed.", "Look for the condition that is named."),
    _error("printf", "", "A conversion that device printf does not have.", "Use one that it has."),
    _error(
        "device-heap", "", "A kernel gives back memory that malloc has not returned to it, or gives it back twice.",
        "Free what malloc returned, once.",
    ),
    _error(
        "schedule-dependent", "8.7.1", "The results depend on when asynchronous work ends.",
        "Look for a wait that is missing: `megamoe check` found unlike results under two schedules.",
    ),
    # What the ISA does not promise and production kernels rely on.
    _relied(
        "exit-with-pending-store", "9.7.9.25",
        "A thread ends with a bulk store that it has not waited for. The ISA does not say that its source outlives the "
        "CTA.",
        "DeepGEMM, CUTLASS's Hopper attention and Triton end like this.",
        "Execute cp.async.bulk.commit_group and cp.async.bulk.wait_group 0 before the thread ends.",
        "cp.async.bulk.wait_group",
    ),
    _relied(
        "copy-missing-proxy-fence", "9.7.13.4",
        "The tensor core reads what cp.async wrote, through the generic proxy, with no proxy fence.",
        "CUTLASS's C++ mainloops with cp.async have none.",
        "Execute fence.proxy.async after cp.async.wait_group, before the barrier.",
        "fence.proxy.async between the end of the cp.async and the asynchronous read",
    ),
    _relied(
        "unfenced-overwrite", "9.7.13.4",
        "A bulk copy overwrites what threads have read, with a barrier but no proxy fence in between: the ISA orders "
        "the proxies by such a fence only, and the copy may be seen by the earlier read.",
        "CUTLASS's and Triton's pipelines hand stages back with an mbarrier alone. DeepEP, TransformerEngine and NCCL "
        "have fixed it.",
        "Execute fence.proxy.async after the reads, before the arrival that hands the stage back.",
        "fence.proxy.async between the generic read and the copy",
    ),
    _relied(
        "mbarrier-reinitialised", "9.7.13.15.9",
        "An mbarrier that nobody has used is initialised again with the same count: undefined, since the memory "
        "already holds an mbarrier.",
        "CUTLASS kernels in which every warp initialises the same barriers.",
        "Let one elected thread initialise, then a barrier.",
    ),
    _relied(
        "mbarrier-init-unfenced", "9.7.13.4",
        "A copy signals an mbarrier whose initialisation no fence has made visible to the asynchronous proxy.",
        "Kernels with a plain barrier behind mbarrier.init.",
        "Execute fence.mbarrier_init.release.cluster or fence.proxy.async after mbarrier.init, before the barrier.",
        "fence.mbarrier_init.release.cluster",
    ),
    _relied(
        "tmem-lane-ignored", "9.7.16.8.1",
        "tcgen05.ld or st names lanes outside of the quarter of tensor memory that its warp reaches, and relies on "
        "these bits of the address being ignored.",
        "DeepGEMM gives every warp the same address.",
        "Add 32 * (warp % 4) to the lane of the address.",
    ),
    _relied(
        "descriptor-bit-ignored", "9.7.16.4.2",
        "The instruction descriptor of an mma of kind::mxf4 or mxf4nvf4 sets a bit that the ISA reserves. sm_100a does "
        "not read it.",
        "CuTeDSL's builder of such descriptors sets bit 12 by default, which it calls a version of sparsity.",
        "Clear bit 12 of the instruction descriptor.",
    ),
    _relied(
        "missing-tcgen05-fence", "9.7.16.11.1",
        "Threads order their tcgen05 operations by a barrier alone: the ISA lets such operations pass it.",
        "Many kernels leave one of the two fences out where a wait for the mbarrier of a commit orders enough.",
        "Execute tcgen05.fence::before_thread_sync before the barrier, and tcgen05.fence::after_thread_sync behind it.",
        "tcgen05.fence::before_thread_sync and tcgen05.fence::after_thread_sync around the barrier",
    ),
    _relied(
        "tmem-copy-unordered", "9.7.16.6.2",
        "tcgen05.cp overwrites what an earlier mma, whose end nothing has shown, reads: the ISA orders a copy before a "
        "later mma, not an mma before a later copy.",
        "quack-kernels' block-scaled GEMMs.",
        "Wait for a tcgen05.commit of the mma before the copy, or use other columns.",
        "tcgen05.commit and a wait for its mbarrier",
    ),
    _relied(
        "tmem-load-used-unwaited", "9.7.16.8.5",
        "Tensor memory is overwritten after a register of the tcgen05.ld that read it was used, with no wait.",
        "Kernels that take the register dependence for a wait.",
        "Execute tcgen05.wait::ld before the registers are used.",
        "tcgen05.wait::ld",
    ),
    _relied(
        "tmem-mma-unordered", "9.7.16.6.2",
        "An mma overwrites what an earlier mma of another accumulator, whose end nothing has shown, reads: the ISA "
        "orders MMAs of one accumulator only.",
        "FlashAttention-4 lets S overwrite the P that the MMA before reads.",
        "Wait for a tcgen05.commit of the earlier mma, or use other columns.",
        "tcgen05.commit and a wait for its mbarrier",
    ),
    _relied(
        "wgmma-fence-early", "9.7.15.7.1",
        "Other instructions use registers of a wgmma behind the last wgmma.fence: the ISA wants the fence between that "
        "use and the wgmma.",
        "NVIDIA's compiler moves writes of accumulators across the fence (CuTeDSL's Hopper GEMM).",
        "Execute wgmma.fence.sync.aligned directly before the first wgmma.",
        "wgmma.fence",
    ),
    _relied(
        "lanes-unordered", "8.7.1",
        "A lane uses what another lane of its warp has written, and nothing makes it wait for that: lanes are threads "
        "of their own. Or another warp does, which has waited for a release by other lanes alone; or a lane relies on "
        "a flag in global memory that other lanes alone have acquired.",
        "Kernels that take the lanes of a warp to run in step.",
        "Execute bar.warp.sync between the write and the other lane's use, or its release, and behind an acquire.",
        "bar.warp.sync",
    ),
    # Worth a look.
    MachineRule(
        "unspecified-result", "note", "9.7.1",
        "An operand for which the ISA gives no result: a remainder by zero, a bit field beyond 255.",
        "Make sure that the result is not used.",
    ),
)
# fmt: on
RULES: Final[Mapping[str, MachineRule]] = {rule.slug: rule for rule in _ALL}
"""Every rule by its slug."""
COLLECTED_ONLY: Final = frozenset(
    {
        "unfenced-overwrite", "mbarrier-init-unfenced", "missing-tcgen05-fence", "tmem-copy-unordered",
        "tmem-load-used-unwaited", "unspecified-result", "tmem-mma-unordered", "wgmma-fence-early", "lanes-unordered",
    }
)  # fmt: skip
"""Rules on which only a door fails. A judged row counts violations and does not fail on them."""
COUNTERS: Final[Mapping[str, str]] = {
    "mbarrier-init-unfenced": "mbarrier_inits_unfenced",
    "missing-tcgen05-fence": "tcgen05_fences_missing",
    "tmem-mma-unordered": "tmem_unordered_mmas",
    "wgmma-fence-early": "wgmma_fences_early",
    "lanes-unordered": "lanes_unordered",
}
"""By rule of COLLECTED_ONLY that nothing else counts: the counter of a judged row, absent where the rule is kept."""
PAGES: Final[Mapping[str, str]] = {
    "async-proxy": "proxy fences",
    "unawaited-copies": "bulk copies that nobody awaits",
    "mbarrier": "phases, counts and parity",
    "races": "races of generic memory and scopes",
    "lanes": "lanes of one warp",
    "cluster-life": "the life of a cluster",
    "tcgen05-order": "tcgen05 fences and waits",
    "tensor-memory": "allocation and lanes",
    "wgmma": "wgmma fences and waits",
    "undefined-values": "undefined values",
    "uniform-warps": "elect, sync masks, setmaxnreg",
}
"""The pages of docs/rules, one per family: their names and subjects."""


def as_markdown() -> str:
    """The table for readers: docs/rules/README.md."""
    grades: dict[Grade, str] = {
        "error": "The ISA leaves it undefined, it goes wrong on silicon, or the result depends on a race.",
        "portability": "The ISA does not promise it, and production kernels rely on it. It runs on the GPUs of today.",
        "note": "Worth a look.",
    }
    lines = [
        "# Rules",
        "",
        f"The machine looks for {len(RULES)} things that a kernel can do wrong. "
        "[Bring your kernel](../bring-your-kernel.md) says how to read a finding, choose a profile and suppress one.",
        "Sections are those of the PTX ISA 9.1. `python -m backends.vm.rules > docs/rules/README.md` makes this page.",
        "",
        "Eleven families have a page: what goes wrong, the smallest kernel that shows it, its finding, the "
        "cure, and which public bugs it was.",
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
        "A row of the matrix fails on errors and on `portability`, as the profile `strict` does at the doors, but for "
        f"{len(relied)} rules: {', '.join(relied)}.",
        "The doors (`megamoe check`, `megamoe.vm`, `megamoe.triton`, `megamoe.cutedsl`, pytest) report them, and "
        "`strict` fails on them. A row counts what breaks them, and `megamoe gate` fails where a count grows; of a "
        "backend that is not registered `megamoe run` tells the counts.",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(as_markdown(), end="")

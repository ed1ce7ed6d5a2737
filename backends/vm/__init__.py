"""A PTX virtual machine on the CPU for sm_90a and sm_100a; only executor and trace import megamoe.contract.

`executor.EXECUTOR` puts the machine behind the harness's contract, `machine.Machine` runs launches. A launch goes:
`ptx/` (text to syntax tree) -> `bind/` (tree to code: blocks of steps) -> `machine/` (warps that a scheduler moves;
`engine` holds the copies and tensor-core work that run beside them). `isa/` holds the instruction families, and they
register in `bind/forms.py`. `load.py` does all up to the launch. `results/coverage.md` lists every spelling, its PTX
ISA section and how its meaning is known. `facts.md N.M` in comments is conformance/vm/facts.md.

Rooms, lowest first; each imports only rooms before it: faults; ptx, numerics; tensor; memory; machine; bind; trace,
isa; load, coverage; host; executor.

The names of the rules (`Fault.rule`) say what it checks; conformance/vm plants each. It does NOT notice:
- a missing tcgen05.fence::* or fence.mbarrier_init, and an MMA that overwrites what an earlier MMA of another
  accumulator reads: real kernels leave these out, and asking for them would refuse what runs on silicon. It only counts
  a missing tcgen05.wait::ld where a register of the load has been used (`tmem_unwaited_overwrites`), and a tcgen05.cp
  into what an mma still reads, an order that the ISA does not promise (`tmem_unordered_copies`);
- races between lanes of one warp, and two generic writers of parts of one 4-byte granule of shared memory;
- in global memory: a race with any but the last reader of a byte, a missing fence.proxy.async before a bulk reduction,
  and a tensor map that is read while it is changed;
- a missing fence.proxy.async between generic reads and a bulk copy that overwrites what they read;
- in a dependent launch before its griddepcontrol.wait: strong loads, as they may be the "other means" of the CUDA
  guide, launches of another stream, and an overwrite of what an earlier launch only read by strong loads;
- a wait that acquires more than its own phase, since the clocks of a barrier accumulate;
- accesses that are too early but happen to be ordered by every schedule tried: it tests schedules, it proves nothing;
- anything about time, register pressure or caches.
It refuses, although silicon may run it:
- mbarrier.init over a live mbarrier;
- a kernel that ends with a bulk store that nobody has waited for;
- uninitialised reads whose value is unused;
- a dependent launch that, before its own wait, touches what a launch further back did, even if the launch in between
  waited before it launched its dependents;
- an `.aligned` instruction behind a loop in which some lanes of a warp neither store, copy nor wait for 4096 blocks:
  they count as spinning (machine/warp.py).
Matrix accumulation follows a declared policy (fast, exact, hopper). Blackwell's own is undocumented.
"""

"""A PTX virtual machine on the CPU for sm_90a and sm_100a; only executor and trace import megamoe.contract.

`executor.EXECUTOR` puts the machine behind the harness's contract; `machine.Machine` runs launches. A launch goes:
`ptx/` (text to syntax tree) -> `bind/` (tree to code: blocks of steps) -> `machine/` (warps that a scheduler moves;
`engine` holds the copies and tensor-core work that run beside them). `bind/lanes.py` compiles the register arithmetic
of blocks that run often (`machine.code.OFTEN`, `lanes.WORTH`). `isa/` holds the instruction families, and they register
in `bind/forms.py`. `load.py` does everything up to the launch. `results/coverage.md` lists every spelling, its PTX ISA
section and how its meaning is known. `facts.md N.M` in comments is conformance/vm/facts.md.

Rooms, lowest first; each imports only rooms before it: rules; faults; ptx, numerics; tensor; memory; machine; bind;
trace, isa; load, coverage; host; executor.

rules.py lists what the machine checks, each rule with its grade; conformance/vm plants a violation of each. A Fault
that is raised ends its launch. A Fault given to `faults.report` is a missing order. With a collector
(`Machine.findings`, as the doors have) it becomes a finding and the run goes on as if the order were there. Without one
(a judged row) it ends the launch too. An order that the ISA asks for and production kernels leave out is a finding of
grade `portability`. Some of these reach only collectors, and a judged row counts them instead:
- a missing tcgen05.fence (`tcgen05_fences_missing`);
- a missing fence.mbarrier_init (`mbarrier_inits_unfenced`);
- a missing tcgen05.wait::ld where a register of the load has been used (`tmem_unwaited_overwrites`);
- a tcgen05.cp or an mma that overwrites what an mma of another accumulator still reads (`tmem_unordered_copies`,
  `tmem_unordered_mmas`);
- a missing wgmma.fence before another use of the registers (`wgmma_fences_early`);
- a lane that uses what another lane of its warp wrote to shared memory with nothing in between, another warp that does
  so, or overwrites what the lane has read, and has waited only for an arrival of other lanes, or a lane that relies on
  what only other lanes of its warp have awaited or acquired: an mbarrier, a flag, the end of their own copies
  (`lanes_unordered`);
- a bulk copy over what threads have read with no fence.proxy.async in between (`smem_unfenced_overwrites`);
- a setmaxnreg with no barrier of the warpgroup since the one before (`setmaxnreg_unsynchronised`);
- a position or length beyond 255 of a 64-bit bit field (`bit_fields_beyond_255`);
- as a note, a remainder by zero (`remainders_by_zero`): correct kernels of others compute some that they do not use;
- as a note, a wait at an mbarrier whose result nobody reads (`waits_unread`): it orders nothing here.
The gate fails where one of these counts grows.

Undefined values (registers, shared, tensor, local, output and workspace memory that nobody wrote) travel with their
bytes, as in Valgrind's memcheck. They are a fault where they decide something: an address, a branch, the guard of an
instruction that does more than compute, any operand of an instruction that synchronises or copies, or a result; see
bind.definedness. Bit logic, integer addition, multiplication, comparison, minima and maxima track defined bits one by
one. A division, a bit count and floating-point arithmetic with an undefined operand have undefined results, whatever
the defined bits say. An undefined element of A makes a row of D undefined, one of B a column. A reduction by the copy
engine makes each element undefined that it combines with an undefined one. wmma and the forms of mma.sync in
isa/warp_mma_types.py depend on their operands: an undefined one is a fault there. A judged row's results are checked
once, after its last launch; the doors check after each launch.

It does NOT notice, and why:
- A .cta scope that the text does not spell. `mbarrier.arrive.shared::cluster` with no scope releases to its own CTA by
  the ISA's default, and CUTLASS hands stages back to the other CTA with it. Written scopes are kept.
- That a wait for a phase says nothing about the copies of earlier phases at the same mbarrier: phases complete in
  order.
- Between lanes of one warp, races other than a read of what another lane wrote.
- A strong load (`.volatile`, `.relaxed` and up) beside a weak store that nothing orders, because kernels poll what a
  weak store sets; nor a strong write after a weak one. A weak write after a strong one is a race, and so is a strong
  write beside a weak load, whichever comes first. A compare-and-swap that fails is a strong read (PTX ISA 8.4), but a
  weak write after it is a race. All other atomics are writes, also those that leave what was there.
- A strong write of too narrow a scope after a strong load, and a strong access of too narrow a scope after a bulk
  reduction. After a strong write by a thread it is noticed (memory/strong_writes.py).
- In shared memory, where races are judged by byte (memory/marks.py), a race with a write of the value that is there
  already. Threads that write it do not race (PTX ISA 8.7.2), and whoever comes later is held only to the last of them.
- A store of one or two bytes of shared memory over what a warp has read, if another warp has read these bytes since
  with no order between the two, and then the first warp has read other bytes of the 4-byte granule in a later epoch. Of
  each reader besides the last, one reading of a granule is kept.
- That another lane's arrival or release gives back what a lane still reads, unless it was the last reader of a granule
  of shared memory, or of a byte where that is finer (a mark holds one). In global memory readers are known by warp.
  What a lane has read before it ended counts as ordered, and a row of ldmatrix counts as read by the lane that gives
  its address.
- Lanes of a warp that meet in part, or where one waits or acquires and another one releases without having met it.
  Meetings are counted by warp, and what may order some lanes counts for all, so that no finding is wrong: a wait by one
  lane counts as a meeting for what the others stored or read before it, and so do shfl.sync, votes, wgmma and tcgen05
  instructions, for which the ISA does not say that they order memory. What a lane has acquired before it ended counts
  as known to the lanes of its warp that meet later. A lane that waits behind others counts as knowing what they know.
  Strong accesses are never checked by lane, as they race with nothing here, nor are operands of the tensor core,
  whichever lane issues it, and sources in global memory of another lane's cp.async.
- An `.aligned` instruction, or a shfl.sync or vote with a constant mask, that some lanes skip and then exit: whoever
  executes it waits for all non-exited threads.
- In global memory: a race with any but the last reader of a byte (a mark holds one; the schedules of `megamoe check`
  let different readers come last).
- Of tensor maps in global memory: a change while a prefetch reads the map, or while a load does whose thread has waited
  for its bulk groups only (memory/map_reads.py says who waits like this); and a missing acquire of a map that the host
  or an earlier launch has changed: the start of a launch counts as an acquire, in a dependent launch
  griddepcontrol.wait.
- In a dependent launch before its griddepcontrol.wait: strong loads, as they may be the "other means" of the CUDA
  guide, launches of another stream, launches more than 16 back, and an overwrite of what an earlier launch only read
  by strong loads. At the doors, work of the host between two launches is noticed if it waits for the device or changes
  memory that the launches before have accessed; otherwise it does not end the chain.
- At the doors, a read of global memory that nobody wrote, with one exception: where torch's device "cuda" is the host
  (megamoe.torch_cuda, and so under pytest), a tensor of 8 bytes to 16 MiB of torch.empty and its kin of which nobody
  has written a byte (megamoe/given/unwritten.py). A tensor written in part counts as written, because correct programs
  read its padding and drop what they compute from it; so does memory that torch allocates in other ways, and what torch
  or the host reads is not seen. `megamoe check` fills every array.
- In a kernel that reads %reserved_smem_offset_*, as cooperative groups do, accesses to reserved shared memory.
- That a CTA ends before its peer has ever accessed its mbarrier: this is found only at the access.
- CTAs of one SM that wait for each other over tensor memory, unless they are of one launch and alike, and keep columns
  until they have got more (`tmem-hold-and-wait`). Each CTA has a tensor memory of its own, since nothing places CTAs on
  SMs here. A random schedule gives an allocation any free place, as if another CTA held the rest, if two CTAs of the
  kernel have room on one SM.
- Warps that spin for ever and in doing so change global or local memory, or shared memory by atomics and strong stores,
  or count in a register up to a bound: the step budget ends them, not `deadlock`. A store or an atomic that leaves what
  was there changes nothing, nor does a register that decides nothing (machine/spinning.py). Operands of shfl, votes and
  matrix multiplications count as deciding.
- Accesses that are too early but happen to be ordered by every schedule tried: it tests schedules, it proves nothing.
- Anything about time, caches, or register pressure beyond the pool that setmaxnreg moves. Where a launch states no
  number of registers, warps without a setmaxnreg count as holding none, and one that has ended still holds its own.

It refuses, although silicon may run it:
- calls through a register (function pointers, virtual functions) and recursive calls, as functions are put in the place
  of their calls, and with them alloca, stacksave and stackrestore (bind/calls.py);
- textures, samplers and surfaces (tex, tld4, suld, sust and their kin);
- mbarrier.init over a live mbarrier that has been used, or with another count;
- an undefined operand of an atomic, an st.async or a red.async, or undefined memory under an atomic other than
  atom.exch, even if the result is never used;
- an undefined value that is left in memory other than a workspace, even if the host never reads it;
- a dependent launch that, before its own wait, touches what a launch further back did, even if the launch in between
  waited before it launched its dependents;
- lanes that poll for what others of their warp store right before an instruction that needs all of them: those do not
  begin the straight code around it before all are there (machine/warp.py);
- a launch that waits for what a later launch or the host does while it runs: launches run one after another, so it is
  a `deadlock`.

ex2, rcp, rsqrt, lg2, sin, cos and tanh have an H200's bits for every target; that Blackwell has them too is assumed.
Matrix accumulation follows a declared policy (fast, exact, hopper). Blackwell's own is undocumented. Under the policy
"ring" all floats are elements of Z / 37^3 (numerics/ring.py), so that no term of attention's o and lse hides in a
tolerance, with keys split or not.
"""

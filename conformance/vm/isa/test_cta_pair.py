"""CTAs of a cluster: instructions on a pair of CTAs, and clusterlaunchcontrol."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from backends.vm.faults import Fault
from conformance.vm.isa.test_block_scaled import (
    SFA_COLUMN,
    SFB_COLUMN,
    Case,
    atom,
    in_smem,
    numbers,
    random_codes,
    scaled_product,
)
from conformance.vm.kernel import Kernel, fault_of
from conformance.vm.tensor_kernel import (
    SCHEDULES,
    Bytes,
    Image,
    core_matrices,
    descriptor,
    run_tensor,
)

Half = npt.NDArray[np.float16]
N, K = 64, 16
A_COLUMN = 320


def f16_idesc(m: int) -> int:
    """f16 inputs, f32 accumulator."""
    return 1 << 4 | N >> 3 << 17 | m >> 4 << 24


def operands(m: int) -> tuple[Half, Half]:
    rng = np.random.default_rng(m)
    return rng.integers(-4, 5, (m, K)).astype(np.float16), rng.integers(-4, 5, (N, K)).astype(np.float16)


def images(a: Half, b: Half) -> tuple[list[Bytes], str, str]:
    """The image of each CTA, half of the rows of A and of B at the same offsets, and the two descriptors."""
    both, where = [], (0, 0)
    for rows, columns in zip(np.split(a, 2), np.split(b, 2), strict=True):
        image = Image()
        where = (image.add(core_matrices(rows.view(np.uint8))), image.add(core_matrices(columns.view(np.uint8))))
        both.append(image.data)
    return both, descriptor(where[0]), descriptor(where[1])


def gathered(out: npt.NDArray[np.uint32], m: int, n: int) -> npt.NDArray[np.float32]:
    """D [m, n] from the lanes of both CTAs: layout A for m = 256, layout B for m = 128."""
    values = out.view(np.float32)
    if m == 256:
        return values[:, :, :n].reshape(256, n)
    return np.concatenate([np.hstack([cta[:64, : n // 2], cta[64:, : n // 2]]) for cta in values])


def plain(m: int, a: str, b: str, *, enable: str = "%no") -> str:
    return f"tcgen05.mma.cta_group::2.kind::f16 [%tm], {a}, {b}, {f16_idesc(m)}, {enable};"


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("m", [128, 256])
def test_each_cta_holds_its_half_of_a_b_and_d(m: int, schedule: str) -> None:
    a, b = operands(m)
    both, at_a, at_b = images(a, b)
    issue = plain(m, at_a, at_b) + plain(m, at_a, at_b, enable="%yes")
    out = run_tensor(issue, both, N if m == 256 else N // 2, group=2, schedule=schedule)
    expected = 2 * a.astype(np.float32) @ b.astype(np.float32).T
    assert np.array_equal(gathered(out, m, N), expected), f"M = {m}: D is not where the layout says"


@pytest.mark.parametrize("m", [128, 256])
def test_a_from_tensor_memory(m: int) -> None:
    """Row m of a CTA in lane m. For M = 128 the 64 rows are stored twice, in lanes 0..63 and 64..127."""
    a, b = operands(m)
    both, _, at_b = images(a, b)
    if m == 256:
        copies = f"tcgen05.cp.cta_group::2.128x256b [%tm+{A_COLUMN}], {descriptor(0)};"
    else:
        copies = "".join(
            f"tcgen05.cp.cta_group::2.64x128b.warpx2::02_13 [%tm+{A_COLUMN + 4 * i}], {descriptor(128 * i)};"
            for i in range(2)
        )
    out = run_tensor(copies + plain(m, f"[%tm+{A_COLUMN}]", at_b), both, N if m == 256 else N // 2, group=2)
    expected = a.astype(np.float32) @ b.astype(np.float32).T
    assert np.array_equal(gathered(out, m, N), expected), f"M = {m}: A in tensor memory gives another product"


def test_disabled_lanes_are_those_of_both_ctas() -> None:
    """Elements 0..3 of the vector are the even CTA's lanes, 4..7 the odd CTA's."""
    a, b = operands(256)
    both, at_a, at_b = images(a, b)
    masked = plain(256, at_a, at_b, enable="{%w0, %w1, %w1, %w1, %w1, %w1, %w1, %w0}, %yes")
    before = "mov.b32 %w0, -1; mov.b32 %w1, 0;"
    out = run_tensor(plain(256, at_a, at_b) + masked, both, N, group=2, changes={"before": before})
    expected = 2 * a.astype(np.float32) @ b.astype(np.float32).T
    expected[:32] /= 2
    expected[-32:] /= 2
    assert np.array_equal(gathered(out, 256, N), expected), "lanes 0..31 of rank 0 and 96..127 of rank 1 must keep D"


@pytest.mark.parametrize("m", [128, 256])
@pytest.mark.parametrize(
    "case",
    [
        Case("mxf4nvf4", "block16", 64, "e2m1", "e2m1", "ue4m3", 4),
        Case("mxf8f6f4", "", 64, "e4m3", "e4m3", "ue8m0", 1, (2, 1)),
    ],
    ids=["nvf4", "mxf8"],
)  # fmt: skip
def test_block_scaled(case: Case, m: int) -> None:
    """A CTA has the scale factors of its own rows of A and of all rows of B.

    With M = 128, the rows of B below N / 2 are in quarters 0 and 1, the others in quarters 2 and 3.
    """
    rng = np.random.default_rng(7)
    a, b = random_codes(rng, (m, case.k), case.a), random_codes(rng, (case.n, case.k), case.b)
    sfa, sfb = random_codes(rng, (m, case.blocks), case.sf), random_codes(rng, (case.n, case.blocks), case.sf)
    both: list[Bytes] = []
    issue = ""
    for rank in range(2):
        mine = slice(rank * m // 2, (rank + 1) * m // 2)
        image = Image()
        at_a = image.add(core_matrices(in_smem(a[mine], case.kind, case.a)))
        at_b = image.add(core_matrices(in_smem(np.split(b, 2)[rank], case.kind, case.b)))
        at_sfa = image.add(atom(sfa[mine], case.ids[0], rng)[0])
        halves = np.split(sfb, 2) if m == 128 else [sfb]
        at_sfb = image.add(np.concatenate([atom(half, case.ids[1], rng)[0] for half in halves]))
        both.append(image.data)
        form = "64x128b.warpx2::01_23" if m == 128 else "32x128b.warpx4"
        issue = (
            f"tcgen05.cp.cta_group::2.32x128b.warpx4 [%tm+{SFA_COLUMN}], {descriptor(at_sfa, 16)};"
            f"tcgen05.cp.cta_group::2.{form} [%tm+{SFB_COLUMN}], {descriptor(at_sfb, 16)};"
            + case.mma(2, m).replace(" A,", f" {descriptor(at_a)},").replace(" B,", f" {descriptor(at_b)},")
        )
    out = run_tensor(issue, both, case.n if m == 256 else case.n // 2, group=2)
    expected = scaled_product(numbers(a, case.a), numbers(sfa, case.sf), numbers(b, case.b), numbers(sfb, case.sf))
    assert np.array_equal(gathered(out, m, case.n), expected.astype(np.float32)), f"M = {m}: not the formula's result"


ODD = {
    "issue": "setp.eq.s32 %leader, %rank, 1; and.pred %leader, %leader, %one; @!%leader bra DONE; ISSUE COMMIT DONE:"
}
ONE_SIDED = {"alloc": """setp.eq.s32 %ok, %rank, 0; and.pred %ok, %ok, %warp0; @!%ok bra ALLOCATED;
tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%slot], 512;
ALLOCATED: barrier.cluster.arrive; barrier.cluster.wait; ld.shared.b32 %tm, [%slot];"""}  # fmt: skip
UNEQUAL = {"alloc": """@!%warp0 bra ALLOCATED; shl.b32 %w0, %rank, 5; add.s32 %w0, %w0, 32; and.b32 %w0, %w0, 96;
tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%slot], %w0;
ALLOCATED: bar.sync 0; ld.shared.b32 %tm, [%slot];"""}  # fmt: skip
MIXED = {"issue": "@!%leader bra DONE;\nISSUE\ntcgen05.commit.cta_group::1.mbarrier::arrive::one.b64 [%done];\nDONE:"}
ALONE = {"issue": "@!%leader bra DONE;\nISSUE\ntcgen05.commit.cta_group::2.mbarrier::arrive::one.b64 [%done];\nDONE:"}
FREE_AT_ONCE = """tcgen05.wait::ld.sync.aligned; bar.sync 0; @!%warp0 bra FREED;
tcgen05.dealloc.cta_group::2.sync.aligned.b32 %tm, 512;
FREED: ret;"""
UNMET = {"meet again": ""}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("rule", "says", "changes"),
    [
        ("cta-pair", "the even CTA of the pair issues it", ODD),
        ("deadlock", "a warp of the peer CTA rank \\[1\\] to execute tcgen05.alloc", ONE_SIDED),
        ("cta-pair", "both must execute the same", UNEQUAL),
        ("cta-group", "all must have the same", MIXED),
        ("deadlock", "mbarrier", ALONE),
        ("copy-not-awaited|race", "operand A of tcgen05.mma|the tensor core of CTA rank 0 read it", UNMET),
    ],
    ids=["issued by the odd CTA", "one allocates", "unequal allocs", "two groups", "commit to one", "peer not awaited"],
)
def test_planted_faults(rule: str, says: str, changes: dict[str, str], schedule: str) -> None:
    both, at_a, at_b = images(*operands(256))
    with pytest.raises(Fault, match=says) as caught:
        run_tensor(plain(256, at_a, at_b), both, N, group=2, changes=changes, schedule=schedule)
    assert caught.value.rule in rule.split("|"), f"found {caught.value} where the broken rule is {rule}"


def test_a_cta_without_a_peer() -> None:
    both, at_a, at_b = images(*operands(256))
    with pytest.raises(Fault, match="where it has no peer") as caught:
        run_tensor(plain(256, at_a, at_b), both, N, group=2, cluster=1)
    assert caught.value.rule == "cta-pair"


def test_memory_that_one_cta_does_not_give_back() -> None:
    both, at_a, at_b = images(*operands(256))
    only = {
        "free": """tcgen05.wait::ld.sync.aligned; barrier.cluster.arrive; barrier.cluster.wait;
setp.eq.s32 %ok, %rank, 0; and.pred %ok, %ok, %warp0; @!%ok bra FREED;
tcgen05.dealloc.cta_group::2.sync.aligned.b32 %tm, 512;
FREED: ret;"""
    }
    with pytest.raises(Fault, match=r"execute tcgen05\.dealloc") as caught:
        run_tensor(plain(256, at_a, at_b), both, N, group=2, changes=only)
    assert caught.value.rule == "deadlock"


@pytest.mark.parametrize("schedule", [*SCHEDULES, "late_cta:0", "late_cta:1"])
def test_memory_that_a_cta_gives_back_while_its_peer_reads(schedule: str) -> None:
    """No cluster barrier before the dealloc, as in the public bugs cutlass#3435 and triton#10656."""
    both, at_a, at_b = images(*operands(256))
    early = {"free": FREE_AT_ONCE}
    with pytest.raises(Fault, match=r"tcgen05\.dealloc") as caught:
        run_tensor(plain(256, at_a, at_b), both, N, group=2, changes=early, schedule=schedule)
    assert caught.value.rule in ("tmem-dealloc", "tmem-race", "tmem-load-not-waited"), f"found {caught.value}"


# clusterlaunchcontrol: each cluster's work is done once, by that cluster or by one that took it over.


GRID = (4, 3, 2)
LAUNCH_SCHEDULES = ("eager", "lazy", "random:1", "random:2")

BODY = """.shared .align 16 .b8 response[16]; .shared .align 8 .b64 mbar;
.reg .b32 %rank, %x, %y, %z, %w, %nx, %ny, %phase, %at, %i; .reg .b64 %p, %o, %token; .reg .b128 %r;
.reg .pred %one, %first, %ok, %more;
mov.u32 %rank, %cluster_ctarank; setp.eq.s32 %one, %tx, 0; setp.eq.s32 %first, %rank, 0;
and.pred %first, %first, %one;
mov.u32 %x, %ctaid.x; mov.u32 %y, %ctaid.y; mov.u32 %z, %ctaid.z; mov.u32 %nx, %nctaid.x; mov.u32 %ny, %nctaid.y;
mov.b32 %phase, 0; mov.u32 %at, response;
@%one mbarrier.init.shared.b64 [mbar], 1;
barrier.cluster.arrive; barrier.cluster.wait;
@%one atom.global.add.u32 %i, [%workers], 1;
WORK: mad.lo.s32 %i, %z, %ny, %y; mad.lo.s32 %i, %i, %nx, %x; mul.wide.u32 %o, %i, 4;
add.s64 %p, %done, %o;
@%one atom.global.add.u32 %i, [%p], 1;
@%one mbarrier.arrive.expect_tx.shared.b64 %token, [mbar], 16;
MEET
@%first clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytesALL.b128 [%at], [mbar];
WAIT
ld.shared.b128 %r, [%at];
clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %more, %r;
@!%more bra OUT;
DECODE
add.s32 %x, %x, %rank; xor.b32 %phase, %phase, 1;
FENCED
bra WORK;
OUT: ret;"""
TWO_WAY = "fence.proxy.async.shared::cta; barrier.cluster.arrive; barrier.cluster.wait;"
ONE_WAY = """fence.proxy.async::generic.release.sync_restrict::shared::cta.cluster;
barrier.cluster.arrive; barrier.cluster.wait;
fence.proxy.async::generic.acquire.sync_restrict::shared::cluster.cluster;"""
"""The fences of the ISA's own example (PTX ISA 9.7.13.17)."""
WAIT = "WAITING: mbarrier.try_wait.parity.shared.b64 %ok, [mbar], %phase; @!%ok bra WAITING;"
SCALARS = "".join(f"clusterlaunchcontrol.query_cancel.get_first_ctaid::{axis}.b32.b128 %{axis}, %r;" for axis in "xyz")
VECTOR = "clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {%x, %y, %z, %w}, %r;"


def run(schedule: str, cluster: int, **stages: str) -> tuple[npt.NDArray[np.uint32], int]:
    """How often the work of each CTA was done, uint32 [z, y, x], and how many CTAs ran. `stages`: as in `looped`."""
    found, _ = looped(BODY, cluster, **stages).run(schedule)
    return found["done"], int(found["workers"][0])


def looped(
    body: str,
    cluster: int,
    decode: str = SCALARS,
    wait: str = WAIT,
    everybody: str = ".multicast::cluster::all",
    fenced: str = TWO_WAY,
) -> Kernel:
    """`body`, a loop over the work of clusters that have not begun, with its stages filled in."""
    meet = "barrier.cluster.arrive; barrier.cluster.wait;" if cluster > 1 else ""
    body = (
        body.replace("DECODE", decode)
        .replace("FENCED", fenced)
        .replace("MEET", meet)
        .replace("WAIT\n", wait + "\n")
        .replace("ALL.", everybody + ".")
    )
    buffers = {"done": np.zeros(GRID[::-1], np.uint32), "workers": np.zeros(1, np.uint32)}
    return Kernel(body, buffers, grid=GRID, cluster=(cluster, 1, 1))


@pytest.mark.parametrize("decode", [SCALARS, VECTOR], ids=["scalars", "vector"])
@pytest.mark.parametrize("cluster", [1, 2, 4])
@pytest.mark.parametrize("schedule", LAUNCH_SCHEDULES)
def test_all_work_is_done_once(schedule: str, cluster: int, decode: str) -> None:
    done, workers = run(schedule, cluster, decode=decode)
    assert np.all(done == 1), f"some work was not done exactly once: {done.tolist()}"
    assert workers < done.size, f"{workers} CTAs ran for {done.size} pieces of work: nothing was taken over"


@pytest.mark.parametrize("schedule", LAUNCH_SCHEDULES)
def test_the_fences_of_the_isa_s_example(schedule: str) -> None:
    done, _ = run(schedule, 2, fenced=ONE_WAY)
    assert np.all(done == 1), f"some work was not done exactly once: {done.tolist()}"


def test_without_multicast_only_the_asking_cta_is_told() -> None:
    done, _ = run("eager", 1, everybody="")
    assert np.all(done == 1), f"some work was not done exactly once: {done.tolist()}"
    with pytest.raises(Fault) as caught:
        run("eager", 2, everybody="")
    assert caught.value.rule == "deadlock", "the other CTA of the cluster waits for a response that never comes"


@pytest.mark.parametrize("schedule", LAUNCH_SCHEDULES)
def test_a_response_that_is_not_awaited(schedule: str) -> None:
    with pytest.raises(Fault) as caught:
        run(schedule, 1, wait="")
    assert caught.value.rule in ("copy-not-awaited", "uninitialised-shared"), f"found {caught.value}"


@pytest.mark.parametrize("schedule", LAUNCH_SCHEDULES)
@pytest.mark.parametrize("decode", [SCALARS, VECTOR], ids=["scalars", "vector"])
def test_the_coordinates_of_a_failed_request_are_undefined(schedule: str, decode: str) -> None:
    """They may be taken before the answer is known; they decide nothing then."""
    hoisted = f"{WAIT}\nld.shared.b128 %r, [%at];\n{decode}\n"
    done, _ = run(schedule, 2, decode="", wait=hoisted)
    assert np.all(done == 1), f"some work was not done exactly once: {done.tolist()}"
    used = f"{hoisted} mad.lo.s32 %i, %x, 4, 0; setp.lt.s32 %ok, %i, 0; @%ok bra OUT;\n"
    with pytest.raises(Fault, match="response that names no cluster: its try_cancel failed") as caught:
        run(schedule, 2, decode="", wait=used)
    assert caught.value.rule == "uninitialised-register", f"{schedule}: {caught.value}"


@pytest.mark.parametrize("schedule", LAUNCH_SCHEDULES)
def test_a_request_after_one_that_was_seen_to_fail(schedule: str) -> None:
    """A CTA that has seen a failure asks again, once. Two requests before the first look are right."""
    again = BODY.replace(
        "OUT: ret;",
        """OUT: @%one mbarrier.arrive.expect_tx.shared.b64 %token, [mbar], 16;
xor.b32 %phase, %phase, 1; fence.proxy.async.shared::cta; bar.sync 0;
@%first clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%at], [mbar];
LAST: mbarrier.try_wait.parity.shared.b64 %ok, [mbar], %phase; @!%ok bra LAST; ret;""",
    )
    twice = BODY.replace("[mbar], 16;", "[mbar], 32;").replace("response;", "response; add.u32 %next, %at, 16;")
    ask = next(line for line in BODY.splitlines() if line.startswith("@%first clusterlaunchcontrol"))
    twice = twice.replace(ask, f"{ask}\n{ask.replace('[%at]', '[%next]')}").replace("bra WORK;", "ret;")
    assert again != BODY
    assert ask in twice
    for body, planted in ((again, True), (twice, False)):
        whole = body.replace("response[16]", "response[32]").replace(".reg .b32 %", ".reg .b32 %next, %", 1)
        fault = fault_of(looped(whole, 1, everybody=""), schedule)
        assert (fault is not None and fault.rule == "cancel-after-failure") == planted, f"{schedule}: {fault}"
        assert planted or fault is None, f"{schedule}: {fault}"

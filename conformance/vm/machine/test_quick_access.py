"""Loads and stores in machine code do what NumPy's do: same memory, counters and findings in random programs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from random import Random
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from llvmlite import ir

from backends.vm.bind import lanes
from backends.vm.faults import Fault, Findings
from backends.vm.isa import warp_mma
from backends.vm.load import LoadedModule, load
from backends.vm.machine import code, quick_access
from backends.vm.machine.machine import Machine
from backends.vm.machine.quick_access import QuickAccess
from backends.vm.machine.warp import Warp
from backends.vm.memory import compiled_access, global_races
from backends.vm.memory.access_code import NO
from backends.vm.ptx.parser import parse
from conformance.vm.kernel import Kernel, init, wait

_TYPES = {"u8": 1, "s8": 1, "u16": 2, "s16": 2, "b32": 4, "s32": 4, "u64": 8, "b64": 8}
_SPACES = {"shared": "%r1", "global": "%rd2", "": "%rd3"}
_FLAGS = ("st.release.gpu.global.u32 [%flag], 1;", "ld.acquire.gpu.global.u32 %r2, [%flag];")
_ACCESSES = 30
_PROGRAMS = range(14)


def _kernel(seed: int, mark: str) -> Kernel:
    """Warps that load and store at random, mostly ordered and in bounds, between barriers. `mark`: a comment."""
    draw = Random(seed)
    threads = 64 - draw.choice([0, 19])
    lines = [".shared .align 16 .b8 s[4096];", "mov.u32 %r0, s; cvta.shared.u64 %rd1, s;", "mul.lo.u32 %r9, %tx, 77;"]
    lines += [f"xor.b32 %r{10 + i}, %r9, {i}; mul.wide.u32 %rd{8 + i}, %r9, {3 + i};" for i in range(4)]
    lines += [f"and.b32 %r2, %tx, {mask}; setp.ne.u32 %p{i}, %r2, 0;" for i, mask in enumerate((1, 24, 7))]
    for _ in range(_ACCESSES):
        if draw.random() < 0.35:
            lines.append(draw.choice(["bar.sync 0;", "bar.sync 0;", "bar.warp.sync -1;"]))
        if draw.random() < 0.2:
            lines.append(draw.choice(["", "@%p0 ", "@!%p1 "]) + draw.choice(_FLAGS))
        if threads == 64 and draw.random() < 0.15:
            lines.append(_rows_of_matrices(draw))
            continue
        kind, space = draw.choice(list(_TYPES)), draw.choice(list(_SPACES))
        count = draw.choice([1, 1, 2, 4]) if _TYPES[kind] < 8 else draw.choice([1, 2])
        size = count * _TYPES[kind]
        stride = draw.choice([size] * 8 + [0, 2 * size, 4 * size])
        offset = size * draw.randrange(8) + (draw.random() < 0.02) + (5000 if draw.random() < 0.01 else 0)
        lines += [f"mul.lo.u32 %r1, %tx, {stride}; cvt.u64.u32 %rd2, %r1; add.u32 %r1, %r1, %r0;",
                  "add.u64 %rd3, %rd2, %rd1; add.u64 %rd2, %rd2, %x;"]  # fmt: skip
        names = [f"%rd{8 + i}" if _TYPES[kind] == 8 else f"%r{10 + i}" for i in range(count)]
        vector = f".v{count}" if count > 1 else ""
        if draw.random() < 0.2 and _TYPES[kind] == (4 if space == "shared" else 8):
            # A load may overwrite its own address register.
            names[0] = _SPACES[space]
        registers = f"{{{', '.join(names)}}}" if count > 1 else names[0]
        place = f"[{_SPACES[space]} + {offset}]"
        guard = draw.choice(["", "", "", "@%p0 ", "@!%p1 ", "@%p2 "])
        spelt = f"{'.' if space else ''}{space}{vector}.{kind}"
        operands = f"ld{spelt} {registers}, {place};" if draw.random() < 0.5 else f"st{spelt} {place}, {registers};"
        lines.append(guard + operands)
    lines.append(
        "mul.wide.u32 %rd2, %tx, 16; mov.u32 %r3, %cta; mul.wide.u32 %rd4, %r3, 1024; add.u64 %rd2, %rd2, %rd4;"
    )
    lines.append("add.u64 %rd2, %rd2, %y; st.global.v4.b32 [%rd2], {%r10, %r11, %r12, %r13}; ret;")
    buffers = {"x": np.zeros(4096, np.uint8), "y": np.zeros(512, np.uint32), "flag": np.zeros(1, np.uint32)}
    return Kernel("\n".join([*lines, f"// {mark}"]), buffers, grid=(2, 1, 1), block=(threads, 1, 1))


def _rows_of_matrices(draw: Random) -> str:
    """An ldmatrix with rows in order, or all in one place, and addresses in either space."""
    count, turned, stride = draw.choice([1, 2, 4]), draw.choice(["", ".trans"]), draw.choice([16, 16, 16, 32, 0])
    spelt, base = draw.choice([(".shared", "%r1"), ("", "%rd3")])
    registers = ", ".join(f"%r{10 + i}" for i in range(count))
    begin = f"mul.lo.u32 %r1, %tx, {stride}; cvt.u64.u32 %rd3, %r1; add.u32 %r1, %r1, %r0; add.u64 %rd3, %rd3, %rd1;"
    offset = 16 * draw.randrange(8) + (4 if draw.random() < 0.05 else 0)
    met = draw.choice(["", "bar.warp.sync -1; "])
    return f"{begin} {met}ldmatrix.sync.aligned.m8n8.x{count}{turned}{spelt}.b16 {{{registers}}}, [{base} + {offset}];"


def _outcome(kernel: Kernel) -> tuple[object, ...]:
    """Everything observable of a run that continues after findings where it can."""
    machine = Machine("random:1")
    machine.findings = found = Findings()
    memory, ended = {}, ""
    try:
        memory = {name: data.tobytes() for name, data in kernel.launch(machine).items()}
    except Fault as fault:
        ended = str(fault)
    told = [(str(one), one.lane, one.address, one.times) for one in found.by_site.values()]
    return memory, ended, told, dict(machine.counters)


def _answers(patch: pytest.MonkeyPatch) -> list[int]:
    """Collects the answers of the machine code from now on, and uses it from the first access."""
    answers = list[int]()
    perform: Callable[[QuickAccess, Any], int] = QuickAccess.perform

    def noted(self: QuickAccess, warp: Any) -> int:
        answers.append(perform(self, warp))
        return answers[-1]

    patch.setattr(quick_access, "WORTH", 0)
    patch.setattr(QuickAccess, "perform", noted)
    return answers


def _both(seed: int, mark: str = "") -> list[int]:
    """Runs a program both ways and compares. Returns the answers of the machine code. Bound code is cached by text."""
    return _compared(lambda: _kernel(seed, mark), f"program {seed}")


def _compared(make: Callable[[], Kernel], which: str) -> list[int]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(QuickAccess, "perform", lambda self, warp: NO)
        plain = _outcome(make())
    with pytest.MonkeyPatch.context() as patch:
        answers = _answers(patch)
        quick = _outcome(make())
    for name, wanted, seen in zip(("memory", "the fault", "findings", "counters"), plain, quick, strict=True):
        assert seen == wanted, f"{which}: {name} with machine code: {seen}\nwithout: {wanted}"
    return answers


def test_machine_code_does_as_numpy_does() -> None:
    """Same memory, counters and findings. The programs reach both what machine code does and what it refuses."""
    answers = [answer for seed in _PROGRAMS for answer in _both(seed)]
    done = [answer for answer in answers if answer != NO]
    assert 400 < len(done) < len(answers), f"{len(done)} of {len(answers)} accesses by machine code"
    for bit, what in ((compiled_access.UNDEFINED, "undefined byte"), (compiled_access.CONFLICT, "bank conflict")):
        assert any(answer & bit for answer in done), f"no program has met an {what}"


# Accesses inside runs of machine code.


def _both_in_runs(seed: int, often: int = 1) -> int:
    """Runs a program with NumPy, and again in runs of machine code once a block has executed `often` times. Returns how
    many accesses still went through Python."""
    load.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(QuickAccess, "perform", lambda self, warp: NO)
        plain = _outcome(_kernel(seed, "runs"))
    load.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        answers = _answers(patch)
        patch.setattr(code, "OFTEN", often)
        quick = _outcome(_kernel(seed, "runs"))
    load.cache_clear()
    for name, wanted, seen in zip(("memory", "the fault", "findings", "counters"), plain, quick, strict=True):
        assert seen == wanted, f"program {seed}: {name} in runs: {seen}\nwithout: {wanted}"
    return len(answers)


def test_accesses_in_runs_do_as_numpy_does() -> None:
    never = sum(_both_in_runs(seed, often=1000) for seed in _PROGRAMS)
    asked = sum(map(_both_in_runs, _PROGRAMS))
    assert asked < 0.9 * never, f"{asked} accesses of {never} were not done in a run"


@pytest.mark.parametrize(
    ("where", "name"),
    [(lanes, "_tell"), (lanes, "_look_at"), (Warp, "count_served"), (global_races, "places_change")],
)
def test_runs_that_forget_something_are_found_out(monkeypatch: pytest.MonkeyPatch, where: object, name: str) -> None:
    monkeypatch.setattr(where, name, _nothing)
    with pytest.raises(AssertionError, match="in runs"):
        list(map(_both_in_runs, range(3 * len(_PROGRAMS))))


_RELAY = """.visible .entry {name}(.param .u64 p) {{ .reg .b64 %x; .reg .b32 %r<9>; .reg .pred %p, %q;
ld.param.u64 %x, [p]; mov.u32 %r1, %tid.x; setp.lt.u32 %q, %r1, 32; mov.u32 %r0, 0; {wait}
LOOP: {body} add.u32 %r0, %r0, 1; setp.lt.u32 %p, %r0, 40; @%p bra LOOP; ret; }}
"""


def _relay(wait: str) -> str:
    """The findings when the second of two overlapping launches, after `wait`, reads what the first stores."""
    first = _RELAY.format(name="first", wait="", body="st.global.u32 [%x], 7;")
    second = _RELAY.format(name="second", wait=wait, body="ld.global.u32 %r2, [%x];")
    module = LoadedModule(parse(f".version 8.8\n.target sm_90a\n.address_size 64\n{first}{second}"))
    machine = Machine("eager")
    machine.findings = found = Findings()
    x = machine.memory.add("x", np.zeros(4, np.uint32).view(np.uint8))
    for name, threads in (("first", 32), ("second", 64)):
        params = [x.base.to_bytes(8, "little")]
        machine.launch(module.entry(name), (1, 1, 1), (threads, 1, 1), params, dependent=name == "second")
    return " ".join(str(one) for one in found.by_site.values())


def test_a_place_that_one_warp_has_waited_for_is_not_everybodys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first warp waits and reads until its loads are in runs; the second has not waited."""
    monkeypatch.setattr(quick_access, "WORTH", 0)
    assert not _relay("griddepcontrol.wait;")
    alone = "@!%q bra LOOP; griddepcontrol.wait;"
    assert "dependent-launch-not-awaited" in _relay(alone)
    monkeypatch.setattr(global_races.GlobalRaces, "lasting", lambda *_: 0)
    assert not _relay(alone), "who takes a place for everybody's hides this, so that the test would notice"


def _never(*arguments: object) -> ir.Constant:
    return ir.Constant(ir.IntType(1), 0)


def _nothing(*arguments: object) -> None:
    pass


@pytest.mark.parametrize(
    ("method", "broken"),
    [("_late", _never), ("_loose", _never), ("_look_for_undefined", _nothing), ("_count_banks", _nothing)],
)
def test_machine_code_that_does_not_look_is_found_out(
    monkeypatch: pytest.MonkeyPatch, method: str, broken: object
) -> None:
    """With any one check removed, some program's result differs."""
    monkeypatch.setattr(compiled_access._Access, method, broken)  # pyright: ignore[reportPrivateUsage]
    codes = quick_access._codes  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(quick_access, "_codes", cache(codes.__wrapped__))
    compiled_access.performer.cache_clear()
    try:
        with pytest.raises(AssertionError, match="with machine code"):
            list(map(_both, _PROGRAMS, [method] * len(_PROGRAMS)))
    finally:
        compiled_access.performer.cache_clear()


def _told() -> Kernel:
    """One lane acquires what another warp has stored, and all lanes read it."""
    body = """mul.wide.u32 %rd1, %lane, 4; add.u64 %rd1, %rd1, %x; setp.ne.u32 %p0, %lane, 0; setp.ne.u32 %p2, %warp, 0;
    @%p2 bra READER; st.global.u32 [%rd1], %lane; bar.warp.sync -1; @%p0 bra END; st.release.gpu.global.u32 [%flag], 1;
    bra END;
    READER: @%p0 bra TOLD; POLL: ld.acquire.gpu.global.u32 %r1, [%flag]; setp.eq.u32 %p1, %r1, 0; @%p1 bra POLL;
    TOLD: ld.global.u32 %r2, [%rd1];
    END: ret;"""
    return Kernel(body, {"x": np.zeros(32, np.uint32), "flag": np.zeros(1, np.uint32)}, block=(64, 1, 1))


def test_machine_code_where_a_lane_knows_less_than_its_warp_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert NO in _compared(_told, "one lane is told"), "machine code has read what the lane does not know"
    monkeypatch.setattr(Warp, "knows_unevenly", lambda self: False)
    with pytest.raises(AssertionError, match="with machine code"):
        _compared(_told, "one lane is told")


def _swapped(space: str, told: str) -> Kernel:
    """Eight times, a warp stores; before the last time, a swap by another warp has failed there. `told`: how it says
    so, in a flag that is polled."""
    release, acquire = ("release", "acquire") if told == "ordered" else ("relaxed", "relaxed")
    place = "%x" if space == "global" else "s"
    body = f""".shared .align 4 .b8 s[128]; mov.u32 %r0, s; mad.lo.u32 %r0, %lane, 4, %r0; mul.wide.u32 %rd1, %lane, 4;
    add.u64 %rd1, %rd1, %x; setp.ne.u32 %p0, %lane, 0; setp.ne.u32 %p2, %warp, 0; mov.u32 %r1, 0;
    LOOP: setp.eq.u32 %p1, %r1, 7; @%p2 bra STORER; @!%p1 bra NEXT; @%p0 bra NEXT;
    atom.{space}.cas.b32 %r3, [{place} + 12], 99, 0; st.{release}.gpu.global.u32 [%flag], 1; bra NEXT;
    STORER: @!%p1 bra STORE;
    POLL: ld.{acquire}.gpu.global.u32 %r2, [%flag]; setp.eq.u32 %p3, %r2, 0; @%p3 bra POLL;
    STORE: st.{space}.u32 [{"%rd1" if space == "global" else "%r0"}], %r1;
    NEXT: bar.warp.sync -1; bar.sync 0; add.u32 %r1, %r1, 1; setp.lt.u32 %p3, %r1, 8; @%p3 bra LOOP; ret;"""
    return Kernel(body, {"x": np.zeros(32, np.uint32), "flag": np.zeros(1, np.uint32)}, block=(64, 1, 1))


@pytest.mark.parametrize("often", [1, 1000], ids=["in runs", "alone"])
@pytest.mark.parametrize(
    ("space", "where", "name", "broken"),
    [
        ("global", compiled_access._Access, "_look_at_comparer", _nothing),  # pyright: ignore[reportPrivateUsage]
        ("shared", compiled_access._Access, "_compared", _never),  # pyright: ignore[reportPrivateUsage]
    ],
)
def test_machine_code_knows_where_a_swap_has_failed(
    monkeypatch: pytest.MonkeyPatch, space: str, where: object, name: str, broken: object, often: int
) -> None:
    monkeypatch.setattr(quick_access, "WORTH", 0)
    monkeypatch.setattr(code, "OFTEN", often)
    load.cache_clear()
    told = _outcome(_swapped(space, "relaxed"))[2]
    assert "is overwritten after " in str(told), told
    assert not _outcome(_swapped(space, "ordered"))[2]
    monkeypatch.setattr(where, name, broken)
    codes = quick_access._codes  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(quick_access, "_codes", cache(codes.__wrapped__))
    compiled_access.performer.cache_clear()
    load.cache_clear()
    try:
        assert not _outcome(_swapped(space, "relaxed"))[2], "who does not look finds nothing, so the test would notice"
    finally:
        compiled_access.performer.cache_clear()
        load.cache_clear()


def test_runs_that_keep_a_place_without_swaps_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quick_access, "WORTH", 0)
    monkeypatch.setattr(code, "OFTEN", 1)
    monkeypatch.setattr(global_races, "places_change", _nothing)
    load.cache_clear()
    assert not _outcome(_swapped("global", "relaxed"))[2], "the run has a place of before the swap"


def _told_in_shared(last: str) -> Kernel:
    """Eight times, one lane waits for what another warp has stored, and all lanes read it; `last`: where the lanes go
    ahead of the last read."""
    body = f""".shared .align 4 .b8 s[128]; mov.u32 %r0, s; mad.lo.u32 %r0, %lane, 4, %r0; setp.ne.u32 %p0, %lane, 0;
    .shared .align 8 .b64 mbar; {init("mbar")} setp.ne.u32 %p2, %warp, 0; mov.u32 %r1, 0;
    LOOP: and.b32 %r2, %r1, 1; setp.eq.u32 %p1, %r1, 7; @%p2 bra READER;
    st.shared.u32 [%r0], %lane; bar.warp.sync -1; @!%p0 mbarrier.arrive.shared::cta.b64 _, [mbar]; bra NEXT;
    READER: @%p0 bra TOLD; {wait("mbar", "%r2")}
    TOLD: @%p1 bra {last}; MEET: bar.warp.sync -1;
    READ: xor.b32 %r4, %lane, %r1; ld.shared.u32 %r3, [%r0];
    NEXT: bar.sync 0; add.u32 %r1, %r1, 1; setp.lt.u32 %p3, %r1, 8; @%p3 bra LOOP; ret;"""
    return Kernel(body, {"x": np.zeros(32, np.uint32), "flag": np.zeros(1, np.uint32)}, block=(64, 1, 1))


def _given_back(last: str) -> Kernel:
    """Eight times, all lanes read, one lane arrives, and another warp overwrites; `last`: where the lanes go behind the
    last read."""
    body = f""".shared .align 4 .b8 s[128]; mov.u32 %r0, s; mad.lo.u32 %r0, %lane, 4, %r0; setp.ne.u32 %p0, %lane, 0;
    .shared .align 8 .b64 mbar; setp.ne.u32 %p2, %warp, 0; mov.u32 %r1, 0; @!%p2 st.shared.u32 [%r0], 9;
    {init("mbar")}
    LOOP: and.b32 %r2, %r1, 1; setp.eq.u32 %p1, %r1, 7; @%p2 bra WRITER;
    ld.shared.u32 %r3, [%r0]; @%p1 bra {last}; MEET: bar.warp.sync -1;
    GIVE: @!%p0 mbarrier.arrive.shared::cta.b64 _, [mbar]; bra NEXT;
    WRITER: {wait("mbar", "%r2")} st.shared.u32 [%r0], %r1;
    NEXT: bar.sync 0; add.u32 %r1, %r1, 1; setp.lt.u32 %p3, %r1, 8; @%p3 bra LOOP; ret;"""
    return Kernel(body, {"x": np.zeros(32, np.uint32), "flag": np.zeros(1, np.uint32)}, block=(64, 1, 1))


@pytest.mark.parametrize(("module", "name"), [(quick_access, "WORTH"), (code, "OFTEN")])
@pytest.mark.parametrize(
    ("kernel", "past_the_meeting", "words"),
    [(_told_in_shared, "READ", "lanes-unordered"), (_given_back, "GIVE", "which the lane has not met")],
)
def test_machine_code_of_shared_memory_knows_lanes_that_have_not_met(
    monkeypatch: pytest.MonkeyPatch,
    module: ModuleType,
    name: str,
    kernel: Callable[[str], Kernel],
    past_the_meeting: str,
    words: str,
) -> None:
    monkeypatch.setattr(module, name, 1)
    assert not _outcome(kernel("MEET"))[2], "the lanes have met"
    assert words in str(_outcome(kernel(past_the_meeting))[2])


def test_rows_of_matrices_in_wrong_places_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """If ldmatrix takes its halves from the wrong lanes, some program's result differs."""
    known = warp_mma._halves_in_scratch  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(warp_mma, "_halves_in_scratch", lambda count, turned: known(count, not turned))
    with pytest.raises(AssertionError, match="with machine code"):
        list(map(_both, _PROGRAMS, ["halves"] * len(_PROGRAMS)))


def _rows_of(first: int) -> Kernel:
    """Each lane stores a row of 16 bytes, which an ldmatrix loads: the bits of `first`, `first` + 1, and so on."""
    body = f""".shared .align 16 .b8 s[512]; mov.u32 %r0, s; mad.lo.u32 %r0, %tx, 16, %r0; add.u32 %r1, %tx, {first};
    st.shared.v4.b32 [%r0], {{%r1, %r1, %r1, %r1}}; bar.warp.sync -1;
    ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{%r2, %r3, %r4, %r5}}, [%r0];
    mul.wide.u32 %rd0, %tx, 16; add.u64 %rd0, %rd0, %out; st.global.v4.b32 [%rd0], {{%r2, %r3, %r4, %r5}}; ret;"""
    return Kernel(body, {"out": np.zeros((32, 4), np.uint32)})


def test_machines_of_two_threads_do_not_mix_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python may switch to another thread's machine after any machine code, here after that of an ldmatrix."""
    mine, other = _rows_of(100), _rows_of(9000)
    wanted, perform, answers = mine.run()[0]["out"], QuickAccess.perform, list[int]()

    def interrupted(self: QuickAccess, warp: Any) -> int:
        answers.append(perform(self, warp))
        monkeypatch.setattr(QuickAccess, "perform", perform)
        other.run()
        monkeypatch.setattr(QuickAccess, "perform", interrupted)
        return answers[-1]

    monkeypatch.setattr(quick_access, "WORTH", 0)
    monkeypatch.setattr(QuickAccess, "perform", interrupted)
    found = mine.run()[0]["out"]
    assert NO not in answers, f"the answers are {answers}; all accesses go by machine code"
    assert found.tolist() == wanted.tolist(), f"rows of the other machine: {found.tolist()}, not {wanted.tolist()}"

"""Arguments of survivors.yaml, tested: the same bits, an unused mbarrier, parts that a cache does not have."""

from __future__ import annotations

import re
from contextlib import closing
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import pytest

from backends.cutedsl.attention import FmhaSizes
from backends.cutedsl.device import H200_SM_COUNT, WARPGROUP
from backends.cutedsl.sm90_fmha.plan import LONE_KEYS, SHORT_KEYS, split_count
from backends.vm.machine.cta import Cta
from conformance.kernels.mutants import command
from conformance.kernels.mutants.__main__ import main
from conformance.kernels.mutants.campaign import Built, Outcome, Record, Subject, built_of, collected, program_of
from conformance.kernels.mutants.claims import changed, claimed, held
from conformance.kernels.mutants.mutant import instructions, mutants
from conformance.kernels.mutants.table import RECORD, Reason, reasons, survivors
from megamoe.contract import RunOptions
from megamoe.spec.load import load_specs

MOVED_LEFT = "Bit 0 of a word that was moved to the left."
"""The reason that a test below checks."""


SAMPLES = 15


@cache
def _claimed() -> list[Outcome]:
    """Not while tests are collected: each worker would read the whole record."""
    return claimed(Record(RECORD).results, reasons())


@pytest.mark.parametrize("sample", range(SAMPLES))
def test_what_is_said_to_leave_the_same_bits_leaves_them(sample: int) -> None:
    """A sample, across all programs; `nox -s mutants -- --argued` runs all."""
    one = _claimed()[sample * len(_claimed()) // SAMPLES]
    (claim,) = held([one])
    if claim.changed is None:
        pytest.skip(f"{one.program} is built no more; the record is of other kernels")
    assert not claim.changed, claim.told


def test_a_word_whose_bit_0_is_kept_was_moved_left() -> None:
    """A reason of survivors.yaml: a mask with bit 0 for one without. The instruction before it clears that bit."""
    kept = [one for one, why in survivors(Record(RECORD).results, reasons()) if why and why.why.startswith(MOVED_LEFT)]
    specs = load_specs(None)
    for one in kept:
        if (built := built_of(specs, one.program)) is None:
            continue
        register, before = re.escape(one.before.split()[1]), built.program.ptx.splitlines()[one.line - 2]
        moved = re.fullmatch(rf"\s*shl\.b32 {register} %\w+, [1-9]\d*;", before)
        assert moved, f"{one.id} `{one.before}` comes after `{before.strip()}`, which does not move to the left"
    assert kept, f"no survivor has the reason `{MOVED_LEFT}`"


SEEN_BY_CHANCE = {
    "fmha:hd=256,t=20,s_k=140,causal=true,window=2048": ("drop", "bar.sync 0;", -1),
    "fmha:hd=64,t=1,s_k=201": ("immediate", "selp.f32 %shift, 0f00000000, %shift, %unseen;", 0),
}
"""By case: a mutant of sm_90a that an audit drew and the record lacks (kind, text, which), with a reason here."""


@pytest.mark.parametrize("case_id", SEEN_BY_CHANCE)
def test_mutants_that_the_record_lacks_leave_the_same_bits(case_id: str) -> None:
    spec = load_specs(None)["fmha"]
    program = program_of("ptx", "sm_90a", case := spec.parse_case(case_id))
    assert program is not None, f"ptx has no program of {case_id}"
    kind, text, which = SEEN_BY_CHANCE[case_id]
    mutant = [one for one in mutants(program) if (one.kind, one.before) == (kind, text)][which]
    found = changed(Subject("ptx", "sm_90a", "fmha", [Built(spec, case, program)]), mutant)
    assert not found, f"{mutant.id} `{text}` changes {found} of {case_id}"


def test_a_wrong_argument_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A planted fault: a mutant that a metric killed, with a reason that says it leaves the same bits."""
    killed = [one for one in Record(RECORD).results if one.check.startswith("metric:") and one.schedule == "eager"]
    specs = load_specs(None)
    one = next(one for one in killed if one.case in one.program and built_of(specs, one.program) is not None)
    with closing(Record(tmp_path / "mine.jsonl")) as record:
        record.append(replace(one, check="", case="", schedule="", sentence=""))
    monkeypatch.setattr(f"{command.__name__}.reasons", lambda: [Reason("equivalent", "it is said", same_bits=True)])
    assert main(["--argued", "--record", str(record.path)]) == 1, f"{one.id} was killed by {one.check}"
    assert f"{one.id} `{one.before}` -> `{one.after}` leaves other bits in " in (told := capsys.readouterr().out), told
    assert told.endswith("0 of 1 mutant leave the same bits, 1 others; programs of 0 are built no more\n"), told
    monkeypatch.setattr(f"{command.__name__}.reasons", list)
    assert main(["--argued", "--record", str(record.path)]) == 2, "no reason says that anything leaves the same bits"


@pytest.mark.parametrize(("hd", "mbarriers"), [(256, 2), (512, 2), (128, 0)])
def test_one_softmax_warpgroup_gives_way_to_nobody(hd: int, mbarriers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The two mbarriers of the chain are idle at hd 256 and 512, where one warpgroup has all exponentials."""
    ended, check_exit = list[Cta](), Cta.check_exit
    monkeypatch.setattr(Cta, "check_exit", lambda cta: (ended.append(cta), check_exit(cta)))
    case = load_specs(None)["fmha"].parse_case(f"fmha:hd={hd},t=1,s_k=512")
    program = program_of("cutedsl", "sm_100a", case)
    assert program is not None, f"cutedsl has no program of {case.id}"
    collected(Built(load_specs(None)["fmha"], case, program), program, RunOptions(schedule="eager"))
    assert ended, f"no CTA of {case.id} has ended"
    for cta in ended:
        idle = [one.offset for one in cta.mbarriers.values() if one.unused and one.expected == WARPGROUP]
        assert len(idle) == mbarriers, f"{len(idle)} mbarriers of a warpgroup are not used: {idle}"


def test_a_lone_warpgroup_has_16_parts_at_most() -> None:
    parts = SHORT_KEYS // LONE_KEYS
    assert parts <= 16, f"a short cache has {parts} parts, and survivors.yaml says that none has part 26"


def test_keys_are_split_into_a_part_an_sm_at_most() -> None:
    sizes = [
        FmhaSizes(hd, t, s_k, t, batch)
        for hd, t, batch in product((64, 128, 256), (1, 16, 17, 129), (1, 2))
        for s_k in (700, 2049, 8448, 8449, 20527, 65536)
    ]
    most, of = max((split_count(one, ragged), one.s_k) for one in sizes for ragged in (False, True))
    assert most <= H200_SM_COUNT, f"{of} keys are split into {most} parts, and survivors.yaml says {H200_SM_COUNT}"


def test_the_keys_of_two_row_tiles_are_split_into_66_parts_at_most() -> None:
    sizes = [
        FmhaSizes(hd, t, s_k, t, batch)
        for hd, t, batch in product((128, 256), (129, 257, 1000), (1, 2, 7))
        for s_k in (2049, 8321, 8448, 16896, 20527, 65536)
    ]
    most, of = max((split_count(one), one.s_k) for one in sizes)
    assert most <= 66, f"{of} keys are split into {most} parts, and survivors.yaml says 66"


def _after(ptx: str, line: int) -> list[str]:
    """Instructions of the kernel after a line that touch global memory or branch back, as they are written."""
    code = instructions(ptx)
    entry = next(one.entry for one in code if one.line == line)
    behind = [one for one in code if one.entry == entry and one.line > line]
    labels = re.findall(r"^\s*([$\w]+):", "\n".join(ptx.splitlines()[line:]), re.MULTILINE)
    touches = re.compile(r"(ld|st|atom|red|multimem)\.(?!param|shared)|cp\.|prefetch|griddepcontrol|fence|membar")
    back = [one for one in behind if one.opcode.startswith("bra") and one.operands[0] not in labels]
    return [one.spelled() for one in (*(each for each in behind if touches.match(each.opcode)), *back)]


@pytest.mark.parametrize(
    "axes",
    [
        "hidden=256,intermediate=128,num_experts=4,tokens=20,topk=2,stage=l2",
        "hidden=128,intermediate=128,num_experts=1,tokens=1",
        "hidden=128,intermediate=128,num_experts=2,tokens=129,topk=2",
    ],
)
def test_nothing_follows_a_last_wait_for_copies(axes: str) -> None:
    """And a planted fault: many instructions follow the first wait of that kernel."""
    spec = load_specs(None)["nvfp4_moe"]
    case = spec.parse_case(f"nvfp4_moe:{axes}")
    program = program_of("cutedsl", "sm_100a", case)
    assert program is not None, f"cutedsl has no program of {case.id}"
    waits = [one for one in instructions(program.ptx) if one.opcode.startswith("cp.async.bulk.wait_group")]
    last = [one for one in waits if one.opcode == "cp.async.bulk.wait_group"]
    for one in last:
        assert not (found := _after(program.ptx, one.line)), f"line {one.line}: behind its last wait it does {found}"
    assert last, "no wait for writes is left; the reason of survivors.yaml speaks of nothing"
    assert _after(program.ptx, waits[0].line), "nothing follows the first wait of the kernel, which has a loop"

"""Arguments of survivors.yaml, tested: the same bits, what an instruction passes, parts that a cache does not have.

A reason names its test as `law`, unless ptxas, the same bits or the machine's run of the mutant are its check.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path

import pytest

from backends.cutedsl.attention import FmhaSizes
from backends.cutedsl.device import H200_SM_COUNT, WARPGROUP
from backends.cutedsl.sm90_fmha.plan import LONE_KEYS, SHORT_KEYS, split_count
from backends.vm.machine.cta import Cta
from conformance import ROOT
from conformance.kernels.mutants import command
from conformance.kernels.mutants.__main__ import main
from conformance.kernels.mutants.campaign import Built, Outcome, Record, Subject, built_of, collected, program_of
from conformance.kernels.mutants.claims import changed, claimed, held
from conformance.kernels.mutants.mutant import Instruction, instructions, mutants
from conformance.kernels.mutants.table import RECORD, Reason, checked_by, excuses, reasons, survivors
from megamoe.contract import Program, RunOptions, ScalarArg, TensorMapArg
from megamoe.spec.load import load_specs


@cache
def _survivors() -> list[tuple[Outcome, Reason]]:
    """Those that are equivalent, each with its reason."""
    return [(one, why) for one, why in survivors(Record(RECORD).results, reasons()) if excuses(why)]


def _of(law: str) -> list[Outcome]:
    """The survivors that a law excuses. AssertionError if there is none."""
    found = [one for one, why in _survivors() if why.law == law and not one.same_code]
    assert found, f"no survivor of the record has the law {law}; survivors.yaml names another or none"
    return found


def test_every_survivor_that_is_equivalent_has_a_check() -> None:
    unchecked = {why.why: one.id for one, why in _survivors() if not checked_by(one, why)}
    assert not unchecked, f"nothing checks these reasons, for example of these mutants: {unchecked}"


def test_a_law_is_a_test() -> None:
    for law in {why.law for why in reasons() if why.law}:
        place, _, name = law.rpartition("::")
        text = Path(ROOT / place if place else __file__).read_text("utf-8")
        assert f"\ndef {name}(" in text, f"survivors.yaml names {law}, and {place or __file__} does not have it"


def test_a_reason_without_a_check_is_seen() -> None:
    """Planted faults: an output that nobody reads is no order that the machine would report."""
    one, _ = _survivors()[0]
    one = replace(one, same_code=False, kind="immediate")
    assert not checked_by(one, Reason("equivalent", "it is said")), "a reason alone checks nothing"
    assert not checked_by(one, Reason("equivalent", "it is said", reached=True)), "its run sees no changed constant"
    assert checked_by(replace(one, kind="drop"), Reason("equivalent", "it is said", reached=True)) == "its run"


_GROUPS = re.compile(r"(?P<head>.*wait_group)(?P<read>\.read)?(?P<tail>\S*) (?P<pending>\d+);")
_PROXY = re.compile(r"fence\.proxy\.async(\.(global|shared::cta|shared::cluster))?;")


def _is_wider(before: str, after: str) -> bool:
    """Whether `after` orders all that `before` does: no more groups may be pending and their reads are not enough, or
    all state spaces are fenced (PTX ISA 9.7.9.27.2, 9.7.13.4)."""
    this, other = _GROUPS.fullmatch(before), _GROUPS.fullmatch(after)
    if this and other:
        fewer = int(other["pending"]) <= int(this["pending"])
        return fewer and (other["head"], other["tail"]) == (this["head"], this["tail"]) and not (
            other["read"] and not this["read"]
        )  # fmt: skip
    return _PROXY.fullmatch(before) is not None and after == "fence.proxy.async;"


def test_a_wider_order_has_the_narrower_one() -> None:
    narrower = {one.id: (one.before, one.after) for one in _of("test_a_wider_order_has_the_narrower_one")
                if not _is_wider(one.before, one.after)}  # fmt: skip
    assert not narrower, f"these order less, or something else: {narrower}"
    assert not _is_wider("wgmma.wait_group.sync.aligned 0;", "wgmma.wait_group.sync.aligned 1;"), "a planted fault"
    assert not _is_wider("cp.async.bulk.wait_group 0;", "cp.async.bulk.wait_group.read 0;"), "a planted fault"
    assert not _is_wider("fence.proxy.async;", "fence.proxy.async.global;"), "a planted fault"


def _opcode(text: str) -> str:
    found = re.match(r"(?:@!?[%\w$]+ )?([a-z][\w.:]*)", text)
    assert found, f"`{text}` begins with no instruction"
    return found[1]


def _passed(one: Outcome) -> tuple[str, bool]:
    """The opcode of the access that a moved instruction has passed, and whether it now comes after that access."""
    pair = one.after.removeprefix("(nothing) ... ").split("; ")
    first = _opcode(pair[0])
    return (_opcode(pair[1]), False) if first == _opcode(one.before) else (first, True)


MAY_PASS: dict[str, tuple[str, tuple[bool, ...]]] = {
    r"mbarrier\.arrive\.expect_tx": (r"cp\.async\.bulk\.(tensor|shared)", (True, False)),
    r"mbarrier\.arrive": (r"(ld|st)\.|stmatrix\.|tcgen05\.st\.|wgmma\.mma_async\.", (True,)),
    r"fence\.proxy\.async": (r"mbarrier\.arrive\.expect_tx\.", (True,)),
    r"cp\.async\.bulk\.wait_group": (r"tcgen05\.ld\.", (False,)),
}
"""By moved instruction: what it passes, and whether it may come later than that or earlier. None of these waits for
anyone."""


def test_what_a_moved_instruction_passes() -> None:
    for one in _of("test_what_a_moved_instruction_passes"):
        opcode, is_later = _passed(one)
        passes, orders = next(allowed for own, allowed in MAY_PASS.items() if re.match(own, _opcode(one.before)))
        assert re.match(passes, opcode), f"{one.id} passes {opcode}"
        assert is_later in orders, f"{one.id} comes {'later' if is_later else 'earlier'} than {opcode}"


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


_LABEL = re.compile(r"^\s*[$\w]+:\s*$")


@dataclass(frozen=True, slots=True)
class _Text:
    """The instructions of a program, and where basic blocks begin."""

    code: Sequence[Instruction]
    heads: frozenset[int]

    @classmethod
    def of(cls, ptx: str) -> _Text:
        """Blocks begin at labels and behind branches."""
        code = instructions(ptx)
        labels = [at for at, text in enumerate(ptx.splitlines(), 1) if _LABEL.match(text)]
        heads = {next((place for place, one in enumerate(code) if one.line > line), 0) for line in labels}
        return cls(code, frozenset(heads | {at + 1 for at, one in enumerate(code) if one.opcode.startswith("bra")}))

    def givers(self, register: str, at: int) -> list[int]:
        """Places of the instructions that may have given the value of `register` before instruction `at`: the last one
        of the block, or all of the kernel."""
        places = [place for place, one in enumerate(self.code) if one.operands and one.operands[0] == register]
        begin = max(head for head in self.heads | {0} if head <= at)
        if inside := [place for place in places if begin <= place < at and not self.code[place].guard]:
            return [place for place in places if inside[-1] <= place < at]
        return [place for place in places if self.code[place].entry == self.code[at].entry]

    def negative(self, register: str, at: int) -> str:
        """An instruction that may give `register` a negative value before instruction `at`; "" if there is none.

        Exponentials are not negative, nor are sums and products of what is not.
        """
        todo = self.givers(register, at)
        known = set(todo)
        while todo:
            one = self.code[place := todo.pop()]
            opcode = one.opcode.partition(".")[0]
            if opcode == "ex2":
                continue
            sources = one.operands[1:3] if opcode == "selp" else one.operands[1:]
            signed = [each for each in sources if not each.startswith("%") and not re.match("0f[0-7]", each)]
            if signed or opcode not in ("add", "mul", "fma", "mov", "selp"):
                return one.spelled()
            new = {giver for each in sources if each.startswith("%") for giver in self.givers(each, place)} - known
            known |= new
            todo += new
        return ""


def test_what_is_never_negative_is_compared_with_zero() -> None:
    """And a planted fault: the exponent, which the same instructions compute, may be negative."""
    specs, texts = load_specs(None), dict[str, _Text]()
    for one in _of("test_what_is_never_negative_is_compared_with_zero"):
        if one.program not in texts and (built := built_of(specs, one.program)) is not None:
            texts[one.program] = _Text.of(built.program.ptx)
        if (text := texts.get(one.program)) is None:
            continue
        at = next(place for place, each in enumerate(text.code) if each.line == one.line)
        jump = next(each for each in reversed(text.code[:at]) if each.opcode == "bra")
        compared = text.code[text.givers(jump.guard.strip().removeprefix("@"), text.code.index(jump))[-1]]
        said = f"{one.id} comes after `{compared.spelled()}` and `{jump.spelled()}`"
        assert (compared.opcode, *compared.operands[2:]) == ("setp.geu.f32", "0f00000000"), said
        assert not (wrong := text.negative(compared.operands[1], at)), f"{said}, and `{wrong}` may be negative"
        exponent = next(each for each in reversed(text.code[:at]) if each.opcode.startswith("ex2"))
        assert text.negative(exponent.operands[1], at), f"{one.id}: no sign is found in `{exponent.spelled()}`"
    assert texts, "no program of these survivors is built any more"


def test_a_part_of_short_caches_has_two_tiles() -> None:
    """The last argument of the launch is the number of parts; a box of K has the keys of a tile."""
    for name in {one.program for one in _of("test_a_part_of_short_caches_has_two_tiles")}:
        if (built := built_of(load_specs(None), name)) is None:
            continue
        assert isinstance(built.program, Program), f"{name} has no launches"
        args = built.program.launches[0].args
        keys, parts = args[1], args[-1]
        assert isinstance(keys, TensorMapArg), f"{name}: argument 1 is {keys}, not the map of K"
        assert isinstance(parts, ScalarArg), f"{name}: the last argument is {parts}, not the number of parts"
        assert keys.dims[1] == parts.value * 2 * keys.box[1], f"{name}: {parts.value} parts, K is {keys}"


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

"""Findings about kernels on a machine, the profile that decides which of them count, and suppressions.

A `Ledger` keeps the findings of a run: one per site, however many lanes, CTAs, launches or schedules repeat it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from hashlib import sha256
from os.path import normpath
from pathlib import Path, PurePath
from typing import Any, Final, Literal, cast, get_args

from megamoe.contract.counted import counted
from megamoe.contract.known_names import nearest, nearest_of
from megamoe.contract.machine import AccessLike, FaultLike, Grade, SourceLike
from megamoe.given.entry_names import is_named, short_source_name, source_name, with_source_names

Profile = Literal["strict", "default", "lenient"]
PROFILES: Mapping[Profile, frozenset[Grade]] = {
    "strict": frozenset({"error", "portability"}),
    "default": frozenset({"error"}),
    "lenient": frozenset(),
}
"""The grades that fail a run."""
ENDS_HERE = "the launch ends here"
"""What is said of a finding after which the launch could not go on."""
MAX_TEXT = 120
"""Longest instruction text in a sentence, in characters: some instructions name 128 registers."""


def module_of(ptx: str) -> str:
    """12 hexadecimal digits that identify a module."""
    return sha256(ptx.encode()).hexdigest()[:12]


@dataclass(frozen=True, slots=True)
class SourceLine:
    """A line of a source file or of PTX. `column` 0: unknown. `function`: the inlined function, or ""."""

    file: str
    line: int
    column: int = 0
    function: str = ""

    def __str__(self) -> str:
        name = f" in {short_source_name(self.function)}" if self.function else ""
        return f"{self.file}:{self.line}{f':{self.column}' if self.column else ''}{name}"

    @classmethod
    def of(cls, places: Sequence[SourceLike]) -> tuple[SourceLine, ...]:
        """Converts a machine's source places, innermost first."""
        return tuple(cls(one.file, one.line, one.column, one.function) for one in places)


_TOOLKIT = re.compile(
    r"^/(?:usr|opt)/(?:.*/)?include/|/targets/[^/]+/include/|/include/cccl/"
    r"|/(?:site|dist)-packages/(?:nvidia|triton|cutlass|nvidia_cutlass_dsl)/"
)
"""Folders of compilers and their libraries, whose lines are inlined into the user's."""


def own_line(source: Sequence[SourceLine]) -> SourceLine | None:
    """The user's line among inlined ones, innermost first: the first in the folder of the run, which code hosts can
    show; else the first that is no toolkit's; else the first."""
    own = [one for one in source if not _TOOLKIT.search(normpath(one.file))]
    here = Path.cwd()
    near = [one for one in own if (path := Path(normpath(one.file))).is_relative_to(here) or not path.is_absolute()]
    return next(iter((*near, *own, *source)), None)


def _told(source: Sequence[SourceLine]) -> str:
    """The user's line and the innermost one; "" if none is known."""
    own = own_line(source)
    return "" if own is None else f"{own}{f' (inlines {source[0]})' if own != source[0] else ''}"


@dataclass(frozen=True, slots=True)
class CollidingAccess:
    """The access that a finding collides with: `who` did `did` (such as "wrote") at PTX `line`, 0 if unknown.

    `elsewhere`: in a race, it is of another CTA.
    """

    who: str
    did: str
    line: int
    source: tuple[SourceLine, ...] = ()
    elsewhere: bool = False

    @classmethod
    def of(cls, access: AccessLike) -> CollidingAccess:
        """Converts a machine's description of the access."""
        return cls(access.who, access.did, access.line, SourceLine.of(access.source), access.elsewhere)

    def __str__(self) -> str:
        place = f" at {_told(self.source)}" if self.source else ""
        return f"{with_source_names(self.who)} {self.did} it{place}{f', PTX line {self.line}' if self.line else ''}"


@dataclass(frozen=True, slots=True)
class KernelFinding:
    """A rule that a kernel broke at one site: where, what it collides with, which ordering is missing, how to mend it.

    `detail`: what happened, with the values of the first occurrence. `kernel`: mangled if it is C++. `source`:
    innermost first, () if nothing is known about PTX `line`. `where`: CTA and warp, or the copy. `section`: of the PTX
    ISA. `reliance`: who relies on more than the ISA promises. `ends`: the launch could not continue. `origin`: the file
    of the PTX or CUDA C++, if any. `module`: module_of its PTX. `spot`: the variable and byte at `address`. `page`: the
    file that explains the rule. `schedules`: those under which it was found. `leads_to`: rules of which violations may
    follow from this one.
    """

    rule: str
    grade: Grade
    detail: str
    kernel: str
    line: int = 0
    text: str = ""
    source: tuple[SourceLine, ...] = ()
    where: str = ""
    lane: int | None = None
    address: int | None = None
    other: CollidingAccess | None = None
    wrong: str = ""
    missing: str = ""
    mend: str = ""
    section: str = ""
    reliance: str = ""
    times: int = 1
    ends: bool = False
    origin: str = ""
    module: str = ""
    spot: str = ""
    page: str = ""
    schedules: tuple[str, ...] = ()
    leads_to: tuple[str, ...] = ()

    @classmethod
    def of(cls, fault: FaultLike, origin: str = "", module: str = "", schedule: str = "") -> KernelFinding:
        """Converts a machine's fault."""
        about = fault.about
        return cls(
            fault.rule,
            about.grade,
            fault.detail,
            fault.kernel,
            fault.line,
            fault.text,
            SourceLine.of(fault.source),
            fault.where,
            fault.lane,
            fault.address,
            None if fault.other is None else CollidingAccess.of(fault.other),
            about.wrong,
            about.missing,
            about.mend,
            about.section,
            about.reliance,
            fault.times,
            fault.ends,
            origin,
            module,
            fault.spot,
            about.page,
            (schedule,) if schedule else (),
            tuple(about.leads_to),
        )

    @property
    def site(self) -> tuple[object, ...]:
        """Identifies equal findings: the rule, the instructions of both accesses, and whether two CTAs make them.

        A PTX line identifies an instruction only within one module. Where the source is known, kernel variants compiled
        from the same lines share their findings.
        """
        accesses = {(self.line, self._home(self.source))}
        if self.other is not None:
            accesses.add((self.other.line, self._home(self.other.source)))
        return self.rule, self.origin, self.kernel, frozenset(accesses), self.other is not None and self.other.elsewhere

    def _home(self, source: tuple[SourceLine, ...]) -> object:
        # Many sources share a relative name, such as the one for CUDA C++ given as text.
        return source if source and PurePath(source[0].file).is_absolute() else self.module

    @property
    def kernel_name(self) -> str:
        """The kernel as its source calls it, with its template arguments."""
        return source_name(self.kernel)

    @property
    def place(self) -> SourceLine:
        """The innermost source line, else the PTX line."""
        return self.source[0] if self.source else self.ptx_place

    @property
    def own_place(self) -> SourceLine:
        """The line of the user's own file, which may call that of `place`."""
        return own_line(self.source) or self.ptx_place

    @property
    def ptx_place(self) -> SourceLine:
        """The PTX line, in the PTX file if there is one, else in a file with the kernel's name."""
        return SourceLine(self.origin if self.origin.endswith(".ptx") else f"{self.kernel}.ptx", max(self.line, 1))

    @property
    def short(self) -> str:
        """The rule and the PTX line, as in sentences about other findings."""
        return f"[{self.rule}] at PTX line {self.line}"

    @property
    def advice(self) -> list[str]:
        """Lines that say how to mend it, who relies on it and which page explains its rule."""
        told = {"mend": self.mend, "relied upon": self.reliance, "read more": self.page}
        return [f"  {what}: {said}" for what, said in told.items() if said]

    @property
    def sentence(self) -> str:
        """The finding in one line."""
        source = f"{_told(self.source)}, " if self.source else ""
        text = self.text if len(self.text) <= MAX_TEXT else f"{self.text[:MAX_TEXT]}..."
        line = f", {source}PTX line {self.line} `{text}`" if self.line else ""
        lane = f", lane {self.lane}" if self.lane is not None else ""
        address = f", address {self.address:#x}" if self.address is not None else ""
        where = f", {self.where}" if self.where else ""
        return f"[{self.rule}] kernel {self.kernel_name}{line}{where}{lane}{address}: {with_source_names(self.detail)}"

    def __str__(self) -> str:
        said = [f"{self.grade} {self.sentence}"]
        said += [f"  called from: {one}" for one in self.source[1:]]
        if self.spot and self.address is not None:
            said.append(f"  address: {self.address:#x} of the CTA's shared memory is {with_source_names(self.spot)}")
        if self.other is not None:
            said.append(f"  other access: {self.other}")
            said += [f"    called from: {one}" for one in self.other.source[1:]]
        said += [f"  missing: {self.missing}"] if self.missing else []
        said += self.advice
        ends = ENDS_HERE if self.ends else "the launch goes on"
        times = f"found {self.times} times" if self.times > 1 else "found once"
        times += f" under {', '.join(self.schedules)}" if self.schedules else ""
        said.append(f"  {times}; {ends}{f'; PTX ISA {self.section}' if self.section else ''}")
        return "\n".join(said)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> KernelFinding:
        """Rebuilds a finding from the result of dataclasses.asdict; unknown keys are ignored."""
        values = {name: plain[name] for name in cls.__dataclass_fields__ if name in plain}
        values["source"] = tuple(SourceLine(**one) for one in values["source"])
        for name in ("schedules", "leads_to"):
            values[name] = tuple(values.get(name, ()))
        if (other := values.get("other")) is not None:
            source = tuple(SourceLine(**one) for one in other["source"])
            values["other"] = CollidingAccess(**{**other, "source": source})
        return cls(**values)


# Suppressions


@dataclass(frozen=True, slots=True)
class Suppression:
    """Reviewed findings of `rule`: at a `place` in the source, of a `kernel` (a glob; see `is_named`), or both.

    `place`: FILE, FILE:LINE or FILE:FIRST-LAST, where FILE is the end of a path, not a glob. `where`: "suppress.yaml,
    line 3". The place of the finding's own access counts; the place of the other access suppresses nothing.
    """

    rule: str
    reason: str
    place: str = ""
    kernel: str = ""
    where: str = ""

    def matches(self, finding: KernelFinding) -> bool:
        """Whether it applies to `finding`. Any of the source lines may match, or the line of a PTX file.

        A line of any other file is a source line: PTX lines are numbered on their own.
        """
        if self.rule != finding.rule or (self.kernel and not is_named(finding.kernel, self.kernel)):
            return False
        if not self.place:
            return True
        file, first, last = _place(self.place)
        own = finding.ptx_place if not finding.source or finding.origin.endswith(".ptx") else finding.source[0]
        return any(
            _is_end(file, one.file) and first <= one.line <= last
            for one in (*finding.source, own, SourceLine(finding.origin, 0))
        )

    def __str__(self) -> str:
        about = " ".join(part for part in (self.place, self.kernel and f"kernel {self.kernel}") if part)
        return f"{self.where}: {self.rule} at {about}"


_LINES = re.compile(r"(.*):(\d+)(?:-(\d+))?", re.DOTALL | re.ASCII)


def _place(text: str) -> tuple[str, int, int]:
    found = _LINES.fullmatch(text)
    if found is None:
        return text, 0, 1 << 62
    return found[1], int(found[2]), int(found[3] or found[2])


def _is_end(file: str, path: str) -> bool:
    """Whether `file` is the last parts of `path`, or the whole path."""
    wanted, parts = PurePath(file).parts, PurePath(path).parts
    return bool(wanted) and parts[-len(wanted) :] == wanted


def _wrong_key(key: str, value: str, rules: Collection[str] | None) -> str:
    """Says what is wrong with a key's value; "" if nothing is."""
    if key == "rule" and rules is not None and value not in rules:
        return f"there is no rule {value!r}{nearest_of(value, rules, 'docs/rules/README.md')}"
    if key == "place":
        file, first, last = _place(value)
        if not PurePath(file).parts or re.search(r":\d*$", file) or any(letter in file for letter in "*?"):
            return f"{value!r}: write FILE, FILE:LINE or FILE:FIRST-LAST, where FILE is the end of a path and no glob"
        if first > last or (first == 0 and last < 1 << 62):
            return f"{value!r} has no lines: lines count from 1, and FIRST is at most LAST"
    return ""


def read_suppressions(path: str | Path, rules: Collection[str] | None = None) -> tuple[Suppression, ...]:
    """The entries of a YAML file: a list of mappings with `rule`, `reason`, and `place`, `kernel` or both.

    Raises SpecError, a ValueError, with file, line and key for an unusable file: one that names a rule not in `rules`
    (None: any is accepted), a place without lines, or every kernel and no place.
    """
    # Only suppressions need YAML.
    from megamoe.spec.marked_yaml import read_marked_yaml

    document = read_marked_yaml(Path(path))
    entries = document.value
    if not isinstance(entries, list) or not entries:
        raise document.error((), "write a list of suppressions, each with rule, reason, and place or kernel")
    found: list[Suppression] = []
    for number, entry in enumerate(entries):
        if not isinstance(entry, dict):
            raise document.error((number,), "a suppression is a mapping with rule, reason, and place or kernel")
        for key, value in entry.items():
            if key not in ("rule", "reason", "place", "kernel") or not isinstance(value, str) or not value.strip():
                raise document.error((number, key), f"{value!r}: the keys are rule, reason, place and kernel, all text")
            if wrong := _wrong_key(key, value, rules):
                raise document.error((number, key), wrong)
        for key in ("rule", "reason"):
            if key not in entry:
                raise document.error((number,), f"the suppression has no {key}")
        if "place" not in entry and "kernel" not in entry:
            raise document.error((number,), "a suppression needs a place (FILE or FILE:LINE) or a kernel")
        if "place" not in entry and not str(entry["kernel"]).strip("*?"):
            raise document.error((number, "kernel"), f"{entry['kernel']!r} names every kernel: name some, or a place")
        where = f"{path}, line {document.line((number,))}"
        found.append(Suppression(**cast("dict[str, str]", entry), where=where))
    return tuple(found)


# A run


_GRADES: Final = get_args(Grade)
_PTX_LINES = re.compile(r"PTX lines? (\d+)(?: to (\d+))?")
_CTA = re.compile(r"CTA (\([\d, ]+\))")
_WARP = re.compile(r"(?:CTA (\([\d, ]+\)), )?\bwarp (\d+)(?: of CTA (\([\d, ]+\)))?( and \d+ more)?")


@dataclass(frozen=True, slots=True)
class _Threads:
    """CTAs and warps that a finding names. `warps`: with their CTAs; none if it does not name all of them."""

    ctas: frozenset[str]
    warps: frozenset[tuple[str, str]]

    @classmethod
    @lru_cache(4096)
    def of(cls, text: str) -> _Threads:
        """Those in a text. A warp without a CTA is of the first one that is named."""
        ctas, warps = _CTA.findall(text), _WARP.findall(text)
        named = {(before or behind or "".join(ctas[:1]), warp) for before, warp, behind, _ in warps}
        return cls(frozenset(ctas), frozenset() if any(more for *_, more in warps) else frozenset(named))


def _threads_of(finding: KernelFinding) -> _Threads:
    """Those of the first occurrence. What ends a launch names them in its detail alone."""
    other = finding.other.who if finding.other else ""
    return _Threads.of(f"{finding.where}; {other}" if _CTA.search(finding.where) else finding.detail)


def _may_lead(cause: KernelFinding, threads: _Threads) -> bool:
    """Whether what a thread did before it had waited may concern `threads`.

    Between the same two CTAs, the other warps of both went on behind it. Within a CTA, they may not have.
    """
    ahead = _threads_of(cause)
    if not threads.ctas or not threads.ctas <= ahead.ctas:
        return False
    early = _Threads.of(cause.where)
    if not early.ctas <= threads.ctas:
        return False
    return len(threads.ctas) > 1 or not threads.warps or not early.warps or bool(threads.warps & early.warps)


def _lines_of(finding: KernelFinding) -> set[int]:
    """The single PTX lines of which a finding speaks."""
    return {finding.line} | {int(first) for first, last in _PTX_LINES.findall(finding.detail) if not last}


def _spans_of(finding: KernelFinding) -> list[tuple[range, frozenset[str]]]:
    """The ranges of PTX lines of which a finding speaks, and the CTAs that run there."""
    return [
        (range(int(first), int(last) + 1), _Threads.of(clause).ctas or _threads_of(finding).ctas)
        for clause in finding.detail.split("; ")
        for first, last in _PTX_LINES.findall(clause)
        if last
    ]


def _accesses(finding: KernelFinding) -> set[int]:
    """The PTX lines of both accesses, as far as they are known."""
    return {finding.line, finding.other.line if finding.other else 0} - {0}


_Alike = tuple[object, ...]
_First = dict[_Alike, tuple[int, KernelFinding]]
"""The first of findings that are alike as causes, with its number in the ledger."""


@dataclass(slots=True)
class _MissingOrders:
    """The findings of a kernel that name a missing order, by all that decides what may follow from them.

    A kernel may have thousands. Those that are alike are the same to `Ledger.cause_of`, which wants the first.
    """

    by_accesses: dict[frozenset[int], _First] = field(default_factory=dict[frozenset[int], _First])
    by_line: dict[int, _First] = field(default_factory=dict[int, _First])
    by_line_of_cta: dict[tuple[int, str], _First] = field(default_factory=dict[tuple[int, str], _First])
    by_cta: dict[str, _First] = field(default_factory=dict[str, _First])

    def add(self, number: int, one: KernelFinding) -> None:
        """Adds a finding with the next number."""
        early, ahead, accesses = _Threads.of(one.where), _threads_of(one).ctas, _accesses(one)
        alike, first = (one.rule, one.leads_to), (number, one)
        if one.other is not None:
            self.by_accesses.setdefault(frozenset(accesses), {}).setdefault(alike, first)
        for line in accesses:
            self.by_line.setdefault(line, {}).setdefault(alike, first)
            for cta in early.ctas:
                self.by_line_of_cta.setdefault((line, cta), {}).setdefault(alike, first)
        for cta in ahead:
            self.by_cta.setdefault(cta, {}).setdefault((*alike, ahead, early), first)

    def near(self, finding: KernelFinding, end: int) -> list[KernelFinding]:
        """The causes that `Ledger.cause_of` chooses from. `end`: the number of `finding`."""
        if finding.missing:
            pair = self.by_accesses.get(frozenset(_accesses(finding)), {}) if finding.other is not None else {}
            exact = [first for first in pair.values() if finding.rule in first[1].leads_to]
        else:
            exact = [first for line in _lines_of(finding) for first in self.by_line.get(line, {}).values()]
        return _in_turn(exact) or _in_turn(self._within(finding, end)) or _in_turn(self._general(finding, end))

    def _within(self, finding: KernelFinding, end: int) -> Iterator[tuple[int, KernelFinding]]:
        for span, ctas in () if finding.missing else _spans_of(finding):
            for line in span if len(span) < len(self.by_line) else self.by_line:
                for cta in ctas if line in span else ():
                    yield from (one for one in self.by_line_of_cta.get((line, cta), {}).values() if one[0] < end)

    def _general(self, finding: KernelFinding, end: int) -> Iterator[tuple[int, KernelFinding]]:
        threads = _threads_of(finding)
        # A cause concerns all of the CTAs, so that any of them will do.
        for number, one in min((self.by_cta.get(cta, {}) for cta in threads.ctas), key=len, default={}).values():
            if number < end and finding.rule in one.leads_to and _may_lead(one, threads):
                yield number, one


def _in_turn(found: Iterable[tuple[int, KernelFinding]]) -> list[KernelFinding]:
    """Findings by their numbers, each once."""
    return [one for _, one in sorted(dict(found).items())]


@dataclass(slots=True)
class Ledger:
    """The findings of a run, one per site. `used`: the suppressions that have matched."""

    profile: Profile = "default"
    suppressions: tuple[Suppression, ...] = ()
    by_site: dict[tuple[object, ...], KernelFinding] = field(default_factory=dict[tuple[object, ...], KernelFinding])
    used: set[Suppression] = field(default_factory=set[Suppression])
    _ordered: list[KernelFinding] | None = field(default=None, init=False, repr=False, compare=False)
    _numbers: dict[tuple[object, ...], int] = field(default_factory=dict[tuple[object, ...], int], init=False,
                                                    repr=False, compare=False)  # fmt: skip
    _orders: dict[tuple[str, str], _MissingOrders] = field(default_factory=dict[tuple[str, str], _MissingOrders],
                                                           init=False, repr=False, compare=False)  # fmt: skip

    def __post_init__(self) -> None:
        for site, one in self.by_site.items():
            self._number(site, one)

    def _number(self, site: tuple[object, ...], one: KernelFinding) -> None:
        number = self._numbers[site] = len(self._numbers)
        if one.missing:
            self._orders.setdefault((one.module, one.kernel), _MissingOrders()).add(number, one)

    @classmethod
    def of(cls, profile: str, suppress: str | Path | None, rules: Collection[str] | None = None) -> Ledger:
        """Opens a ledger. ValueError for an unknown profile or an unusable file of suppressions.

        `rules`: the machine's rules, which suppressions may name.
        """
        if profile not in PROFILES:
            raise ValueError(
                f"there is no profile {profile!r}; there are {', '.join(get_args(Profile))}{nearest(profile, PROFILES)}"
            )
        return cls(cast("Profile", profile), () if suppress is None else read_suppressions(suppress, rules))

    @property
    def findings(self) -> list[KernelFinding]:
        """All findings, as `in_order` has them."""
        if self._ordered is None:
            self._ordered = self.in_order(self.by_site.values())
        return list(self._ordered)

    def in_order(self, found: Iterable[KernelFinding]) -> list[KernelFinding]:
        """Findings of this ledger: errors first, since what is less may follow from them. Within a grade, in order of
        occurrence, but what may follow from another comes after it."""
        graded = sorted(found, key=lambda one: _GRADES.index(one.grade))
        at = {one.site: one for one in reversed(graded)}
        placed = dict[int, KernelFinding]()
        for one in graded:
            chain = {id(one): one}
            last = one
            while id(last) not in placed and (cause := self.cause_of(last)) is not None:
                known = at.get(cause.site)
                if known is None or known.grade != one.grade or id(known) in chain:
                    break
                last = chain[id(known)] = known
            for each in reversed(chain.values()):
                placed.setdefault(id(each), each)
        return list(placed.values())

    def take(self, found: Iterable[KernelFinding]) -> list[KernelFinding]:
        """Adds findings, in order of occurrence, and returns those at new sites."""
        fresh: list[KernelFinding] = []
        self._ordered = None
        for one in found:
            site = one.site
            known = self.by_site.get(site)
            if known is None:
                self.by_site[site] = one
                self._number(site, one)
                fresh.append(one)
            else:
                self.by_site[site] = replace(
                    known,
                    times=known.times + one.times,
                    ends=known.ends or one.ends,
                    schedules=tuple(dict.fromkeys((*known.schedules, *one.schedules))),
                )
        return fresh

    def cause_of(self, finding: KernelFinding) -> KernelFinding | None:
        """A missing order that `finding` may follow from.

        It is at a PTX line of which `finding` speaks, or, if this names a missing order itself, it is about the same
        two instructions and its rule says that the rule of `finding` may follow from it. If there is none, it was found
        before: it is between lines that `finding` names, or its rule leads to that of `finding` and they concern the
        same threads. Where several are as near, it is one that follows from none of the others.
        """
        orders = self._orders.get((finding.module, finding.kernel))
        if orders is None:
            return None
        near = orders.near(finding, self._numbers.get(finding.site, len(self._numbers)))
        led = {slug for one in near for slug in one.leads_to}
        first = next((one for one in near if one.rule not in led), near[0] if near else None)
        return None if first is None else self.by_site[first.site]

    def said_of_cause(self, finding: KernelFinding) -> str:
        """ "[race] at PTX line 7", which `finding` may follow from; "" if it may follow from nothing."""
        cause = self.cause_of(finding)
        return "" if cause is None else cause.short

    def text_of(self, finding: KernelFinding) -> str:
        """The finding in full, with its cause."""
        cause = self.said_of_cause(finding)
        return f"{finding}\n  may follow from: {cause}" if cause else str(finding)

    def suppression_of(self, finding: KernelFinding) -> Suppression | None:
        """The entry that matches `finding`. A finding that ended its launch has none, because the results are lost."""
        for one in () if finding.ends else self.suppressions:
            if one.matches(finding):
                self.used.add(one)
                return one
        return None

    def counts(self, finding: KernelFinding) -> bool:
        """Whether `finding` fails a run: it ended its launch, or its grade fails and nothing suppresses it."""
        return finding.ends or (self.suppression_of(finding) is None and finding.grade in PROFILES[self.profile])

    @property
    def failing(self) -> list[KernelFinding]:
        """The findings that count."""
        return [one for one in self.findings if self.counts(one)]

    @property
    def tally(self) -> str:
        """How many findings there are, and how many of them count."""
        count, failing = len(self.findings), len(self.failing)
        of_them = f"{failing} of them count{'s' * (failing == 1)}"
        if count == 1:
            of_them = "which counts" if failing else "which does not count"
        return f"{counted(count, 'finding')}, {of_them} in the profile {self.profile}"

    @property
    def stale(self) -> list[Suppression]:
        """Suppressions that match no finding."""
        return [one for one in self._unused if not self._ended_at(one)]

    @property
    def without_effect(self) -> list[Suppression]:
        """Suppressions that match only faults that ended their launch; these count regardless."""
        return [one for one in self._unused if self._ended_at(one)]

    @property
    def remarks(self) -> list[str]:
        """A sentence for each suppression that is stale or without effect."""
        return [
            *(f"stale suppression: {one}; nothing was found there: {one.reason}" for one in self.stale),
            *(
                f"suppression without effect: {one}; the fault there ends the launch, and it counts: {one.reason}"
                for one in self.without_effect
            ),
        ]

    @property
    def _unused(self) -> list[Suppression]:
        for one in self.findings:
            self.suppression_of(one)
        return [one for one in self.suppressions if one not in self.used]

    def _ended_at(self, suppression: Suppression) -> bool:
        return any(one.ends and suppression.matches(one) for one in self.findings)

"""The lines of a record file. megamoe.records.files writes and reads them.

`kind: run` is the provenance of one run, `record` the verdict on one row, `agreement` the distance between the backends
of one case, `timing` the device time of one row, `figures` the compiler's numbers for a program, `acceptance` the
reason for a change to a baseline, `signature` who vouches for a run. Each line carries its run's id, so that files can
be concatenated. The form is versioned; `UPGRADES` converts lines of older versions.

`record_schema` is for readers that are not written in Python. `megamoe schema > results/schema/record-2.schema.json`
renews the tracked file; a test fails when that is due. JSON Schema cannot express that there are as many rounds as
samples, or that the op is the case's; the models here check that.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, model_validator

from megamoe.contract import DeviceFacts, Flush, Row, Status, Temperature
from megamoe.contract.counted import counted

SCHEMA_VERSION = 2
BASELINE_RUN = "baseline"
"""The run id of a baseline's lines, which any run would repeat."""
ERRORS: Final = ("rms", "row", "max", "bias")
"""The errors of an output, each with a bar, as megamoe.judge.tolerance defines them."""
MAX_CHARACTERS = 200
"""How much of a value a message repeats. A line of a record file may hold megabytes."""


class RecordError(Exception):
    """A record file that cannot be read or written. The text says which file, which line and why."""


MAX_SENTENCE = 4000
"""Limit for what a judge, a backend or an assembler says about a row. The rerun command is not counted."""
MAX_LINE_TEXT = 2 * MAX_SENTENCE
MAX_NAME = 1000
"""Limit for the name of a case, a backend, and anything else that names a row."""
MAX_SHARDS = 1000
"""Maximum number of shards in a run set."""


def shortened(text: str, most: int = MAX_CHARACTERS) -> str:
    """`text`, or its first `most` characters and its length."""
    return text if len(text) <= most else f"{text[:most]}… ({counted(len(text), 'character')})"


RERUN: Final = ". Rerun: "
"""Stands between what a sentence says of a row and the command that runs the row again."""


def without_rerun(sentence: str) -> str:
    """What a sentence says of a row, without the command."""
    return sentence.partition(RERUN)[0]


def _capped(text: str) -> str:
    return text if len(text) <= MAX_LINE_TEXT else shortened(text, MAX_LINE_TEXT - 40)


def _named(text: str) -> str:
    if len(text) > MAX_NAME:
        raise ValueError(f"a name has at most {MAX_NAME} characters, not {shortened(repr(text))}")
    return text


# Applies to lines made here and to lines read: a record file may come from anyone.
Sentence = Annotated[str, AfterValidator(_capped)]
Name = Annotated[str, AfterValidator(_named)]


class _Line(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    schema_version: Literal[2] = SCHEMA_VERSION
    run: Name


class Shard(BaseModel):
    """Identifies a run as shard `index` (from 1) of the `count` shards of a run set (megamoe.records.shards).

    `run_set` names the set; `plan` is a digest of the assignment of rows to shards.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    index: int = Field(ge=1)
    count: int = Field(ge=1, le=MAX_SHARDS)
    run_set: Name
    plan: Name

    @model_validator(mode="after")
    def _is_one_of_them(self) -> Shard:
        if self.index > self.count:
            raise ValueError(f"shard {self.index} of {self.count}")
        return self

    def __str__(self) -> str:
        return f"shard {self.index}/{self.count} of run set {self.run_set}"


class RunHeader(_Line):
    """The provenance of a run. `started` is UTC, ISO 8601; a version is None if the package is not installed.

    For a `shard`, `selection` is the whole run set's; `owed_rows` counts the shard's rows.

    `device` is None if no row ran on an accelerator. `software`: versions of peers and compilers by name. `digests`:
    SHA-256 of the "specs", of the "expected" failures and of the "code"; a run of an older megamoe has none.
    """

    kind: Literal["run"] = "run"
    started: str
    selection: Mapping[str, str | tuple[str, ...]]
    owed_rows: int
    git_revision: str | None
    megamoe: str
    python: str
    torch: str | None
    numpy: str | None
    platform: str
    machine: str
    cpu_count: int | None
    device: DeviceFacts | None = None
    software: Mapping[str, str] = Field(default_factory=dict)
    digests: Mapping[str, str] = Field(default_factory=dict, exclude_if=operator.not_)
    shard: Shard | None = Field(default=None, exclude_if=operator.not_)


class Record(_Line):
    """The verdict on one row.

    `judge_host_seconds`: seconds that the judge took on this host, including the comparison, and the reference unless
    the previous row had the same case. Never a GPU time. None if the judge did not finish. `audit_host_seconds`: the
    part spent on running the row again (megamoe.judge.audit); None if it was not audited. `program_sha256` is the
    digest of the PTX text, None if no program was built; `input_sha256` has the digests of the inputs. `metrics` come
    from the comparison, `counters` (0 or more) from the executor and the reference. `bundle` is the folder with the
    evidence of a failure. `artifact`: what ran, where the PTX alone does not say it: the digest of a host object
    ("host_object"), its "entry" and "compiler", or the packages of a Python call ("python NAME").
    """

    kind: Literal["record"] = "record"
    case: Name
    op: Name
    backend: Name
    target: Name
    executor: Name
    schedule: Name
    status: Status
    sentence: Sentence
    metrics: Mapping[str, float] = Field(default_factory=dict)
    counters: Mapping[str, Annotated[int, Field(ge=0)]] = Field(default_factory=dict)
    judge_host_seconds: float | None = Field(ge=0)
    audit_host_seconds: float | None = Field(default=None, ge=0, exclude_if=operator.not_)
    program_sha256: str | None = None
    input_sha256: Mapping[str, str] = Field(default_factory=dict)
    bundle: Name | None = None
    artifact: Mapping[str, str] = Field(default_factory=dict, exclude_if=operator.not_)

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Record:
        if (self.status == "passed") != (self.sentence == ""):
            sentence = shortened(repr(self.sentence))
            raise ValueError(f"status {self.status!r} with the sentence {sentence}; only a pass has none")
        if self.op != self.row.op:
            raise ValueError(f"op {shortened(repr(self.op))} with the case {shortened(repr(self.case))}")
        return self

    @property
    def row(self) -> Row:
        """The row of this record."""
        return Row(self.case, self.backend, self.target, self.executor, self.schedule)


class Agreement(_Line):
    """The distance between the outputs of two or more backends for one case, and which backend stands alone.

    `metrics` has ONE~OTHER.TENSOR.max, .rms (absolute, where both are finite) and .unequal (share of elements). Each
    backend's distance from the oracle is in the metrics of its own record. `alone`: the backend whose verdict no other
    shares.
    """

    kind: Literal["agreement"] = "agreement"
    case: Name
    op: Name
    target: Name
    executor: Name
    schedule: Name
    backends: tuple[str, ...]
    metrics: Mapping[str, float]
    alone: str | None = None
    sentence: Sentence = ""


class Timing(_Line):
    """Device time of one row at one temperature of the L2 cache: "cold" after a flush, "hot" right after itself.

    `samples_us` are raw, in the order taken, in microseconds per launch; a sample is the mean of `launches_per_sample`
    launches. `rounds` gives the round of each sample: the backends of a case take turns in every round. `discarded`
    counts the dropped samples by reason ("throttled", "under the floor"). `floor_us` is the physical floor, set by
    `floor_by`. `stopped_by`: the relative standard error was reached ("precision") or the budget was spent. There are
    samples only if `status` is "passed": the outputs of the timed replays were right. `method` is None if nothing was
    timed. `flush`: how the L2 was emptied before a cold sample, "clean" by reading and "dirty" by writing; None in
    older records, whose flush wrote. `bare_read_us`: cold time of a kernel that only reads as many bytes as the case
    needs, in the same process.
    """

    kind: Literal["timing"] = "timing"
    case: Name
    op: Name
    backend: Name
    target: Name
    executor: Name
    temperature: Temperature
    method: Literal["graph", "events"] | None = None
    flush: Flush | None = None
    bare_read_us: float | None = Field(default=None, gt=0)
    status: Status
    sentence: Sentence
    samples_us: tuple[float, ...] = ()
    rounds: tuple[int, ...] = ()
    launches_per_sample: int = Field(default=1, ge=1)
    discarded: Mapping[str, int] = Field(default_factory=dict)
    stopped_by: Literal["precision", "budget"] | None = None
    floor_us: float | None = Field(default=None, ge=0)
    floor_by: Literal["bytes", "flops"] | None = None
    program_sha256: str | None = None

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Timing:
        if (self.status == "passed") != bool(self.samples_us):
            raise ValueError(
                f"status {self.status!r} with {counted(len(self.samples_us), 'sample')}; only a pass has a time"
            )
        if len(self.rounds) != len(self.samples_us):
            raise ValueError(f"{counted(len(self.rounds), 'round')} for {counted(len(self.samples_us), 'sample')}")
        if self.samples_us and not (all(map(math.isfinite, self.samples_us)) and min(self.samples_us) > 0.0):
            raise ValueError("samples_us holds a value that is no time: not positive, or not finite")
        return self


class Figures(_Line):
    """The assembler's numbers for a program. `kernels`: entry -> registers, spill_bytes, smem_bytes, code_bytes."""

    kind: Literal["figures"] = "figures"
    case: Name
    op: Name
    backend: Name
    target: Name
    assembler: Name
    program_sha256: str
    cubin_sha256: str | None = None
    kernels: Mapping[str, Mapping[str, int]]


class Acceptance(_Line):
    """The reason for a baseline change that a person accepted. `accepted` is UTC, ISO 8601."""

    kind: Literal["acceptance"] = "acceptance"
    row: Name
    reason: Sentence = Field(min_length=1)
    accepted: str
    git_revision: str | None
    changes: Mapping[str, str] = Field(default_factory=dict)


class Signature(_Line):
    """Who vouches for the lines of a run: a public key and its signature, hexadecimal (megamoe.records.signing)."""

    kind: Literal["signature"] = "signature"
    key: str = Field(pattern="^[0-9a-f]{64}$")
    signature: str = Field(pattern="^[0-9a-f]{128}$")


@dataclass(frozen=True, slots=True)
class Evidence:
    """The evidence of a verdict; the fields are those of Record."""

    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    counters: Mapping[str, int] = field(default_factory=dict[str, int])
    program_sha256: str | None = None
    input_sha256: Mapping[str, str] = field(default_factory=dict[str, str])
    bundle: str | None = None
    artifact: Mapping[str, str] = field(default_factory=dict[str, str])
    audit_host_seconds: float | None = None


NO_EVIDENCE: Final = Evidence()


def record_of(
    run: str,
    row: Row,
    status: Status,
    sentence: str,
    evidence: Evidence = NO_EVIDENCE,
    host_seconds: float | None = None,
    specs: Path | None = None,
) -> Record:
    """The record of `row`. Unless the row passed, the sentence ends with the command that reruns it.

    `specs`: the spec folder of the run, None for the checkout's.
    """
    if status != "passed":
        said = shortened(sentence.strip(), MAX_SENTENCE).rstrip(".")
        sentence = f"{said}{RERUN}{row.rerun_with(specs)}"
    return Record(
        run=run,
        **row._asdict(),
        op=row.op,
        status=status,
        sentence=sentence,
        metrics=evidence.metrics,
        counters=evidence.counters,
        judge_host_seconds=_rounded(host_seconds),
        audit_host_seconds=_rounded(evidence.audit_host_seconds),
        program_sha256=evidence.program_sha256,
        input_sha256=evidence.input_sha256,
        bundle=evidence.bundle,
        artifact=evidence.artifact,
    )


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)


AnyLine = RunHeader | Record | Agreement | Timing | Figures | Acceptance | Signature


def _second_version(line: dict[str, Any]) -> dict[str, Any]:
    return {**line, "schema_version": 2}


# Version -> function that converts a line to the next version. The second only added kinds and optional fields.
UPGRADES: Mapping[int, Callable[[dict[str, Any]], dict[str, Any]]] = {1: _second_version}


DIALECT = "https://json-schema.org/draft/2020-12/schema"
VERSIONS = tuple(range(1, SCHEMA_VERSION + 1))
_KINDS_OF_THE_FIRST = ("run", "record", "agreement")
_NEW_IN_THE_SECOND = {
    "RunHeader": ("device", "software", "digests", "shard"),
    "Record": ("artifact", "audit_host_seconds"),
}
_NUMBER = {
    "anyOf": [{"type": "number"}, {"enum": ["NaN", "Infinity", "-Infinity"]}],
    "description": "a number; JSON has no word for what is none, so that these are text",
}


def record_schema(version: int = SCHEMA_VERSION) -> dict[str, Any]:
    """The schema of one line of `version`, one of VERSIONS. Raises KeyError for another."""
    if version not in VERSIONS:
        raise KeyError(version)
    schema = TypeAdapter(Annotated[AnyLine, Field(discriminator="kind")]).json_schema(mode="serialization")
    _complete(schema["$defs"])
    if version == 1:
        _as_the_first(schema)
    head = {
        "$schema": DIALECT,
        "$id": f"urn:megamoe:record-{version}",
        "title": f"A line of a megamoe record file, version {version}",
        "description": "A record file is UTF-8 text, one JSON object a line. `kind` says what a line is.",
    }
    return {**head, **schema}


def _complete(models: dict[str, Any]) -> None:
    """Adds the models' checks that go beyond field types."""
    for model in models.values():
        if "kind" in model["properties"]:
            model["required"] = sorted({*model["required"], "schema_version", "kind"})
    for name in ("Record", "Agreement"):
        models[name]["properties"]["metrics"]["additionalProperties"] = _NUMBER
    passed = {"properties": {"status": {"const": "passed"}}}
    models["Record"] |= {
        "if": passed,
        "then": {"properties": {"sentence": {"const": ""}}},
        "else": {"properties": {"sentence": {"minLength": 1}}},
    }
    models["Timing"] |= {
        "if": passed,
        "then": {"required": ["samples_us", "rounds"], "properties": {"samples_us": {"minItems": 1}}},
        "else": {"properties": {name: {"maxItems": 0} for name in ("samples_us", "rounds")}},
    }
    models["Timing"]["properties"]["samples_us"]["items"]["exclusiveMinimum"] = 0


def _as_the_first(schema: dict[str, Any]) -> None:
    """Removes the kinds and the optional fields that the second version added."""
    mapping = schema["discriminator"]["mapping"]
    kept = {kind: mapping[kind] for kind in _KINDS_OF_THE_FIRST}
    schema["discriminator"]["mapping"] = kept
    schema["oneOf"] = [{"$ref": reference} for reference in kept.values()]
    names = [reference.rpartition("/")[2] for reference in kept.values()]
    schema["$defs"] = {name: schema["$defs"][name] for name in names}
    for name, model in schema["$defs"].items():
        model["properties"]["schema_version"] |= {"const": 1, "default": 1}
        for new in _NEW_IN_THE_SECOND.get(name, ()):
            del model["properties"][new]
            model["required"] = [one for one in model["required"] if one != new]

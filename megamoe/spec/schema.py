"""The form of a spec file: a frozen model for each mapping. Turns pydantic's errors into sentences with a line."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    PlainValidator,
    StringConstraints,
    Tag,
    ValidationError,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from megamoe.contract import AxisValue, spell
from megamoe.contract.known_names import nearest_of
from megamoe.spec.case_space import Kind
from megamoe.spec.marked_yaml import KeyPath, MarkedYaml
from megamoe.spec.spec import DEFAULT_THRESHOLD, Role

Dtype = Literal["bf16", "f16", "f32", "f64", "e4m3", "e5m2", "e2m1", "ue8m0", "u8", "s8", "s32", "u32", "s64"]


def _scalar(value: object) -> AxisValue:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise PydanticCustomError("scalar_type", "must be a number, text, true, false or null")


def _bound(value: object) -> int | float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    raise PydanticCustomError("scalar_type", "must be a number")


def _layout(value: object) -> str | None:
    return "<product>" if isinstance(value, dict) else "<rows>" if isinstance(value, list) else None


Name = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]*$")]
Sentence = Annotated[str, StringConstraints(min_length=3)]
Schedule = Annotated[str, StringConstraints(pattern=r"^(eager|lazy|(random|late_cta|late_warp):(0|[1-9][0-9]{0,17}))$")]
Scalar = Annotated[AxisValue, PlainValidator(_scalar)]
Bound = Annotated[int | float | None, PlainValidator(_bound)]
RoleByAxis = dict[Name, Annotated[dict[str, Role], Field(min_length=1)]]
AnyRole = Annotated[
    Annotated[Role, Tag("<role>")] | Annotated[RoleByAxis, Tag("<roles>"), Field(min_length=1, max_length=1)],
    Discriminator(lambda value: "<roles>" if isinstance(value, dict) else "<role>"),
]
AnyCondition = Annotated[
    Annotated[str, Tag("<flag>")] | Annotated[dict[Name, str], Tag("<value>"), Field(min_length=1, max_length=1)],
    Discriminator(lambda value: "<value>" if isinstance(value, dict) else "<flag>"),
]
Shape = Annotated[list[str | int], Field(min_length=1)]
Row = dict[Name, Scalar]
Product = dict[Name, Annotated[list[Scalar], Field(min_length=1)]]
Matrix = Annotated[
    Annotated[Product, Tag("<product>"), Field(min_length=1)]
    | Annotated[list[Row], Tag("<rows>"), Field(min_length=1)],
    Discriminator(
        _layout,
        custom_error_type="matrix_type",
        custom_error_message="must be a mapping of axes to lists (their product) or a list of rows",
    ),
]


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class RangeEntry(_Entry):
    """Either `in`, the list of admissible values, or `min` and `max`."""

    choices: list[Scalar] | None = Field(default=None, alias="in", min_length=1)
    min: Bound = None
    max: Bound = None


class AxisEntry(RangeEntry):
    """An axis: its kind, its limits, and its default if it has one. `optional`: null is admissible."""

    type: Kind
    doc: Sentence
    default: Scalar = None
    optional: bool = False


class TensorEntry(_Entry):
    """A tensor. `when` is a bool axis, a value of a text axis as {AXIS: VALUE}, or a condition over axes of numbers and
    bools. If it does not hold, the tensor is absent.

    `role` may depend on one axis, as {AXIS: {VALUE: role}}; the tensor is absent for the values not named. `shape_if`:
    {AXIS: shape}, the shape where that bool axis is true.
    """

    shape: Shape
    dtype: Dtype
    role: AnyRole = "input"
    shape_if: dict[Name, Shape] = Field(default={}, max_length=1)
    when: AnyCondition | None = None
    doc: Sentence | None = None


class BoundEntry(_Entry):
    """A bound and the reason for it."""

    value: float = Field(gt=0)
    reason: Sentence


class CosineEntry(BoundEntry):
    """A bound on a cosine."""

    value: float = Field(ge=0.9, le=1)


class NoiseEntry(BoundEntry):
    """A bound as a multiple of the simulated reference's own error. Capped: with a large one anything would pass."""

    value: float = Field(ge=1, le=16)


class ToleranceEntry(_Entry):
    """How far an output may be from the oracle."""

    cosine: CosineEntry
    noise_ratio: NoiseEntry


class ThresholdEntry(_Entry):
    """How far two times may differ, as a fraction, and why."""

    value: float = Field(gt=0, lt=1)
    reason: Sentence


class OverrideEntry(ThresholdEntry):
    """A threshold for the cases of a matrix, certain axis values, or one L2 temperature."""

    matrix: Name | None = None
    where: Annotated[Product, Field(min_length=1)] | None = None
    temperature: Literal["cold", "hot"] | None = None


class BenchmarkEntry(_Entry):
    """How times are compared. The first override that matches applies."""

    threshold: ThresholdEntry = ThresholdEntry(value=DEFAULT_THRESHOLD, reason="the default")
    overrides: list[OverrideEntry] = []


class ProfileEntry(_Entry):
    """What to run: whole matrices, single rows of matrices, and the schedules."""

    doc: Sentence
    matrices: list[Name] = []
    cases: list[Row] = []
    schedules: list[Schedule] = Field(min_length=1)


class SpecEntry(_Entry):
    """A whole file."""

    op: Name
    doc: Sentence
    axes: dict[Name, AxisEntry] = Field(min_length=1)
    tensors: dict[Name, TensorEntry] = Field(min_length=1)
    constraints: list[str] = []
    matrices: dict[Name, Matrix] = Field(min_length=1)
    # Omit it if nothing is published: an empty list would look like a bar that holds.
    published: list[Name] = Field(default=[], min_length=1)
    beyond_ranges: list[Name] = []
    ranges: dict[Name, RangeEntry] = {}
    inputs: list[Name] = Field(min_length=1)
    laws: list[Name] = Field(min_length=1)
    tolerance: ToleranceEntry
    benchmark: BenchmarkEntry = BenchmarkEntry()
    profiles: dict[Name, ProfileEntry] = Field(min_length=1)


def read_entry(document: MarkedYaml) -> SpecEntry:
    """`document` as a SpecEntry. Raises SpecError about the first mistake in the file; missing keys come last."""
    if document.value is None:
        raise document.error((), "is empty; a spec begins with op:")
    try:
        return SpecEntry.model_validate(document.value)
    except ValidationError as error:
        complaints = [(details, _path(details, document)) for details in error.errors(include_url=False)]

        # A misspelt key is both unknown and missing. Report the unknown one.
        def rank(complaint: tuple[ErrorDetails, KeyPath]) -> tuple[bool, int]:
            return complaint[0]["type"] == "missing", document.line(complaint[1])

        details, path = min(complaints, key=rank)
        raise document.error(path, _sentence(details, path)) from None


def _path(details: ErrorDetails, document: MarkedYaml) -> KeyPath:
    """Pydantic's location as a path in the file, without the parts (tags, missing keys) that are not in the file."""
    path: KeyPath = ()
    for part in details["loc"]:
        if (*path, part) in document.lines:
            path = (*path, part)
    return path


def _sentence(details: ErrorDetails, path: KeyPath) -> str:
    kind, name, seen = details["type"], str(details["loc"][-1]) if details["loc"] else "", _seen(details["input"])
    match kind:
        case "extra_forbidden":
            return f"unknown key {name!r}{nearest_of(name, _known_keys(path[:-1]))}"
        case "missing":
            return f"key {name!r} is missing; known: {', '.join(_known_keys(path))}"
        case "too_short":
            return "is empty; it needs at least one entry"
        case "string_pattern_mismatch" if "eager" in details.get("ctx", {}).get("pattern", ""):
            return f"{seen} is no schedule; write eager, lazy, random:SEED, late_cta:RANK or late_warp:INDEX"
        case "string_pattern_mismatch":
            return f"{seen} is no name; a name is lower-case letters, digits and underscores, a letter first"
        case "model_type" | "dict_type" | "model_attributes_type":
            return f"must be a mapping, not {seen}"
        case "scalar_type" | "matrix_type":
            return f"{details['msg']}, not {seen}"
        case _:
            return f"{_EXPECTED.get(kind, details['msg'].lower().replace('input should be', 'must be'))}, not {seen}"


_EXPECTED = {
    "list_type": "must be a list",
    "string_type": "must be text",
    "int_type": "must be an integer",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "string_too_short": "must be a sentence of at least 3 letters",
}


def _seen(value: object) -> str:
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else "a list"
    return spell(value) if value is None or isinstance(value, bool) else repr(value)


def _known_keys(path: KeyPath) -> list[str]:
    """The keys of the model at `path`. A part selects the field of that name, or else the element type."""
    model: object = SpecEntry
    for part in path:
        if isinstance(model, type) and issubclass(model, BaseModel):
            by_key = {field.alias or name: field.annotation for name, field in model.model_fields.items()}
            model = by_key.get(str(part))
        else:
            model = get_args(model)[-1] if get_args(model) else None
    if isinstance(model, type) and issubclass(model, BaseModel):
        return [field.alias or name for name, field in model.model_fields.items()]
    return []

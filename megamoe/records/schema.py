"""The JSON Schema of a line of a record file, for readers that are not written in Python.

`megamoe schema > results/schema/record-2.schema.json` renews the tracked file; a test says when that is due. JSON
Schema cannot say that there are as many rounds as samples, nor that the op is that of the case: records/lines.py does.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from megamoe.records.lines import SCHEMA_VERSION, AnyLine

DIALECT = "https://json-schema.org/draft/2020-12/schema"
VERSIONS = tuple(range(1, SCHEMA_VERSION + 1))
_KINDS_OF_THE_FIRST = ("run", "record", "agreement")
_NEW_IN_THE_SECOND = {"RunHeader": ("device", "software")}
_NUMBER = {
    "anyOf": [{"type": "number"}, {"enum": ["NaN", "Infinity", "-Infinity"]}],
    "description": "a number; JSON has no word for what is none, so that these are text",
}


def record_schema(version: int = SCHEMA_VERSION) -> dict[str, Any]:
    """The schema of one line of `version`, one of VERSIONS. KeyError for another."""
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
    """Adds the checks of the models beyond the types of their fields."""
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
    """Takes away the kinds and the optional fields that the second version added."""
    mapping = schema["discriminator"]["mapping"]
    kept = {kind: mapping[kind] for kind in _KINDS_OF_THE_FIRST}
    schema["discriminator"]["mapping"] = kept
    schema["oneOf"] = [{"$ref": reference} for reference in kept.values()]
    names = [reference.rpartition("/")[2] for reference in kept.values()]
    schema["$defs"] = {name: schema["$defs"][name] for name in names}
    for name, model in schema["$defs"].items():
        model["properties"]["schema_version"] |= {"const": 1, "default": 1}
        for field in _NEW_IN_THE_SECOND.get(name, ()):
            del model["properties"][field]
            model["required"] = [one for one in model["required"] if one != field]

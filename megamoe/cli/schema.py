"""`megamoe schema`: the JSON Schema of a line of a record file."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from megamoe.records.lines import SCHEMA_VERSION, RecordError


def schema(
    version: Annotated[int, typer.Option("--version", metavar="N", help="Of this version.")] = SCHEMA_VERSION,
) -> None:
    """Prints the JSON Schema of a line of a record file; results/schema holds what it prints."""
    from megamoe.records.lines import VERSIONS, record_schema

    if version not in VERSIONS:
        raise RecordError(f"there is no version {version} of records; versions: {', '.join(map(str, VERSIONS))}")
    print(json.dumps(record_schema(version), indent=1))

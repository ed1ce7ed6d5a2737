"""The specs of the checkout, read when this is imported: by a process from which others are forked, once for them all.

A fork that finds a file with another text reads that one anew. What is wrong with a spec is said where it is asked for.
"""

from __future__ import annotations

from contextlib import suppress

from megamoe.spec.load import load_specs
from megamoe.spec.marked_yaml import SpecError

with suppress(SpecError, OSError):
    load_specs()

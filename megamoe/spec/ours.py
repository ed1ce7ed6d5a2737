"""The checkout's specs, read on import so that a process that forks workers reads them once for all of them.

A fork that finds a file changed reads that file anew. Errors in a spec are reported when it is requested.
"""

from __future__ import annotations

from contextlib import suppress

from megamoe.spec.load import load_specs
from megamoe.spec.marked_yaml import SpecError

with suppress(SpecError, OSError):
    load_specs()

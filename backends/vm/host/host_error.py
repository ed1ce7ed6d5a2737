"""What stops a host program that is not a kernel's fault: a sentence that names the symbol, argument or field."""

from __future__ import annotations


class HostError(Exception):
    """The host function, its object or its arguments do not fit this runtime; the text says which and what would."""

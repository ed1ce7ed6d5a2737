"""Finds a kernel of a module by the name that it has in the source."""

from __future__ import annotations

import re
from collections.abc import Mapping

from megamoe.contract.known_names import nearest
from megamoe.contract.machine import LaunchRefusedError


def entry_named(entry: str, entries: Mapping[str, object]) -> str:
    if not isinstance(entry, str):
        raise LaunchRefusedError(f"the entry is {entry!r}; it must be the name of a kernel: {', '.join(entries)}")
    if entry in entries:
        return entry
    mangled = [name for name in entries if f"::{plain_name(name)}".endswith(f"::{entry}")]
    if len(mangled) == 1:
        return mangled[0]
    known = ", ".join(mangled or entries) or "none"
    several = "more than one" if mangled else "no"
    guess = nearest(entry, entries)
    raise LaunchRefusedError(f"the module has {several} entry {entry!r}; its entries are: {known}{guess}")


def plain_name(mangled: str) -> str:
    """ns::kernel for _ZN2ns6kernelIfEEvPT_; "" for a name that C++ did not mangle (Itanium C++ ABI 5.1.2)."""
    if not mangled.startswith("_Z"):
        return ""
    nested = mangled.startswith("_ZN")
    rest, parts = mangled[3 if nested else 2 :], list[str]()
    while found := re.match(r"L?(\d+)", rest):
        end = found.end() + int(found[1])
        parts.append(rest[found.end() : end])
        rest = rest[end:]
        if not nested:
            break
    # Anonymous namespaces get generated names that no user writes.
    return "::".join(one for one in parts if not one.startswith(("_GLOBAL__N_", "_INTERNAL_")))

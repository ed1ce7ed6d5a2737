"""The names of a kernel: the one in its C++ source, the mangled one, and the patterns that match either."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cache

from megamoe.contract.known_names import nearest
from megamoe.contract.machine import LaunchRefusedError


def entry_named(entry: str, entries: Mapping[str, object]) -> str:
    """The one of `entries` that the source calls `entry`: its own name; or, for C++, its name with or without the
    namespace, the template arguments and the types of the parameters, as in ns::k<float, 3>(float*).

    LaunchRefusedError if there is none, or more than one.
    """
    if not isinstance(entry, str):
        raise LaunchRefusedError(f"the entry is {entry!r}; it must be the name of a kernel: {_listed(entries)}")
    if entry in entries:
        return entry
    asked = _key(entry)
    found = [name for name in entries if asked in _spellings(name) or f"::{plain_name(name)}".endswith(f"::{asked}")]
    found = found if asked else []
    if len(found) == 1:
        return found[0]
    several = "more than one" if found else "no"
    known = {spelled: name for name in entries for spelled in (name, plain_name(name), _head(name)) if spelled}
    hint = "" if found else nearest(entry, known)
    if found:
        hint = "; name one with its template arguments or parameters, as listed, or by its mangled name"
        if _demangler() is None:
            hint = "; name one by its mangled name (there is no libstdc++ here to demangle names with)"
    raise LaunchRefusedError(
        f"the module has {several} entry {entry!r}; its entries are: {_listed(found or entries)}{hint}"
    )


def source_name(name: str) -> str:
    """ns::k<float, 3> for a mangled kernel or function; `name` itself if C++ has not mangled it."""
    return "::".join(one for one in _parts(_returning_nothing(_head(name))) if not one.startswith(_NAMELESS)) or name


def short_source_name(name: str) -> str:
    """`source_name`; without template arguments if it is long."""
    whole = source_name(name)
    if len(whole) <= MAX_SHORT:
        return whole
    return "::".join(one if one.startswith("operator") else one.partition("<")[0] for one in _parts(whole))


MAX_SHORT = 60
"""Longest name that keeps its template arguments, in characters: libcu++ has some of 300."""


_MANGLED = re.compile(r"\b_Z\w+")


def with_source_names(text: str) -> str:
    """`text` with `source_name` for each mangled name in it."""
    return _MANGLED.sub(lambda found: source_name(found[0]), text)


def is_named(name: str, pattern: str) -> bool:
    """Whether a glob matches a kernel's name: the mangled one, or any that `entry_named` accepts."""
    return fnmatchcase(name, pattern) or any(fnmatchcase(one, _key(pattern)) for one in _spellings(name))


def _listed(names: Mapping[str, object] | list[str]) -> str:
    told = [(name, _demangled(name)) for name in names]
    return ", ".join(f"{name} ({readable})" if readable else name for name, readable in told) or "none"


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
    return "::".join(one for one in parts if not one.startswith(_NAMELESS))


_NAMELESS = ("_GLOBAL__N_", "_INTERNAL_")


@cache
def _demangler() -> Callable[[bytes], bytes | None] | None:
    """`__cxa_demangle` of libstdc++ (Itanium C++ ABI 3.4); None if the library is not there."""
    try:
        demangle = ctypes.CDLL("libstdc++.so.6").__cxa_demangle
        free = ctypes.CDLL(None).free
    except (OSError, AttributeError):
        return None
    demangle.restype, demangle.argtypes = ctypes.c_void_p, [ctypes.c_char_p, *[ctypes.c_void_p] * 3]
    free.restype, free.argtypes = None, [ctypes.c_void_p]

    def demangled(name: bytes) -> bytes | None:
        text = demangle(name, None, None, None)
        if not text:
            return None
        try:
            return ctypes.string_at(text)
        finally:
            free(text)

    return demangled


def _demangled(name: str) -> str:
    """ns::k<float, 3>(float*, float) for a mangled name; "" for any other, or without a demangler."""
    demangle = _demangler() if name.startswith("_Z") else None
    text = demangle(name.encode()) if demangle is not None else None
    return (text or b"").decode(errors="replace").removeprefix("void ").replace("(anonymous namespace)::", "")


def _head(name: str) -> str:
    """ns::k<float, 3> of the kernel `name`; for a function that returns something, the type comes first."""
    text = _demangled(name).removesuffix(" const")
    return text[: _opening(text)]


def _returning_nothing(head: str) -> str:
    """`head` without the type of what it returns, which the mangled name of a template has."""
    depth = start = 0
    for at, sign in enumerate(head.partition("operator")[0]):
        depth += (sign in "<(") - (sign in ">)")
        if sign == " " and not depth:
            start = at + 1
    return head[start:]


def _opening(text: str) -> int:
    """Where the list of parameters begins that ends `text`; its length if there is none."""
    depth = 0
    for at in reversed(range(len(text))):
        depth += (text[at] == ")") - (text[at] == "(")
        if not depth:
            return at if text.endswith(")") else len(text)
    return len(text)


_CAST = re.compile(r"\([\w: ]+\)(?=-?\d)")
_SUFFIX = re.compile(r"(?<![\w.])(\d+)[uUlL]+\b")
_CONST = re.compile(r"\bconst\s+((?:unsigned\s+|signed\s+)?(?:long\s+long|long\s+int|short\s+int|[\w:]+))")
_UNSIGNED = re.compile(r"\bunsigned\b(?!\s+(?:int|long|short|char|__int128)\b)")


def _key(text: str) -> str:
    """`text` in one spelling: no spaces, no casts and suffixes of numbers, `const` behind its type, no void list."""
    text = _SUFFIX.sub(r"\1", _CAST.sub("", text.replace("(anonymous namespace)::", "")))
    text = _UNSIGNED.sub("unsigned int", _CONST.sub(r"\1 const", text))
    return "".join(text.split()).replace("(void)", "()")


def _spellings(name: str) -> frozenset[str]:
    """The keys of all ways to name a mangled kernel: with fewer and fewer of its scopes, with and without its template
    arguments and parameters."""
    text = _key(_demangled(name))
    head, parameters = text[: _opening(text)], text[_opening(text) :]
    scopes = [one for one in _parts(head) if not one.startswith(_NAMELESS)]
    *_, own = scopes or [""]
    bare = own.partition("<")[0]
    return frozenset(
        "::".join([*scopes[first:-1], last]) + rest
        for first in range(len(scopes))
        for last in (own, bare)
        for rest in ("", parameters)
    )


def _parts(head: str) -> Iterator[str]:
    """The parts of a qualified name, split at the `::` outside of template arguments."""
    depth, start = 0, 0
    for at, sign in enumerate(head):
        depth += (sign in "<(") - (sign in ">)")
        if not depth and head[at : at + 2] == "::":
            yield head[start:at]
            start = at + 2
    yield head[start:]

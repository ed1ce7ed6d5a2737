"""The names of a kernel: the one in its C++ source, the mangled one, and the patterns that match either."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
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
    found = entries_named(entry, entries)
    if len(found) == 1:
        return found[0]
    several = "more than one" if found else "no"
    known = {spelled: name for name in entries for spelled in (name, plain_name(name), source_name(name)) if spelled}
    hint = "" if found else nearest(entry, known)
    if found:
        hint = "; name one with its template arguments or parameters, as listed, or by its mangled name"
        if _demangler() is None:
            hint = "; name one by its mangled name (there is no libstdc++ here to demangle names with)"
    raise LaunchRefusedError(
        f"the module has {several} entry {entry!r}; its entries are: {_listed(found or entries)}{hint}"
    )


def entries_named(entry: str, entries: Iterable[str]) -> list[str]:
    """Those of C++ that the source calls `entry`; see `entry_named`."""
    asked = _key(entry)
    return [name for name in entries if asked in _spellings(name)]


def source_name(name: str) -> str:
    """ns::k<float, 3> for a mangled kernel or function; `name` itself if C++ has not mangled it."""
    return "::".join(_scopes(_declared(_demangled(name))[0])) or name


def short_source_name(name: str) -> str:
    """`source_name`; without template arguments if it is long."""
    whole = source_name(name)
    if len(whole) <= MAX_SHORT:
        return whole
    return "::".join(map(_bare, _scopes(whole)))


MAX_SHORT = 60
"""Longest name that keeps its template arguments, in characters: libcu++ has some of 300."""


_MANGLED = re.compile(r"\b_Z\w+")


def with_source_names(text: str) -> str:
    """`text` with `source_name` for each mangled name in it."""
    return _MANGLED.sub(lambda found: source_name(found[0]), text)


def is_named(name: str, pattern: str) -> bool:
    """Whether a glob matches a kernel's name: the mangled one, or any that `entry_named` accepts."""
    asked, spellings = _key(pattern), _spellings(name)
    return fnmatchcase(name, pattern) or asked in spellings or any(fnmatchcase(one, asked) for one in spellings)


def _listed(names: Mapping[str, object] | list[str]) -> str:
    told = [(name, "".join(_declared(_demangled(name)))) for name in names]
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
    """void ns::k<float, 3>(float*, float) for a mangled name; "" for any other, or without a demangler."""
    demangle = _demangler() if name.startswith("_Z") else None
    text = demangle(name.encode()) if demangle is not None else None
    return (text or b"").decode(errors="replace").replace("(anonymous namespace)::", "")


# Demangled names. libstdc++ keeps `>` of an expression within parentheses, and puts a space between two that close
# template arguments.


_BEHIND = re.compile(r"(?:\s*(?:\bconst|\bvolatile|\bnoexcept|&&?|\[\d*\]|\[clone [^\]]*\]))+$")
"""What follows the parameters, those of functions that return an array among it."""
_TOKENS = re.compile(
    r"""\boperator(?: ?\(\)| ?\[\]|"" ?\w+|->\*?|<=>|<<=?|>>=?|&&|\|\||\+\+|--|[-+*/%^&|~!=<>,]=?)? ?"""
    r"|\s(?:const|volatile|noexcept|&&?)(?=\s|::|$)|->|<=>|<<|>>|[<>]=|::|.",
    re.DOTALL,
)
"""The name of an operator is one token, and so is a qualifier of a member function."""


def _outside(text: str) -> Iterator[tuple[int, str]]:
    """The tokens of a demangled name that are in no template arguments, parentheses or braces, and where they begin.

    The first sign of each pair of brackets is among them.
    """
    angles = groups = 0
    for found in _TOKENS.finditer(text):
        at, token = found.start(), found[0]
        if not angles and not groups:
            yield at, token
        if token in ("(", "{"):
            groups += 1
        elif token in (")", "}"):
            groups -= 1
        elif not groups:
            # What stands behind an operand, as in `(N)<(4)`, compares.
            angles += token == "<" and (not angles or bool(re.match(r"[\w\]]", text[at - 1])))
            angles -= token == ">" and angles > 0


def _declared(text: str) -> tuple[str, str]:
    """ns::k<float, 3> and (float*, float) of a demangled name: without the type of what it returns, which the mangled
    name of a template has, and without what follows the parameters."""
    text = _BEHIND.sub("", text)
    head, parameters = text[: _opening(text)], text[_opening(text) :]
    start = 0
    for at, token in _outside(head):
        if token.startswith("operator"):
            break
        start = at + 1 if token == " " else start
    own = head[start:]
    # Around the name of a function that returns a pointer to a function, or a reference to an array.
    around = own or parameters
    return _declared(around[1:-1].lstrip("*&")) if around.startswith(("(*", "(&")) else (own, parameters)


def _bare(part: str) -> str:
    """A part of a name without its template arguments."""
    return part[: next((at for at, token in _outside(part) if token == "<"), len(part))]


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
    head, parameters = _declared(_demangled(name) or plain_name(name))
    scopes = _scopes(head)
    own = scopes[-1] if scopes else ""
    spelled = (
        "::".join([*scopes[first:-1], last]) + rest
        for first in range(len(scopes))
        for last in (own, _bare(own))
        for rest in ("", parameters)
    )
    return frozenset(map(_key, spelled)) - {""}


def _scopes(head: str) -> list[str]:
    """The parts of a qualified name, but for namespaces that its source does not name."""
    parts, start = list[str](), 0
    for at, token in _outside(head):
        if token == "::":
            parts.append(head[start:at])
            start = at + 2
    return [one for one in (*parts, head[start:]) if one and not one.startswith(_NAMELESS)]

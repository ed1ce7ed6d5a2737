"""A relocatable object in memory: reads its symbols and links its code with LLVM's JIT linker."""

from __future__ import annotations

import platform
import struct
from collections.abc import Iterable
from functools import cache
from typing import Final

import llvmlite.binding as llvm

from backends.vm.host.abi import HostError

_MACHINES: Final = {"x86_64": 62, "AMD64": 62, "aarch64": 183, "arm64": 183}
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_SYMBOL_TABLE, _NO_BITS = 2, 8
LINKER_SYMBOLS: Final = frozenset({"", "_GLOBAL_OFFSET_TABLE_"})
# Functions that compilers call on their own, and the host's printf. The process's C library defines them.
PROCESS_SYMBOLS: Final = frozenset({"memcpy", "memmove", "memset", "memcmp", "malloc", "free", "strlen", "printf"})


class ObjectFile:
    """The symbols of an ELF64 relocatable object: `defined` and `undefined` names.

    HostError if the bytes are not such an object, are truncated, or are for another processor. LLVM's own reader is not
    used because it ends the process on a damaged file.
    """

    def __init__(self, code: bytes) -> None:
        _check_header(code)
        self.code = code
        try:
            symbols = list(_symbols(code))
        except (ValueError, IndexError, struct.error) as error:
            raise HostError(f"the host object ({len(code)} bytes) is damaged: {error}") from None
        self.undefined = frozenset(name for name, section in symbols if section == 0) - LINKER_SYMBOLS
        self.defined = frozenset(name for name, section in symbols if section != 0) - LINKER_SYMBOLS


class LinkedObject:
    """An object whose code can be called. Keep it alive while its code runs. `close` frees its memory."""

    def __init__(self, source: ObjectFile) -> None:
        _ready()
        machine = llvm.Target.from_default_triple().create_target_machine(codemodel="large", reloc="pic", jit=True)
        self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
        self._engine.add_object_file(llvm.ObjectFileRef.from_data(source.code))
        self._engine.finalize_object()

    def address(self, symbol: str) -> int:
        """The address of a function or of data. HostError if the object does not define `symbol`."""
        found = self._engine.get_function_address(symbol)
        if not found:
            raise HostError(f"the host object has no symbol {symbol!r}")
        return found

    def close(self) -> None:
        """Unmap the code."""
        self._engine.close()


def bind_symbols(addresses: Iterable[tuple[str, int]]) -> None:
    """Bind `addresses` for every object linked from now on."""
    for name, address in addresses:
        llvm.add_symbol(name, address)


@cache
def _ready() -> None:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()


def _check_header(code: bytes) -> None:
    if len(code) < 64 or code[:4] != b"\x7fELF":
        raise HostError(f"the host object is no ELF file: it has {len(code)} bytes and begins with {code[:4].hex()!r}")
    kind, machine = struct.unpack_from("<HH", code, 16)
    if code[4] != 2 or kind != 1:
        raise HostError(f"the host object is an ELF file of class {code[4]} and type {kind}, not a 64-bit relocatable")
    here = _MACHINES.get(platform.machine())
    if machine != here:
        raise HostError(
            f"the host object is for ELF machine {machine}; this processor ({platform.machine()}) runs {here}: "
            f"compile it on this machine"
        )


def _symbols(code: bytes) -> Iterable[tuple[str, int]]:
    """Name and section number (0: undefined) of every symbol. ValueError for an inconsistent file."""
    start, size, count = (*struct.unpack_from("<Q", code, 40), *struct.unpack_from("<HH", code, 58))
    if size != _SECTION.size:
        raise ValueError(f"section headers of {size} bytes, where {_SECTION.size} are the format's")
    sections = [_SECTION.unpack_from(code, start + index * size) for index in range(count)]
    for index, section in enumerate(sections):
        if section[1] != _NO_BITS and section[4] + section[5] > len(code):
            raise ValueError(f"section {index} ends at byte {section[4] + section[5]}, after the end of the file")
    tables = [section for section in sections if section[1] == _SYMBOL_TABLE]
    if len(tables) != 1:
        raise ValueError(f"{len(tables)} symbol tables, where an object has one")
    names = _content(code, sections[tables[0][6]])
    for name, _, _, section, _, _ in _SYMBOL.iter_unpack(_content(code, tables[0])):
        yield names[name : names.index(b"\0", name)].decode(), section


def _content(code: bytes, section: tuple[int, ...]) -> bytes:
    return code[section[4] : section[4] + section[5]]

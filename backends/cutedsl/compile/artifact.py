"""A compiled CuTeDSL function: a host object, the PTX and cubin of its kernels, their resources, how to call it.

The attributes read from a cubin were checked against `ptxas -v` of the same PTX.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from megamoe.contract import HostArg, HostProgram, Target


@dataclass(frozen=True, slots=True)
class Resources:
    """What ptxas gave one kernel: registers per thread, and bytes of stack per thread (0: no spills)."""

    registers: int
    stack: int


@dataclass(frozen=True, slots=True)
class Artifact:
    """A compiled host function. `parameters`: their names in order. `resources`: by kernel entry.

    `host_object` has two entries of the same function: `entry` takes TVM FFI values and checks them, `packed_entry`
    takes packed descriptors and trusts them. Use `entry`: its structures (DLTensor, TVMFFIAny) are public and
    versioned, and it says which argument is wrong. `compiler`: names and versions of the compiler's packages.
    """

    target: Target
    ptx: str
    cubin: bytes
    host_object: bytes
    entry: str
    packed_entry: str
    parameters: tuple[str, ...]
    compiler: str
    resources: Mapping[str, Resources] = field(default_factory=dict[str, Resources])

    def program(
        self,
        arguments: Mapping[str, HostArg],
        scratch: Mapping[str, int] | None = None,
        convention: Literal["tvm_ffi", "packed"] = "tvm_ffi",
        prepare: Mapping[str, HostArg] | None = None,
        prepared: tuple[str, ...] = (),
    ) -> HostProgram:
        """The call of this function on `arguments`, by parameter name, with workspaces `scratch` (bytes by name).

        `prepare`: the arguments of the call that prepares weights, if there is one; `prepared`: the workspaces that it
        fills. ValueError if the arguments are not exactly those of the function's parameters.
        """
        for given in (arguments, prepare or arguments):
            if set(given) != set(self.parameters):
                raise ValueError(
                    f"{self.entry} takes ({', '.join(self.parameters)}); arguments were given for ({', '.join(given)})"
                )
        return HostProgram(
            target=self.target,
            ptx=self.ptx,
            host_object=self.host_object,
            entry=self.entry if convention == "tvm_ffi" else self.packed_entry,
            args=tuple(arguments[name] for name in self.parameters),
            convention=convention,
            scratch=dict(scratch or {}),
            compiler=self.compiler,
            prepare=tuple(prepare[name] for name in self.parameters) if prepare else (),
            prepared=prepared,
        )


_SECTION: Final = struct.Struct("<IIQQQQIIQQ")
_SYMBOL: Final = struct.Struct("<IBBHQQ")
_SYMBOL_TABLE, _INFO = 2, ".nv.info"
# Records of .nv.info: a format byte (4: a value of the given size follows), an attribute, the size.
_SIZED, _REGISTERS, _STACK = 4, 0x2F, 0x12


def kernel_resources(cubin: bytes) -> dict[str, Resources]:
    """Resources by kernel entry. ValueError if `cubin` is not a whole ELF64 file."""
    try:
        sections = dict(_sections(cubin))
        table = next(header for header in _headers(cubin) if header[1] == _SYMBOL_TABLE)
        names = _content(cubin, _headers(cubin)[table[6]])
        symbols = [_name(names, one[0]) for one in _SYMBOL.iter_unpack(_content(cubin, table))]
        values = {
            (attribute, symbols[symbol]): value for attribute, symbol, value in _records(sections.get(_INFO, b""))
        }
    except (struct.error, IndexError, ValueError, StopIteration) as error:
        raise ValueError(f"a cubin of {len(cubin)} bytes cannot be read: {error}") from None
    return {
        symbol: Resources(registers, values.get((_STACK, symbol), 0))
        for (attribute, symbol), registers in values.items()
        if attribute == _REGISTERS
    }


def _headers(cubin: bytes) -> list[tuple[int, ...]]:
    (start,), (count,) = struct.unpack_from("<Q", cubin, 40), struct.unpack_from("<H", cubin, 60)
    return [_SECTION.unpack_from(cubin, start + index * _SECTION.size) for index in range(count)]


def _sections(cubin: bytes) -> Iterator[tuple[str, bytes]]:
    headers = _headers(cubin)
    names = _content(cubin, headers[struct.unpack_from("<H", cubin, 62)[0]])
    for header in headers:
        yield _name(names, header[0]), _content(cubin, header)


def _content(cubin: bytes, header: tuple[int, ...]) -> bytes:
    return cubin[header[4] : header[4] + header[5]]


def _name(names: bytes, start: int) -> str:
    return names[start : names.index(b"\0", start)].decode()


def _records(info: bytes) -> Iterator[tuple[int, int, int]]:
    at = 0
    while at < len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if form == _SIZED:
            if size == 8:
                yield attribute, *struct.unpack_from("<II", info, at)
            at += size

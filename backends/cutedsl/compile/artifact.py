"""A compiled CuTeDSL function: a host object, the PTX and cubin of its kernels, and how to call it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from megamoe.contract import HostArg, HostProgram, Target


@dataclass(frozen=True, slots=True)
class Resources:
    """What ptxas gave one kernel: registers a thread, and bytes of stack a thread (0: no spills)."""

    registers: int
    stack: int


@dataclass(frozen=True, slots=True)
class Artifact:
    """A compiled host function. `parameters` are its names in order; `resources` by kernel entry.

    `host_object` has two entries of the same function: `entry` takes TVM FFI values and checks them, `packed_entry`
    takes packed descriptors and trusts them. Use the first: its structures (DLTensor, TVMFFIAny) are public and
    versioned, and it says which argument is wrong. `compiler`: distribution and version.
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
    ) -> HostProgram:
        """The call of this function on `arguments`, by parameter name, with workspaces `scratch` (bytes by name).

        ValueError if an argument is missing, or is for a parameter that the function does not have.
        """
        if set(arguments) != set(self.parameters):
            raise ValueError(
                f"{self.entry} takes ({', '.join(self.parameters)}); arguments were given for ({', '.join(arguments)})"
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
        )

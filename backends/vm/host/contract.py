"""What a host program must have to be run; megamoe.contract.HostProgram has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable


@runtime_checkable
class HostProgramLike(Protocol):
    """A compiled host function with the PTX of its kernels."""

    @property
    def target(self) -> str: ...
    @property
    def ptx(self) -> str: ...
    @property
    def host_object(self) -> bytes: ...
    @property
    def entry(self) -> str: ...
    @property
    def convention(self) -> str: ...
    @property
    def args(self) -> Sequence[object]: ...
    @property
    def scratch(self) -> Mapping[str, int]: ...
    @property
    def compiler(self) -> str: ...

"""The parameters of an entry, spelt once: a dataclass declares them in PTX and fills them at launch.

    @dataclass(frozen=True, slots=True)
    class ScaleParams(Parameters):
        y: Pointer
        n: U32

`ScaleParams.declare(x)` declares and loads them, in order; `ScaleParams.arguments(n=8)` gives a launch's arguments.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Self, get_type_hints

from backends.ptx.builder import Builder
from backends.ptx.operands import BuilderError, Register
from megamoe.contract import BufferArg, KernelArg, ScalarArg, TensorMapArg

_MAP = "map"
Map = Annotated[Register, _MAP]
"""A tensor map; the register holds its generic address."""
Pointer = Annotated[Register, "u64"]
"""The address of a tensor or workspace: the one named like the field, unless the launch names another."""
U32 = Annotated[Register, "u32"]
S32 = Annotated[Register, "s32"]
F32 = Annotated[Register, "f32"]

Value = TensorMapArg | str | float | None | tuple[KernelArg, ...]
"""A value in a launch: a tensor map, a tensor's name (None: a null pointer), a number, or a nested dataclass's
arguments."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """Base of the parameter dataclasses: each field is a Map, Pointer, U32, S32, F32 or another Parameters."""

    @classmethod
    def declare(cls, x: Builder) -> Self:
        """Declares the parameters and loads them."""
        return cls(**{name: _declared(x, name, kind) for name, kind in cls._kinds().items()})

    @classmethod
    def arguments(cls, **values: Value) -> tuple[KernelArg, ...]:
        """The arguments of a launch, in the order of the fields.

        Raises BuilderError for a value without a field, and for a field without a value unless it is a Pointer.
        """
        kinds = cls._kinds()
        unknown = values.keys() - kinds
        if unknown:
            raise BuilderError(f"{cls.__name__} has {', '.join(kinds)}; a launch gives {', '.join(sorted(unknown))}")
        return tuple(arg for name, kind in kinds.items() for arg in cls._filled(name, kind, values))

    @classmethod
    def _kinds(cls) -> dict[str, object]:
        """Field -> "map", a PTX type, or the nested dataclass."""
        hints = get_type_hints(cls, include_extras=True)
        return {item.name: getattr(hints[item.name], "__metadata__", (hints[item.name],))[0] for item in fields(cls)}

    @classmethod
    def _filled(cls, name: str, kind: object, values: dict[str, Value]) -> tuple[KernelArg, ...]:
        value = values.get(name, name if kind == "u64" else None)
        match value:
            case TensorMapArg() if kind == _MAP:
                return (value,)
            case tuple() if isinstance(kind, type):
                return value
            case str() if kind == "u64":
                return (BufferArg(value),)
            case None if kind == "u64":
                return (ScalarArg("u64", 0),)
            case int() | float() if isinstance(kind, str) and kind not in (_MAP, "u64"):
                return (ScalarArg(kind, value),)
            case _:
                raise BuilderError(f"{cls.__name__}.{name} is {kind}; a launch gives {value!r}")


def _declared(x: Builder, name: str, kind: object) -> Register | Parameters:
    if isinstance(kind, type) and issubclass(kind, Parameters):
        return kind.declare(x)
    return x.tensor_map(f"{name}_map") if kind == _MAP else x.param(name, str(kind))

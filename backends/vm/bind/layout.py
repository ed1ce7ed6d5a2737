"""Where the variables and parameters of a function lie in their state spaces."""

from __future__ import annotations

from dataclasses import dataclass, field

from backends.vm.bind.code import Code, build
from backends.vm.faults import UnknownInstructionError
from backends.vm.memory.shared import RESERVED
from backends.vm.ptx.ast import Function, Module, Variable


@dataclass(slots=True)
class FunctionLayout:
    """A function's code with the offsets of everything it can name. Sizes and offsets in bytes."""

    code: Code
    offsets: dict[str, tuple[str, int]] = field(default_factory=dict[str, tuple[str, int]])
    dynamic: frozenset[str] = frozenset()
    static_shared: int = 0
    dynamic_align: int = 16
    local_size: int = 0
    param_size: int = 0

    def place_of(self, name: str, dynamic_offset: int) -> tuple[str, int]:
        """State space and offset of a symbol; dynamic shared memory begins at `dynamic_offset`."""
        if name in self.dynamic:
            return "shared", dynamic_offset
        return self.offsets[name]


def _align(offset: int, align: int) -> int:
    return -(-offset // align) * align


def lay_out(module: Module, function: Function) -> FunctionLayout:
    """Bind the code of `function` and place its parameters, locals and the module's shared variables."""
    visible = {**module.variables, **{v.name: v for v in (*function.variables, *function.params)}}
    spaces = {name: variable.space for name, variable in visible.items()}
    spaces.update(dict.fromkeys(function.labels, "code"))
    layout = FunctionLayout(build(function, spaces))
    dynamic: set[str] = set()
    shared = RESERVED
    for variable in (*module.variables.values(), *function.variables):
        if variable.space == "shared" and variable.size == 0:
            dynamic.add(variable.name)
            layout.dynamic_align = max(layout.dynamic_align, variable.align)
        elif variable.space == "shared":
            shared = _align(shared, variable.align)
            layout.offsets[variable.name] = ("shared", shared)
            shared += variable.size
        elif variable.space == "local":
            layout.local_size = _place(layout, variable, layout.local_size)
        else:
            layout.offsets[variable.name] = (variable.space, 0)
    for param in function.params:
        layout.param_size = _place(layout, param, layout.param_size)
    layout.static_shared = shared - RESERVED
    layout.dynamic = frozenset(dynamic)
    for name, _, _ in layout.code.rows.addresses:
        if name != "_" and name not in dynamic and name not in layout.offsets:
            raise UnknownInstructionError(
                f"function {function.name} takes the address of `{name}`, which is not declared"
            )
    return layout


def _place(layout: FunctionLayout, variable: Variable, offset: int) -> int:
    offset = _align(offset, variable.align)
    layout.offsets[variable.name] = (variable.space, offset)
    return offset + variable.size

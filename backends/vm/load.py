"""PTX text to a module whose entries a machine can launch: parse, then bind each entry on first use."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from backends.vm import isa  # noqa: F401  (registers every instruction family)
from backends.vm.bind.function import bind_function
from backends.vm.faults import LaunchError, UnknownInstructionError, first_told
from backends.vm.machine.code import BoundFunction
from backends.vm.ptx.ast import Module
from backends.vm.ptx.parse_cache import Shelf, parse_cached
from backends.vm.ptx.tree import PtxSyntaxError


class LoadedModule:
    """A parsed module whose functions are bound on first use and then kept. `ring`: floats are elements of a ring."""

    def __init__(self, module: Module, *, ring: bool = False) -> None:
        self.module = module
        self.ring = ring
        self._bound: dict[str, BoundFunction] = {}

    def entry(self, name: str) -> BoundFunction:
        """Entry `name`, bound; LaunchError if the module has none."""
        function = self.module.functions.get(name)
        if function is None or not function.is_entry:
            entries = ", ".join(n for n, f in self.module.functions.items() if f.is_entry) or "none"
            raise LaunchError(f"the module has no entry {name!r}; its entries are: {entries}")
        if name not in self._bound:
            self._bound[name] = bind_function(self.module, function, ring=self.ring)
        return self._bound[name]


@lru_cache(maxsize=24)  # a decoded kernel of attention holds 15 MB
def load(ptx: str, shelf: Shelf | None = None, *, ring: bool = False) -> LoadedModule:
    """Parse `ptx` and cache the result, so that a kernel is decoded once however often it is launched.

    `shelf` keeps parsed modules between processes. `ring`: floats are elements of a ring, as under the accumulation
    policy "ring" of backends.vm.numerics.accumulate; all other policies share a module. Raises PtxSyntaxError for text
    that is not PTX, and says then which other instructions it would refuse.
    """
    try:
        return LoadedModule(parse_cached(ptx, shelf=shelf), ring=ring)
    except PtxSyntaxError as wrong:
        told = _all_told(wrong)
        if len(told) == 1:
            raise
        raise ManyWrongError.of(wrong, told) from None


class ManyWrongError(PtxSyntaxError):
    """Several instructions of a text that is not PTX. The message has a line for each of the first ones."""

    @classmethod
    def of(cls, first: PtxSyntaxError, told: Sequence[str]) -> ManyWrongError:
        """One at the place of `first` that has `told` for its text."""
        many = cls(first.problem, first.name, first.line, first.column)
        many.args = ("\n".join(told),)
        return many


def _all_told(wrong: PtxSyntaxError) -> Sequence[str]:
    """What is wrong with a text, by PTX line: what is outside the grammar, names that are not declared, each once, and
    the refusals of all entries."""
    every = (wrong, *wrong.others)
    names = {one.problem: (one.line or 0, str(one)) for one in reversed(every) if not one.outside_grammar}
    found = {*names.values(), *((one.line or 0, str(one)) for one in every if one.outside_grammar)}
    rest = None if wrong.rest is None else LoadedModule(wrong.rest)
    for name, function in wrong.rest.functions.items() if wrong.rest is not None else ():
        try:
            if rest is not None and function.is_entry:
                rest.entry(name)
        except UnknownInstructionError as refused:
            found.update((line, f"{wrong.name}, {said}") for line, said in refused.by_line)
    return first_told([said for _, said in sorted(found)])

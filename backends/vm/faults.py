"""What stops a run: a kernel that breaks a rule of the machine (Fault), or PTX that this machine does not know."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Fault(Exception):
    """A rule of the machine broken while running. The machine fills in where; the instruction says what.

    `rule` is a stable slug (for tests and reports), `detail` a sentence fragment with the values seen.
    """

    rule: str
    detail: str
    lane: int | None = None
    address: int | None = None
    kernel: str = ""
    line: int = 0
    text: str = ""
    where: str = ""
    history: list[str] = field(default_factory=list[str])

    def __str__(self) -> str:
        place = f"kernel {self.kernel}, PTX line {self.line} `{self.text}`" if self.line else f"kernel {self.kernel}"
        lane = f", lane {self.lane}" if self.lane is not None else ""
        address = f", address {self.address:#x}" if self.address is not None else ""
        history = "".join(f"; {item}" for item in self.history)
        return f"[{self.rule}] {place}, {self.where}{lane}{address}: {self.detail}{history}"


class UnknownInstructionError(Exception):
    """PTX whose meaning this machine does not have: the text names the spelling, the line and what is known."""


class LaunchError(Exception):
    """A launch that cannot be performed: wrong parameters, too much shared memory, no such entry."""

"""Row: one cell of work, the states it may end in, and the facts of a device."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from pydantic import BaseModel, ConfigDict

Status = Literal["passed", "failed", "error", "crashed", "timed_out", "unsupported", "not_run"]
STATUSES: tuple[Status, ...] = get_args(Status)
Temperature = Literal["cold", "hot"]


class Row(NamedTuple):
    """What one record is about: the key under which the gate looks for it. `case` is a Case.id."""

    case: str
    backend: str
    target: str
    executor: str
    schedule: str

    @property
    def op(self) -> str:
        """The op of the case."""
        return self.case.partition(":")[0]

    @property
    def rerun(self) -> str:
        """The command that judges exactly this row again, with the specs of the checkout."""
        return self.rerun_with(None)

    def rerun_with(self, specs: Path | None) -> str:
        """As `rerun`, with the specs of the folder `specs`; None means those of the checkout."""
        options = [part for name, value in self._asdict().items() for part in (f"--{name}", value)]
        folder = [] if specs is None else ["--specs", str(specs)]
        return shlex.join(["megamoe", "run", *options, *folder])

    def __str__(self) -> str:
        return f"{self.case} on {self.backend} {self.target} {self.executor} {self.schedule}"


class DeviceFacts(BaseModel):
    """The accelerator on which rows ran, as its driver describes it. Clocks in MHz, as found when the run began.

    `copy_bytes_per_s` (bytes read plus bytes written) and `bf16_flops_per_s` were measured in the same session; floors
    are made from them. `flushed_l2_ratio` proves that the flush between cold samples works: it is the time to read a
    buffer that fits in the L2 after a flush, over the time without one.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    compute_capability: str
    driver: str
    toolkit: str
    multiprocessors: int
    memory_bytes: int
    l2_bytes: int
    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    power_limit_w: float | None = None
    copy_bytes_per_s: float | None = None
    bf16_flops_per_s: float | None = None
    flushed_l2_ratio: float | None = None

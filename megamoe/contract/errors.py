"""What a backend or an executor raises to decline, and what a device raises when it fails."""

from __future__ import annotations

from typing import ClassVar


class UnsupportedError(Exception):
    """This backend or executor cannot do this case or target; the text says why. Becomes status `unsupported`."""


class DeviceError(Exception):
    """A return code of the driver, as a sentence: the call, the code and its meaning, and what was being done."""


class DeviceLostError(DeviceError):
    """A kernel's fault (an illegal address, a trap) that no further call of this process survives.

    `met` is the first one of this process: whoever gives rows to it must let it end and start another.
    """

    met: ClassVar[str | None] = None

    def __init__(self, sentence: str) -> None:
        super().__init__(f"{sentence}; this process can use the device no more")
        DeviceLostError.met = DeviceLostError.met or str(self)

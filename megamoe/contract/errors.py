"""What a backend or an executor raises to decline, and what a device raises when it fails."""

from __future__ import annotations

from typing import ClassVar


class UnsupportedError(Exception):
    """This backend or executor cannot do this case or target. The text says why; the status becomes `unsupported`."""


class DeviceError(Exception):
    """A return code of the driver as a sentence: the call, the code, its meaning, and what was being done."""


class DeviceLostError(DeviceError):
    """A fault of a kernel (an illegal address, a trap) after which this process cannot use the device.

    `met` is the first one of this process. If it is set, give the process no more rows: end it and start another.
    """

    met: ClassVar[str | None] = None

    def __init__(self, sentence: str) -> None:
        super().__init__(f"{sentence}; this process can use the device no more")
        DeviceLostError.met = DeviceLostError.met or str(self)

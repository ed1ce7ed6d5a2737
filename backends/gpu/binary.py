"""From PTX to what the driver loads: a cubin by a registered assembler, or the text for the driver's own compiler."""

from __future__ import annotations

from functools import lru_cache
from importlib.metadata import entry_points

from megamoe.contract import DeviceError, Target, UnsupportedError

GROUP = "megamoe.assemblers"


@lru_cache(maxsize=8)
def device_code(ptx: str, target: Target) -> bytes:
    """A cubin for `target`, or the PTX as the driver takes it (ended by a zero) where no assembler is to be had.

    The assembler comes first: the driver's own compiler refuses PTX newer than the driver (9.0 for CUDA 13.0).
    DeviceError if an assembler refuses the text.
    """
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        try:
            return point.load()(ptx, target).cubin
        except UnsupportedError:
            continue
        except Exception as error:
            raise DeviceError(f"the assembler {point.name} refuses the program for {target}: {error}") from error
    return ptx.encode() + b"\0"

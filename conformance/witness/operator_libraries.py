"""Cases of NVIDIA's CuTeDSL examples."""

from __future__ import annotations

CASES = ()

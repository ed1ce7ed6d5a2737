"""The tests: laws of the kernels, the machine, the harness; what an H200 answered; fakes."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
"""The checkout."""
SILICON = ROOT / "conformance" / "silicon"
"""What an H200 answered."""
MAX_KEPT_MIB = 512
"""By how much a process of tests may grow before it gives memory back, which takes it 0.1 s and more each time."""

"""The tests: laws of the kernels, the machine, the harness; what an H200 answered; fakes."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
"""The checkout."""
SILICON = ROOT / "conformance" / "silicon"
"""What an H200 answered."""

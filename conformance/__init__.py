"""The tests: laws of the kernels, the machine and the harness, recorded answers of an H200, and fakes."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
"""Root of the checkout."""
SILICON = ROOT / "conformance" / "silicon"
"""Folder of the recorded answers of an H200."""

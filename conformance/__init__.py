"""The tests: laws of the kernels, the machine and the harness, recorded answers of an H200, and fakes."""

import os
import sys
from pathlib import Path

# Where a machine forbids bytecode, every worker and every command under test would compile our modules again, and
# rewrite the assertions of ours and of hypothesis. This file is the first of ours that pytest imports.
sys.dont_write_bytecode = False
os.environ["PYTHONDONTWRITEBYTECODE"] = ""

ROOT = Path(__file__).resolve().parents[1]
"""Root of the checkout."""
SILICON = ROOT / "conformance" / "silicon"
"""Folder of the recorded answers of an H200."""

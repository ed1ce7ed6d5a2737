"""megamoe: one matrix of shapes, two kernel backends, one reference, and a verdict for every cell."""

from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
"""The folder that holds specs/, conformance/ and results/."""
SPECS = CHECKOUT / "specs" if (CHECKOUT / "specs").is_dir() else Path(__file__).resolve().parent / "specs"
"""The specs of the checkout, or those that a wheel brings."""

"""megamoe: one matrix of shapes, two kernel backends, one reference, and a verdict for every cell."""

from importlib import import_module
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[1]
"""The folder that holds specs/, conformance/ and results/."""
SPECS = CHECKOUT / "specs" if (CHECKOUT / "specs").is_dir() else Path(__file__).resolve().parent / "specs"
"""The specs of the checkout, or the ones that the wheel ships."""
OPERATORS = {
    "attention": "attention",
    "SequenceLengths": "sequences",
    "moe": "moe",
    "MoeWeights": "moe",
    "load_moe_weights": "checkpoint",
    "ExpertParallelMoe": "expert_parallel",
}
"""Name -> module of megamoe.torch_ops. These need torch, so each is imported on first use."""


def __getattr__(name: str) -> Any:
    if name not in OPERATORS:
        raise AttributeError(f"module 'megamoe' has no attribute {name!r}; its operators are {', '.join(OPERATORS)}")
    found = getattr(import_module(f"megamoe.torch_ops.{OPERATORS[name]}"), name)
    globals()[name] = found
    return found

"""The user's path: the ops of the specs as PyTorch operators, which find kernels and machines by entry point.

`megamoe.attention`, `megamoe.moe` and related names (listed in megamoe/__init__.py) are imported from here on first
use, so that `import megamoe` imports neither torch nor a backend.
"""

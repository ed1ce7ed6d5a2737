"""The user's path: the ops of the specs as PyTorch operators, which find kernels and machines by entry point.

`megamoe.attention`, `megamoe.moe` and their company (megamoe/__init__.py has the list) are imported from here when they
are first asked for, so that `import megamoe` imports neither torch nor a backend.
"""

"""Kernels with one instruction changed, each of which a check must catch."""

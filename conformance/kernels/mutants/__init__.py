"""Kernels with one thing changed; a check must notice each."""

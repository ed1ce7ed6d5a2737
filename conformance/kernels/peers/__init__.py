"""Promises of the wrappers of foreign kernels."""

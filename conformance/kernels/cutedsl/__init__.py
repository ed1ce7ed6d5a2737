"""Promises of the CuTeDSL kernels and of their compilation."""

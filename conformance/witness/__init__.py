"""Kernels of other packages and of public repositories, compiled without a GPU and run by the VM.

`python -m conformance.witness [--sources DIR]`.
"""

"""Kernels of other packages, compiled without a GPU and run by the VM: `python -m conformance.witness`."""

"""Kernels that none of us wrote, compiled without a GPU and run by the VM: `python -m conformance.witness`."""

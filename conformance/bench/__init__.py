"""Benchmarks: rows on a device, and what this host pays for the harness and the VM."""

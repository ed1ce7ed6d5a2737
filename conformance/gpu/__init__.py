"""Witnesses on a device: small programs that must give the VM's results there, and faults that must be survived."""

"""Witnesses on a device: small programs that must give the VM's results, and faults that a run must survive."""

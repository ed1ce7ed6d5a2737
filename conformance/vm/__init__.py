"""Tests of the PTX virtual machine, one folder per room of backends/vm."""

"""Tests of the PTX virtual machine, a folder a room of backends/vm."""

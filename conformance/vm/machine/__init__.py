"""Tests of backends/vm/machine."""

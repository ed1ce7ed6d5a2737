"""Tests of backends/vm/host."""

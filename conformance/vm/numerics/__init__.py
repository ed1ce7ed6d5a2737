"""Tests of backends/vm/numerics."""

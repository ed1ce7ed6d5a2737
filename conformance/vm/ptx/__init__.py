"""Tests of backends/vm/ptx."""

"""Tests of backends/vm/isa."""

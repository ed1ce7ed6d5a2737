"""Tests of backends/vm/trace."""

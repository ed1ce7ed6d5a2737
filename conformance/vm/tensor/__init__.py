"""Tests of backends/vm/tensor."""

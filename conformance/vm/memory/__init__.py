"""Tests of backends/vm/memory."""

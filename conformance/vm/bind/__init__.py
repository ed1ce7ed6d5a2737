"""Tests of backends/vm/bind."""

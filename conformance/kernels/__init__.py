"""Tests of the kernels: laws, mutants and the promises of each backend."""

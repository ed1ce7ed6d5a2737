"""Tests of the kernels: laws, mutants and what each backend promises."""

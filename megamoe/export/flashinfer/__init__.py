"""Datasets for flashinfer-bench: its format, definitions of our ops, traces of our rows, and what their code calls."""

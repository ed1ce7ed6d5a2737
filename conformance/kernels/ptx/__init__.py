"""Tests of the raw-PTX kernels and of the builder that writes them."""

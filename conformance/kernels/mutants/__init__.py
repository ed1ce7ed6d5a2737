"""Kernels with one instruction changed; a check must catch each."""

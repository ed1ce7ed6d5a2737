"""FMHA forward for sm_90a: kernel.py says how it is built and called."""

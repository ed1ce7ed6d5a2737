"""FMHA forward for sm_100a: kernel.py says how it is built and called."""

"""FMHA forward for sm_100a in CuTeDSL."""

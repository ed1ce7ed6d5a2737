"""FMHA forward for sm_90a in CuTeDSL."""

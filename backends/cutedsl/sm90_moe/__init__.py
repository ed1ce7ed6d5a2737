"""NVFP4 MoE for sm_90a in CuTeDSL."""

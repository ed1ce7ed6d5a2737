"""NVFP4 MoE for sm_100a in CuTeDSL."""

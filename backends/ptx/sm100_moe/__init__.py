"""NVFP4 Mixture-of-Experts for sm_100a: routing, grouped GEMM, SwiGLU, requantisation, second GEMM, combine."""

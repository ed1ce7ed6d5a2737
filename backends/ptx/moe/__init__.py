"""Shared by the NVFP4 MoE kernels of all targets: routing, requantisation, combine, the layout of scale factors."""

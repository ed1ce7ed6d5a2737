"""What the NVFP4 MoE kernels of all targets share: routing, requantisation, combine, the layout of scale factors."""

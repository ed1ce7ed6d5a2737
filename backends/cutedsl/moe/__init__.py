"""What the NVFP4 MoE kernels of all targets share: NVFP4 in memory, the counting and placing of routes, the combine."""

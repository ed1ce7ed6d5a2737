"""Code that the NVFP4 MoE kernels of all targets share: NVFP4 in memory, counting and placing routes, the combine."""

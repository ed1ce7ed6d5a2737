"""NVFP4 Mixture-of-Experts for sm_90a: geometry.py says how the work is cut, kernel.py how the GEMMs run."""

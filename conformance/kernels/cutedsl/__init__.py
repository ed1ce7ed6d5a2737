"""What the CuTeDSL kernels and their compilation promise."""

"""What the raw-PTX kernels promise."""

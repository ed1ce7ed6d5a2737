"""What the wrappers of other people's kernels promise."""

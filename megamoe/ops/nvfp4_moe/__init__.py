"""NVFP4 MoE: reference, inputs, expert loads."""

"""FMHA forward: reference and inputs."""

"""A syntax tree to steps that a warp runs."""

"""A syntax tree to code that a machine runs. Imports machine, memory, ptx and faults; knows no instruction itself."""

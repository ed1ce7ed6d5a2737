"""The one differ of two sets of lines, times included, for gate, compare and accept; it decides nothing."""

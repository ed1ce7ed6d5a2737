"""The one differ of two sets of lines, times included; gate, compare and accept share it."""

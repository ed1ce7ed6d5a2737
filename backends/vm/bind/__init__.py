"""A syntax tree to code that a machine runs; knows no instruction itself, the families of isa register here."""

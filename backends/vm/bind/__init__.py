"""Turns a syntax tree into code that a machine runs; knows no instruction itself, the families of isa register here."""

"""Whole programs, one for each form that is not lane-wise and random ones; an H200 and the machine must leave the
same."""

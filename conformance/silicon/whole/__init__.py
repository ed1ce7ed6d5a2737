"""Whole programs: one for each form that is not lane-wise, and random ones;
what an H200 and the machine make of them."""

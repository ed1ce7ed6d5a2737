"""Recorded answers of an H200, and the tests that hold the machine to them."""

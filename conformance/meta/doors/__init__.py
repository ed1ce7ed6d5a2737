"""Tests of the doors: megamoe.vm, .triton, .cutedsl, the pytest plugin, `megamoe check`, and a wheel that has them."""

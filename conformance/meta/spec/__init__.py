"""Tests of megamoe/spec."""

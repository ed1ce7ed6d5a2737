"""Tests of megamoe/explain."""

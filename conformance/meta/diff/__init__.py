"""Tests of megamoe/diff."""

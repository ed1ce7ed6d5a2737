"""Tests of megamoe/bench."""

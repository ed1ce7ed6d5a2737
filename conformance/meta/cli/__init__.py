"""Tests of megamoe/cli."""

"""Tests of megamoe/report."""

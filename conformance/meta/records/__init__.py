"""Tests of megamoe/records."""

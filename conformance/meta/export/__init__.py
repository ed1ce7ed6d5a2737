"""Tests of megamoe/export."""

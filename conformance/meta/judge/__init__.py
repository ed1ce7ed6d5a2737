"""Tests of megamoe/judge."""

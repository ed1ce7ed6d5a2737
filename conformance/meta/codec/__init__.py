"""Tests of megamoe/codec."""

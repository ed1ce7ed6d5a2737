"""Tests of megamoe/ops."""

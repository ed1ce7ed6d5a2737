"""Tests of megamoe/gate."""

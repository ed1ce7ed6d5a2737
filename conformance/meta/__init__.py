"""Tests of the harness, a folder a room of megamoe."""

"""Tests of the harness, a folder or a file a room of megamoe."""

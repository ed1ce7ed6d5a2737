"""Tests of the harness: one folder or file per room of megamoe."""

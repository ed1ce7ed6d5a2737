"""Tests of docs/rules, docs/notes and docs/found: every program of a page runs, and prints the finding that the page
shows."""

"""Tests of docs/rules, docs/notes and docs/found: every program of a page runs, and every finding is what it prints."""

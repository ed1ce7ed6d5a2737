"""Runs other people's code in a separate process, over a pipe of data; no other room of megamoe runs any of it."""

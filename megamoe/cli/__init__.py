"""The `megamoe` command, a file a subcommand; only this room prints and reads the environment."""

INTERRUPTED = 130
READER_GONE = 141
"""Exit statuses: 128 and the signal, as a shell has them."""

"""The `megamoe` command, one file per subcommand; only this room prints and reads the environment."""

INTERRUPTED = 130
READER_GONE = 141
"""Exit statuses as a shell reports them: 128 plus the signal number."""

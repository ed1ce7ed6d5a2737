"""The `megamoe` command, a file a subcommand; only this room prints and reads the environment."""

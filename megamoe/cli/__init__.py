"""The `megamoe` command, a file a subcommand. Only this room prints and reads the environment."""

"""The `megamoe` command, a file a subcommand. The only room that prints and that reads the environment."""

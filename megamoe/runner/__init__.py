"""Other people's code in a process of its own, asked over a pipe of data; no other room of megamoe runs any of it."""

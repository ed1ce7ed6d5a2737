"""Which spellings ptxas takes for which target, in a committed table, and how the machine is held to it."""

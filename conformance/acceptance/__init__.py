"""A committed table says which spellings ptxas takes for which target, and the machine is held to it."""

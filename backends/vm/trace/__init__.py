"""The observer of a machine that records what its agents do, for a person to look at."""

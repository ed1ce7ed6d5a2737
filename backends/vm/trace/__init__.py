"""What the agents of a run did, recorded for a person to look at."""

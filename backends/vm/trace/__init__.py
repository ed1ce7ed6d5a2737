"""What the agents of a run did, recorded for a person to look at. Imports machine and what lies below it."""

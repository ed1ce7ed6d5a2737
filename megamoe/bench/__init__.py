"""Device time of rows: which samples to take, when to stop, how the floor is made."""

"""Whether a run may pass: the rows it owes, expected failures, baselines, acceptance. The only room with a policy."""

"""Whether a run may pass: owed rows, expected failures, baselines, acceptance; the only room with a policy."""

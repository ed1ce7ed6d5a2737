"""Whether everything that must be there is there: expectations, baselines, acceptance."""

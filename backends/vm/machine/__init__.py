"""Code that warps run, warps, CTAs, clusters, the scheduler and launches; knows no instruction and binds nothing."""

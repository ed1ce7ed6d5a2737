"""Code that warps run, warps, CTAs, clusters, the scheduler and launches. Imports memory, ptx and faults."""

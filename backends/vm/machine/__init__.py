"""Warps, CTAs, clusters, the scheduler and the launches that they belong to."""

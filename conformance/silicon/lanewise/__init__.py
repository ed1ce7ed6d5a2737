"""Every lane-wise spelling that ptxas takes for sm_90a, on values drawn from a seed: what an H200 made of them."""

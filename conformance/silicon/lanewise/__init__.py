"""An H200's results for every lane-wise spelling that ptxas takes for sm_90a, on values drawn from a seed."""

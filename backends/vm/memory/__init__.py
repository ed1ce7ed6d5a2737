"""Global, shared and tensor memory, mbarriers, clocks and races. Imports faults; never the machine."""

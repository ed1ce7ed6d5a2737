"""Global, shared and tensor memory, mbarriers, clocks and races. Never imports the machine."""

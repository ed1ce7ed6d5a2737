"""Global, shared and tensor memory, mbarriers, clocks and races; knows agents by number, never the machine."""

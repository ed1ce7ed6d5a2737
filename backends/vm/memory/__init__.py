"""Global, shared and tensor memory, mbarriers, clocks and races; it never imports the machine."""

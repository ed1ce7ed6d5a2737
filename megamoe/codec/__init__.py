"""What backends may share: NVFP4 codes, scale layouts, routing; it imports the contract alone."""

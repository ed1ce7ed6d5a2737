"""What backends may share: NVFP4 codes, scale layouts, routing. Imports the contract alone."""

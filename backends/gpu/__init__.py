"""The executor on a device: programs given to the CUDA driver, timed by the device's own clock."""

"""The device executor: hands programs to the CUDA driver and times them with the device's own clock."""

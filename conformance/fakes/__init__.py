"""Every fake: backends, executors, devices, records and matrices that never were."""

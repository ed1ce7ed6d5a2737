"""Every fake: backends, executors, devices, made-up records and matrices.

`simulated_device` is an executor whose kernels have times with a noise that the test picks; `timeline` stands in for
torch.cuda, so that the real stopwatch runs on it.
"""

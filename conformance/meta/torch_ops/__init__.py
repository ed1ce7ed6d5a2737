"""Tests of megamoe.torch_ops: the operators on the machine, and their calls on a device that the machine simulates."""

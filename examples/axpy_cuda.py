"""A CUDA C++ kernel on the VM, y = a*x + y, and the VM's report of a load past the end."""

from pathlib import Path

import torch

import megamoe.vm

SOURCE = Path(__file__).with_name("axpy.cu")

x, y = torch.arange(1000.0), torch.ones(1000)
vm = megamoe.vm.Device("sm_100a")
vm.launch(SOURCE, "axpy", 8, 128, y, x, 3.0, 1000)
assert torch.equal(y, 3 * x + 1)

try:
    vm.launch(SOURCE, "axpy", 8, 128, y, x, 3.0, 1024)
except megamoe.vm.KernelFault as fault:
    print(f"{fault.rule}: {fault}")

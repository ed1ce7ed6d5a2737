"""A CUDA C++ kernel on the VM, y = a*x + y, and the VM's report of a load past the end."""

import torch

import megamoe.vm

SOURCE = r"""
extern "C" __global__ void axpy(float *y, const float *x, float a, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = a * x[i] + y[i];
}
"""

x, y = torch.arange(1000.0), torch.ones(1000)
vm = megamoe.vm.Device("sm_100a")
vm.launch(SOURCE, "axpy", 8, 128, y, x, 3.0, 1000)
assert torch.equal(y, 3 * x + 1)

try:
    vm.launch(SOURCE, "axpy", 8, 128, y, x, 3.0, 1024)
except megamoe.vm.KernelFault as fault:
    print(f"{fault.rule}: {fault}")

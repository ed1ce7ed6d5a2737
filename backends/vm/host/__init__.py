"""Host programs: compiled x86-64 (or native) host functions that launch kernels, run here with software for the GPU.

`run_host_program` links the object, answers its CUDA runtime calls and executes every launch on a Machine.
"""

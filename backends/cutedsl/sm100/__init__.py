"""What the kernels for sm_100a share: the device's sizes, and the rings and tensor memory around tcgen05."""

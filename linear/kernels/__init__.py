"""Base matmul kernels, one file each."""

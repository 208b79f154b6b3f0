"""Triton kernels, one file an op; imported only where one is launched."""

"""FP8 matmuls in Triton: the classes need no triton, their kernels import it when launched.

`fp8` has the classes and their predicates, `plan` the tiles, `matmul` the kernel and its launch.
"""

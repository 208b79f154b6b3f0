"""Grouped FP8 matmuls in Triton: the classes need no triton, their kernels import it when launched.

`fp8` has the classes and their predicates, `matmul` the kernel and its launch, `combine` the sum of
what a token's experts made of it.
"""

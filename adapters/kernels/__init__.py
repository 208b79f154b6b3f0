"""Low-rank products of all adapters in slots with the rows of a batch, grouped in one call.

`base` says what a kernel is, `eager` defines the result, `native` and `triton` compute it on CPUs
and GPUs, `selection` chooses by their predicates.
"""

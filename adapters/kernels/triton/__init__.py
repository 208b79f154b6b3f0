"""The low-rank product in Triton: the class needs no triton, its kernels import it when launched.

`low_rank` has the class and its predicate, `kernels` what is launched.
"""

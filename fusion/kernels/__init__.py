"""Triton kernels, one a family of ops; imported only where one is launched.

`activation` and `norm` have the kernels and their launches.  Both run the loop of `tiles` over what
`sources` reads, `epilogue` makes of it and `shrink` multiplies it with, by steps of `numerics`, in
programs as `plan` cuts them.
"""

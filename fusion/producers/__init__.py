"""Producers, one module for each kind of site; importing this package registers them."""

from . import gated, norm, unary

__all__ = ["gated", "norm", "unary"]

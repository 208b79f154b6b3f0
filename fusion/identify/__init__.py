"""Proof by equality: what a piece of a model computes, found by running it on probes (I4).

Class names and attribute names prove nothing.  A unary activation is compared on all 65,536
encodings of its two-byte dtype, and is defined by its results there if it equals nothing known but
is elementwise; a gated one also on a spread of pairs, with the limits and multipliers that its code
mentions; a norm on rows that tell the known orders, ``w`` from ``1 + w``, and LayerNorm apart.
"""

from .activation import identify_activation
from .finding import PROBE_ERRORS, Finding, same_bytes
from .norm import identify_norm
from .placing import all_encodings

__all__ = [
    "PROBE_ERRORS",
    "Finding",
    "all_encodings",
    "identify_activation",
    "identify_norm",
    "same_bytes",
]

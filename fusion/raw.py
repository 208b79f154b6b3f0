"""The raw output of a site, by the definition that its fused producers follow."""

from __future__ import annotations

import torch

from ..core.oracle import ActivationSemantics, Semantics
from ..linear import native
from ..linear.contract import InputContract
from ..linear.outputs import RawRequest, new_outputs
from .producers.eager import eager_raw
from .producers.kernel import check_inputs

_NO_KEY = InputContract(None)


def compute_raw(semantics: Semantics, *inputs: torch.Tensor) -> torch.Tensor:
    """The oracle's bytes for one site, (..., K), by the fastest means.

    A site computes its raw activation by this function in the unfused route, not by the model's
    own module: sums of squares, and activations whose bytes torch makes depend on where in memory
    an element lies, have then one definition in every route, and all routes give the same bytes.

    Args:
        semantics: what the site computes; without a residual.
        *inputs: as for `Producer.produce`.
    """
    runs = native.computes(inputs[0]) and check_inputs("", semantics, inputs).ok
    if not runs:
        return eager_raw(semantics, inputs).out
    outputs = new_outputs(inputs[0], _NO_KEY, str(semantics), raw=RawRequest())
    assert outputs.raw is not None
    if isinstance(semantics, ActivationSemantics):
        native.activation(semantics, inputs, outputs)
    else:
        native.norm(semantics, inputs, outputs)
    return outputs.raw.values

"""The oracle: one eager function a step, which every kernel must equal bit for bit.

Numerics (docs/numerics.md has the reasons):

* An activation is computed in float32 from the rounded input and rounded once to the model's
  dtype, the boundary at which an observer would see it; only then is it quantised.  A gated
  activation is ``round(round(act(gate)) * up)``, as the eager module does it.
* A norm takes its sums in float64, where their order does not show after rounding to float32, so
  that every vector width and block size gives a row the same bytes.
* Static: ``cast(clamp(x * (1 / scale), -max, max))``; the reciprocal once in float32.
* Dynamic: amax in float32 over the row or group, floored at `AMAX_FLOOR`; an infinity counts as
  the largest finite value of the input's dtype, a NaN as 0.
* NaN gives the code 0x7F whatever its sign and payload; infinities saturate; -0.0 stays.
"""

from .activation import ACTIVATIONS, Activation, ActivationSemantics, activate
from .norm import NORM_ORDERS, NormSemantics, norm
from .quantize import (
    AMAX_FLOOR,
    FP4_MAX,
    FP8_MAX,
    check_static_scale,
    fp4_values,
    quantize,
    quantize_group,
    quantize_nvfp4,
    quantize_static,
    quantize_token,
    round_up_to_power_of_two,
)

Semantics = ActivationSemantics | NormSemantics

__all__ = [
    "ACTIVATIONS",
    "AMAX_FLOOR",
    "FP4_MAX",
    "FP8_MAX",
    "NORM_ORDERS",
    "Activation",
    "ActivationSemantics",
    "NormSemantics",
    "Semantics",
    "activate",
    "check_static_scale",
    "fp4_values",
    "norm",
    "quantize",
    "quantize_group",
    "quantize_nvfp4",
    "quantize_static",
    "quantize_token",
    "round_up_to_power_of_two",
]

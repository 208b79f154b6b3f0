"""The oracle as a producer: always right, never fast."""

from __future__ import annotations

import torch

from ...core.oracle import ActivationSemantics, Semantics, activate, norm, quantize
from ...core.oracle.norm import Normed
from ...core.quantized_activation import QuantizedActivation, RawOutput
from ...core.selection import ACCEPTED, Verdict
from ...linear.outputs import RawRequest
from ...linear.rows import name
from ...linear.shrink import shrink
from .base import Emission, Produced, Producer, ProducerRequest, check_rank


def eager_raw(semantics: Semantics, inputs: tuple[torch.Tensor, ...]) -> Normed:
    """The raw activation by definition; inputs as for `Producer.produce`."""
    if isinstance(semantics, ActivationSemantics):
        return Normed(activate(semantics, *inputs), None)
    return norm(semantics, inputs)


class EagerProducer(Producer):
    """Activation, then quantisation, each a pass over memory: no fusion but in name."""

    name = "eager"
    emulated = True

    def supports(self, request: ProducerRequest) -> Verdict:
        return check_rank(request)

    def accepts(
        self, semantics: Semantics, inputs: tuple[torch.Tensor, ...], emission: Emission
    ) -> Verdict:
        # Other dtypes would be promoted by torch, and the definition does not say how.
        dtypes = dict.fromkeys(x.dtype for x in inputs)
        if len(dtypes) > 1:
            return Verdict(False, f"the inputs are {' and '.join(map(name, dtypes))}")
        return ACCEPTED

    def produce(
        self, semantics: Semantics, inputs: tuple[torch.Tensor, ...], emission: Emission
    ) -> Produced:
        title = self.title(semantics, emission)
        out, residual = eager_raw(semantics, inputs)
        plain = quantize_for(out, emission, title)
        shrunk = {request.consumer: shrink(out, request) for request in emission.shrinks}
        activation = QuantizedActivation(
            plain.codes,
            plain.scale,
            out.dtype,
            out.shape,
            plain.quant_key,
            None if emission.raw is None else _raw_rows(out, emission.raw),
            title,
            plain.global_scale,
            shrunk or None,
        )
        return Produced(activation, residual)


def quantize_for(x: torch.Tensor, emission: Emission, title: str) -> QuantizedActivation:
    """Codes of the raw activation `x` by definition."""
    contract = emission.contract
    assert contract.key is not None
    static = contract.static_scale(title).value if contract.key.static else None
    given = None if contract.global_scale is None else contract.global_scale.value
    return quantize(x, contract.key, static_scale=static, global_scale=given, producer=title)


def _raw_rows(out: torch.Tensor, request: RawRequest) -> RawOutput:
    if request.rows is None or not request.compact:
        return RawOutput(out.contiguous(), request.rows, compact=False)
    flat = out.reshape(out.shape[:-1].numel(), out.shape[-1])
    by_request = flat.unflatten(0, (request.rows.shape[0], -1))
    return RawOutput(by_request[request.rows].flatten(0, 1), request.rows, compact=True)


EAGER = EagerProducer()

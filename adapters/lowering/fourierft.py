"""FourierFT (arXiv 2405.03003): a few coefficients of the delta's Fourier transform.

    delta = scaling * Re(ifft2(S)),   S zero but for n coefficients

Their places are the first n of a seeded permutation of all N K.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ...core.errors import AdapterMismatchError
from ..weights import LayerWeights
from .base import BaseLinear, Shapes, checked


@dataclass(frozen=True)
class FourierFTSettings:
    """The settings of one module, after all patterns.

    Args:
        n_frequency: n.
        scaling: as in the config.
        random_loc_seed: seeds torch's CPU generator for the places.
    """

    n_frequency: int
    scaling: float
    random_loc_seed: int


def shapes(settings: FourierFTSettings, base: BaseLinear) -> Shapes:
    """fourierft_spectrum `(n,)`.

    Raises:
        AdapterMismatchError: more coefficients than the weight has numbers.
    """
    if settings.n_frequency > base.in_features * base.out_features:
        raise AdapterMismatchError(
            f"adapter on {base.name}",
            f"{settings.n_frequency} coefficients for {base.out_features} by {base.in_features}",
            "load it on the base model that it was trained on",
        )
    return {"fourierft_spectrum": (settings.n_frequency,)}


def lower(
    tensors: Mapping[str, torch.Tensor], settings: FourierFTSettings, base: BaseLinear
) -> LayerWeights:
    """A delta: its rank is up to twice the number of coefficients.

    Raises:
        AdapterFormatError, AdapterMismatchError, AdapterUnsupportedError: see `checked`, `shapes`.
    """
    spectrum = checked(tensors, shapes(settings, base), base)["fourierft_spectrum"].float()
    generator = torch.Generator(device="cpu").manual_seed(settings.random_loc_seed)
    size = base.out_features * base.in_features
    places = torch.randperm(size, generator=generator)[: settings.n_frequency]
    dense = torch.zeros(size).index_put((places,), spectrum)
    dense = dense.reshape(base.out_features, base.in_features)
    return LayerWeights(delta=torch.fft.ifft2(dense).real.contiguous() * settings.scaling)

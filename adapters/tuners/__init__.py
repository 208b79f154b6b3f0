"""The PEFT types: what each states of its config and tensors, and those that are refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .base import TunerType
from .beft import Beft
from .dense import C3a, FourierFT, Hira
from .ia3 import Ia3
from .ln_tuning import LnTuning
from .lora import Lora
from .lycoris import LoHa, LoKr
from .products import AdaLora, Delora, Miss
from .road import Road
from .rotations import Boft, Oft
from .trainable_tokens import TrainableTokens
from .unserved import UNSERVED
from .vera import Vera

TUNERS: Mapping[str, TunerType[Any]] = {
    tuner.peft_type: tuner
    for tuner in (
        Lora(),
        AdaLora(),
        Ia3(),
        Vera(),
        LoHa(),
        LoKr(),
        Oft(),
        Boft(),
        LnTuning(),
        TrainableTokens(),
        FourierFT(),
        C3a(),
        Hira(),
        Miss(),
        Delora(),
        Road(),
        Beft(),
    )
}

__all__ = ["TUNERS", "UNSERVED"]

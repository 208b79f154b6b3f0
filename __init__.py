"""LoRA-aware serving middleware: PEFT adapters on an FP8 model, without losing the fused path."""

from typing import TYPE_CHECKING

from .core.lazy import lazy_exports

if TYPE_CHECKING:
    from .core.errors import BranchlineError
    from .fusion.functional import maybe_fused_act_quant
    from .linear.calibration import Calibration
    from .serving.config import WrapConfig
    from .serving.load import load_model
    from .serving.model import ServedModel
    from .serving.wrap import wrap

__version__ = "0.1.0"

__all__ = [
    "BranchlineError",
    "Calibration",
    "ServedModel",
    "WrapConfig",
    "__version__",
    "load_model",
    "maybe_fused_act_quant",
    "wrap",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "BranchlineError": "core.errors",
        "Calibration": "linear.calibration",
        "ServedModel": "serving.model",
        "WrapConfig": "serving.config",
        "load_model": "serving.load",
        "maybe_fused_act_quant": "fusion.functional",
        "wrap": "serving.wrap",
    },
)

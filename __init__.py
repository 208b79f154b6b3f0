"""LoRA-aware serving middleware: PEFT adapters on an FP8 model, without losing the fused path."""

from .core.errors import BranchlineError
from .fusion import maybe_fused_act_quant
from .linear.calibration import Calibration
from .serving import ServedModel, WrapConfig, load_model, wrap

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

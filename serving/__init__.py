"""Serving: wrapping a model, and (in time) the engine around it."""

from typing import TYPE_CHECKING

from ..core.lazy import lazy_exports

if TYPE_CHECKING:
    from .config import WrapConfig
    from .load import load_model
    from .model import ServedModel
    from .quantize import quantize_checkpoint

__all__ = ["ServedModel", "WrapConfig", "load_model", "quantize_checkpoint"]

__getattr__ = lazy_exports(
    __name__,
    {
        "ServedModel": "model",
        "WrapConfig": "config",
        "load_model": "load",
        "quantize_checkpoint": "quantize",
    },
)

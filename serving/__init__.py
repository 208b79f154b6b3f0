"""Serving: wrapping a model, and (in time) the engine around it."""

from .config import WrapConfig
from .load import load_model
from .model import ServedModel
from .quantize import quantize_checkpoint
from .wrap import wrap

__all__ = ["ServedModel", "WrapConfig", "load_model", "quantize_checkpoint", "wrap"]

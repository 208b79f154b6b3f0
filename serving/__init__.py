"""Serving: wrapping a model, and (in time) the engine around it."""

from .config import WrapConfig
from .model import ServedModel
from .wrap import wrap

__all__ = ["ServedModel", "WrapConfig", "wrap"]

"""What routes, matmuls and branches cost on a device."""

from .model import CostModel, cost_model_for, cost_model_of

__all__ = ["CostModel", "cost_model_for", "cost_model_of"]

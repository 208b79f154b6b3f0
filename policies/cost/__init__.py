"""What routes, matmuls and branches cost on a device."""

from .calibration import DeviceCosts, StoredCosts, calibration_file, cost_model_of
from .model import CostModel, cost_model_for
from .routes import RouteCost

__all__ = [
    "CostModel",
    "DeviceCosts",
    "RouteCost",
    "StoredCosts",
    "calibration_file",
    "cost_model_for",
    "cost_model_of",
]

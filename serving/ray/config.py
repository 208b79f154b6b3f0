"""What a fleet of replicas is started with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from ..serve_config import ServeConfig


class FleetConfig(ServeConfig):
    """The configuration of every replica, and the model that they serve."""

    model: Annotated[
        Path,
        Field(description="Folder of a transformers checkpoint, at one path on every machine."),
    ]

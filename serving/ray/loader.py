"""What a replica serves, from a folder that lies on its machine."""

from __future__ import annotations

from dataclasses import dataclass

from ...core.errors import ConfigError
from ..http.start import LoadedModel
from ..load import load_model, load_tokenizer
from ..wrap import wrap
from .config import FleetConfig


@dataclass(frozen=True)
class FolderLoader:
    """Loads the model and its tokenizer, without adapters.

    Args:
        config: of the fleet.

    Raises:
        ConfigError: static scales are to be calibrated, and no saved ones are named.
    """

    config: FleetConfig

    def __post_init__(self) -> None:
        file, quant = self.config.calibration, self.config.quant
        if quant.calibrated and (file is None or file.suffix != ".json"):
            raise ConfigError(
                f"quant={quant}",
                "has static scales, which all replicas have to share",
                "name a .json of saved scales by calibration",
            )

    def __call__(self) -> LoadedModel:
        """Load and wrap.

        Raises:
            BranchlineError: something does not fit.
        """
        folder = self.config.model
        tokenizer = load_tokenizer(folder)
        served = wrap(
            load_model(folder), calibration=self.config.calibration, **self.config.for_wrap
        )
        return LoadedModel(served, tokenizer, folder)

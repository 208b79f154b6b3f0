"""What the commands share: their arguments, and the served model that these describe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import typer

from ..serving import ServedModel, WrapConfig, wrap
from ..serving.config import Quant
from .calibration import calibration_data
from .checkpoint import load_model, load_tokenizer
from .output import note
from .prompts import BASE


@dataclass(frozen=True)
class NamedPath:
    """One `--adapter NAME=PATH`."""

    name: str
    path: Path


def _named_path(text: str) -> NamedPath:
    name, equals, path = text.partition("=")
    if not (equals and name.strip() and path.strip()):
        raise typer.BadParameter(f"{text!r} is not NAME=PATH, such as sql=adapters/sql")
    if name == BASE or name.startswith("@") or len(name.split()) != 1 or name != name.strip():
        raise typer.BadParameter(
            f"{name!r} cannot name an adapter: a name holds no spaces, does not begin with @ and "
            f"is not {BASE!r}, which is the model itself"
        )
    return NamedPath(name, Path(path))


ModelArgument = Annotated[
    Path, typer.Argument(metavar="MODEL", help="Folder of a transformers checkpoint.")
]
AdapterOption = Annotated[
    list[NamedPath] | None,
    typer.Option(
        "--adapter",
        metavar="NAME=PATH",
        parser=_named_path,
        help="Load the PEFT folder PATH under NAME; repeatable.",
    ),
]
CalibrationOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="For --quant fp8-static or nvfp4: a .txt of prompts, one a line, or a .json of saved "
        "scales; without it a small built-in set of English prompts.",
    ),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print JSON, and nothing else, on stdout.")
]


@dataclass(frozen=True)
class Session:
    """One command's model and how to serve it.

    Attributes:
        folder: of the model.
        adapters: to load.
        calibration: the file given, if any.
        settings: how to wrap.
    """

    folder: Path
    adapters: Sequence[NamedPath]
    calibration: Path | None
    settings: WrapConfig

    def __post_init__(self) -> None:
        """Usage errors, before anything slow happens."""
        paths: dict[str, Path] = {}
        for adapter in self.adapters:
            if adapter.name in paths:
                raise typer.BadParameter(
                    f"the name {adapter.name!r} is given twice: "
                    f"for {paths[adapter.name]} and for {adapter.path}",
                    param_hint="--adapter",
                )
            paths[adapter.name] = adapter.path
        if self.calibration and not self._static:
            raise typer.BadParameter(
                f"--quant {self.settings.quant} has no static scales to calibrate; "
                f"drop the file, or use --quant {Quant.FP8_STATIC}",
                param_hint="--calibration",
            )

    @property
    def names(self) -> list[str]:
        """Of the adapters."""
        return [adapter.name for adapter in self.adapters]

    @property
    def _static(self) -> bool:
        return self.settings.quant == Quant.FP8_STATIC

    @cached_property
    def tokenizer(self) -> Any:
        """The model's; loaded when first asked for."""
        return load_tokenizer(self.folder)

    def serve(self) -> ServedModel:
        """Load and wrap the model, then load the adapters.

        Raises:
            BranchlineError: something does not fit.
        """
        note(f"loading {self.folder}")
        model = load_model(self.folder)
        calibration = None
        if self._static:
            calibration = calibration_data(self.calibration, lambda: self.tokenizer)
        note(f"wrapping {type(model).__name__}")
        # Unset settings stay unset: `wrap` refuses one that is set and would have no effect.
        settings = self.settings.model_dump(exclude_unset=True)
        served = wrap(model, calibration=calibration, **settings)
        for adapter in self.adapters:
            info = served.adapters.load(adapter.name, adapter.path)
            note(f"loaded adapter {info.name} (rank {info.rank}, {info.layers} linears)")
        return served

"""What the commands share: their arguments, and the served model that these describe."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..adapters.sources import AdapterSource, LocalSource
from ..adapters.sources.local import not_found
from ..serving.config import Quant, WrapConfig
from .output import note
from .prompts import BASE

if TYPE_CHECKING:
    from ..serving.model import ServedModel


@dataclass(frozen=True)
class NamedSource:
    """One `--adapter NAME=SOURCE`."""

    name: str
    source: str


def _named_source(text: str) -> NamedSource:
    name, equals, source = text.partition("=")
    if not (equals and name.strip() and source.strip()):
        raise typer.BadParameter(f"{text!r} is not NAME=SOURCE, such as sql=adapters/sql")
    if name == BASE or name.startswith("@") or len(name.split()) != 1 or name != name.strip():
        raise typer.BadParameter(
            f"{name!r} cannot name an adapter: a name holds no spaces, does not begin with @ and "
            f"is not {BASE!r}, which is the model itself"
        )
    return NamedSource(name, source)


ModelArgument = Annotated[
    Path, typer.Argument(metavar="MODEL", help="Folder of a transformers checkpoint.")
]
AdapterOption = Annotated[
    list[NamedSource] | None,
    typer.Option(
        "--adapter",
        metavar="NAME=SOURCE",
        parser=_named_source,
        help="Load the PEFT folder, archive or URL SOURCE under NAME; repeatable.",
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
        settings: how to wrap; what a model derived from `WrapConfig` has besides is left alone.
        say: is told what is being done.
    """

    folder: Path
    adapters: Sequence[NamedSource]
    calibration: Path | None
    settings: WrapConfig
    say: Callable[[str], None] = note

    def __post_init__(self) -> None:
        """Usage errors, before anything slow happens."""
        sources: dict[str, str] = {}
        for adapter in self.adapters:
            if adapter.name in sources:
                raise typer.BadParameter(
                    f"the name {adapter.name!r} is given twice: "
                    f"for {sources[adapter.name]} and for {adapter.source}",
                    param_hint="--adapter",
                )
            sources[adapter.name] = adapter.source
        if self.calibration and not self._static:
            raise typer.BadParameter(
                f"--quant {self.settings.quant} has no static scales to calibrate; "
                f"drop the file, or use --quant {Quant.FP8_STATIC} or {Quant.NVFP4}",
                param_hint="--calibration",
            )

    @property
    def names(self) -> list[str]:
        """Of the adapters."""
        return [adapter.name for adapter in self.adapters]

    @property
    def _static(self) -> bool:
        return self.settings.quant.calibrated

    @cached_property
    def tokenizer(self) -> Any:
        """The model's; loaded when first asked for."""
        from ..serving.load import load_tokenizer

        return load_tokenizer(self.folder)

    def check_adapters(self) -> None:
        """Refuse paths of this machine where no adapter lies, before a model is loaded for them.

        Raises:
            AdapterSourceError: one is no source.
            AdapterNotFoundError: there is no such folder or archive.
            AdapterFormatError: a folder without an adapter_config.json that can be read.
        """
        for adapter in self.adapters:
            source = AdapterSource.parse(adapter.source)
            if not isinstance(source, LocalSource):
                continue
            if not os.path.exists(source.path):
                raise not_found(source)
            # An archive is unpacked when it is loaded.
            if os.path.isdir(source.path):
                # transformers and PEFT come with it.
                from ..adapters.read import read_raw_config

                read_raw_config(Path(source.path), f"adapter {source.label!r}")

    def serve(self) -> ServedModel:
        """Load and wrap the model, then load the adapters.

        Raises:
            BranchlineError: something does not fit.
        """
        self.check_adapters()
        self.say(f"loading {self.folder}")
        from ..serving.load import load_model
        from ..serving.wrap import wrap
        from .calibration import calibration_data

        model = load_model(self.folder)
        calibration = None
        if self._static:
            calibration = calibration_data(self.calibration, lambda: self.tokenizer, self.say)
        self.say(f"wrapping {type(model).__name__}")
        served = wrap(model, calibration=calibration, **self.settings.for_wrap)
        for adapter in self.adapters:
            info = served.adapters.load(adapter.name, adapter.source)
            self.say(f"loaded adapter {info.name} (rank {info.rank}, {info.modules} modules)")
        return served

"""`branchline serve`: an OpenAI-compatible server whose adapters come and go."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from ..core.errors import ConfigError
from ..serving import WrapConfig
from ..serving.config_layers import layered
from ..serving.serve_config import EngineConfig, ServeConfig
from .options import with_flags
from .session import ModelArgument, NamedSource, Session

_MODULE_FLAGS = ("--lora-modules", "--adapter")

ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="YAML with any of these settings, by their names; flags and BRANCHLINE_... variables "
        "of the environment go before it.",
    ),
]
EnableLoraOption = Annotated[
    bool,
    typer.Option(
        "--enable-lora",
        help="Of no effect, for command lines of vLLM: adapters are served unless --max-loras is "
        "0.",
    ),
]
TrustOption = Annotated[bool, typer.Option("--trust-remote-code", hidden=True)]


class ServeCommand(TyperCommand):
    """Takes several adapters behind one flag too, as vLLM does: `--lora-modules a=x b=y`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """See click."""
        return super().parse_args(ctx, list(_one_flag_each(args)))


def _one_flag_each(arguments: Iterable[str]) -> Iterator[str]:
    flag, is_value = "", False
    for argument in arguments:
        if argument.startswith("-"):
            flag = argument if argument in _MODULE_FLAGS else ""
            is_value = bool(flag)
        elif flag and not is_value and _is_module(argument):
            yield flag
        else:
            flag = flag if is_value else ""
            is_value = False
        yield argument


def _is_module(argument: str) -> bool:
    return "=" in argument or argument.startswith("{")


def _panels() -> Mapping[str, str]:
    """Headings of the help, by the class that has the field."""
    made = dict.fromkeys(ServeConfig.model_fields, "Serving")
    made |= dict.fromkeys(EngineConfig.model_fields, "Batching")
    return made | dict.fromkeys(WrapConfig.model_fields, "Wrapping")


@with_flags(ServeConfig, _panels(), {"lora_modules": ("--adapter",)})
def serve(
    model: ModelArgument,
    *,
    config: ConfigOption = None,
    enable_lora: EnableLoraOption = False,
    trust_remote_code: TrustOption = False,
    flags: Mapping[str, Any],
) -> None:
    """Serve MODEL and adapters over HTTP, by OpenAI's interface.

    Example: branchline serve MODEL --adapter sql=adapters/sql --port 8000
    """
    if trust_remote_code:
        raise typer.BadParameter(
            "code that lies in a checkpoint is never run", param_hint="--trust-remote-code"
        )
    # uvicorn and the routes take a while to import, which the other commands need not wait for.
    from ..serving.http.server import run_server
    from ..serving.http.start import LoadedModel, base_names

    try:
        settings = layered(ServeConfig, flags, config)
        names = base_names(settings, model)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error
    if enable_lora and not settings.tier_limits.count:
        raise typer.BadParameter("--max-loras 0 switches adapters off", param_hint="--enable-lora")
    adapters = [NamedSource(module.name, module.path) for module in settings.modules]
    say = logging.getLogger("branchline.start").info
    session = Session(model, adapters, settings.calibration, settings, say)

    def load() -> LoadedModel:
        return LoadedModel(session.serve(), session.tokenizer, model)

    run_server(settings, load, names)

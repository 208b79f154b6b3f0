"""`branchline serve`: an OpenAI-compatible server whose adapters come and go."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from ..core.errors import ConfigError
from ..serving import WrapConfig
from ..serving.config_layers import layered
from ..serving.serve_config import EngineConfig, ServeConfig
from .options import flag_name, with_flags
from .session import ModelArgument, NamedSource, Session

if TYPE_CHECKING:
    from ..serving.http.start import LoadedModel, Loader

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
    made |= {name: "Ray" for name in made if _is_of_ray(name)}
    made |= dict.fromkeys(EngineConfig.model_fields, "Batching")
    return made | dict.fromkeys(WrapConfig.model_fields, "Wrapping")


def _is_of_ray(field: str) -> bool:
    return field == "ray" or field.startswith("ray_")


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
    from ..serving.http.start import base_names

    try:
        settings = layered(ServeConfig, flags, config)
        names = base_names(settings, model)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error
    if enable_lora and not settings.tier_limits.count:
        raise typer.BadParameter("--max-loras 0 switches adapters off", param_hint="--enable-lora")
    if settings.ray:
        _serve_by_ray(model, settings)
        return
    unused = sorted(name for name in settings.model_fields_set if name.startswith("ray_"))
    if unused:
        raise typer.BadParameter("has no effect without --ray", param_hint=flag_name(unused[0]))
    adapters = [NamedSource(module.name, module.path) for module in settings.modules]
    run_server(settings, _loader(model, settings, adapters), names)


def _loader(model: Path, settings: ServeConfig, adapters: list[NamedSource]) -> Loader:
    say = logging.getLogger("branchline.start").info
    session = Session(model, adapters, settings.calibration, settings, say)
    return partial(_load, session)


def _load(session: Session) -> LoadedModel:
    from ..serving.http.start import LoadedModel

    return LoadedModel(session.serve(), session.tokenizer, session.folder)


def _serve_by_ray(model: Path, settings: ServeConfig) -> None:
    from ..serving.ray import FleetConfig, require_ray

    try:
        require_ray()
    except ConfigError as error:
        raise typer.BadParameter(str(error), param_hint="--ray") from error
    from ..serving.ray.run import run_fleet

    given = {name: getattr(settings, name) for name in settings.model_fields_set}
    # Every machine of the cluster reads it by the same path.
    fleet = FleetConfig.checked(**given, model=model.resolve())
    run_fleet(fleet, _loader(fleet.model, fleet, []))

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
from ..serving.config import WrapConfig
from ..serving.config_layers import layered
from ..serving.serve_config import EngineConfig, ServeConfig
from .options import flag_name, with_flags
from .session import ModelArgument, NamedSource, Session

if TYPE_CHECKING:
    from ..serving.http.start import LoadedModel, Loader

_MODULE_FLAGS = ("--lora-modules", "--adapter")

# Flags of vLLM that there are not here, behind why they are not needed, or what to use.
_NOT_HERE = {
    "a server does not split a model over GPUs (the library serves one that transformers has "
    "split); for more copies of it use --ray --ray-replicas N": "--tensor-parallel-size -tp "
    "--pipeline-parallel-size -pp --enable-expert-parallel",
    "for more copies of the model use --ray --ray-replicas N": "--data-parallel-size -dp "
    "--distributed-executor-backend --api-server-count",
    "the cache is sized by --kv-cache-memory-bytes or --num-gpu-blocks-override": (
        "--gpu-memory-utilization"
    ),
    "requests that lose their blocks are computed anew; leave it out": "--swap-space",
    "weights stay where they are loaded; --quant makes them smaller": "--cpu-offload-gb",
    "keys and values are kept in the model's dtype; leave it out": "--kv-cache-dtype",
    "the dtype is the checkpoint's, and --quant says what linears consume": "--dtype",
    "use --quant; a checkpoint that is quantised already needs no flag": "--quantization -q",
    "name the folder without a flag: branchline serve MODEL": "--model",
    "MODEL is a folder of this machine, and is read as it lies there": "--load-format "
    "--config-format --revision --code-revision --tokenizer-revision --download-dir --tokenizer "
    "--tokenizer-mode --hf-overrides --hf-token --hf-config-path",
    "sampling begins with the folder's generation_config.json; leave it out": "--generation-config",
    "nothing is compiled or captured; leave it out": "--enforce-eager --compilation-config "
    "--max-seq-len-to-capture --cuda-graph-sizes",
    "long prompts are fed in pieces of --max-num-batched-tokens": "--enable-chunked-prefill "
    "--no-enable-chunked-prefill --max-num-partial-prefills",
    "adapters take turns, by --adapter-turn-steps": "--scheduling-policy",
    "every step is scheduled, and makes one token an answer; leave it out": "--num-scheduler-steps "
    "--speculative-config",
    "an adapter lies whole in its slot; leave it out": "--fully-sharded-loras "
    "--lora-extra-vocab-size --long-lora-scaling-factors",
    "use --log-level; at warning, requests are not logged": "--disable-log-requests "
    "--enable-log-requests --uvicorn-log-level",
    "statistics are at /metrics, and are not logged; leave it out": "--disable-log-stats",
    "answers are text, and calls in them are for the client to read": "--enable-auto-tool-choice "
    "--tool-call-parser --reasoning-parser",
    "the server speaks plain HTTP; put a proxy that ends TLS before it": "--ssl-keyfile "
    "--ssl-certfile --ssl-ca-certs --ssl-cert-reqs",
    "models are served that read text alone": "--limit-mm-per-prompt --mm-processor-kwargs",
    "what a model can do is read from its class; leave it out": "--task --runner",
}
_FLAGS_OF_VLLM = {flag: reason for reason, flags in _NOT_HERE.items() for flag in flags.split()}

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
        _refuse_flags_of_vllm(args)
        return super().parse_args(ctx, list(_one_flag_each(args)))


def _refuse_flags_of_vllm(arguments: Iterable[str]) -> None:
    """Say of a flag that vLLM has why it is not needed here, or what to use."""
    for argument in arguments:
        flag = argument.partition("=")[0]
        reason = _FLAGS_OF_VLLM.get(flag.replace("_", "-"))
        if reason is not None:
            raise typer.BadParameter(f"is a flag of vLLM's: {reason}", param_hint=flag)


#: What `serve` is made with.
COMMAND_CLASS = ServeCommand


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
    session.check_adapters()
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

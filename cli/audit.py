"""`branchline audit`: which sites are fused, for whom, why, and what adapters cost."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import Field, TypeAdapter, ValidationError

from ..core.devices import DEVICE_KINDS
from ..core.errors import BranchlineError, ConfigError
from ..serving.config import WrapConfig
from .options import help_of, with_settings
from .output import console, note, print_json, results_only_on_stdout
from .session import AdapterOption, CalibrationOption, JsonOption, Session

if TYPE_CHECKING:
    from ..policies.audit.report import AuditReport

#: Part of the audit could not be answered.
INCOMPLETE = 2

ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help="Folder of a transformers checkpoint.")
]
PolicyOption = Annotated[
    list[str] | None,
    typer.Option(
        help=f"{help_of(WrapConfig.model_fields['policy'])} Repeatable: routes and costs are "
        "shown under each."
    ),
]
AdaptersDirOption = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="A fleet: every folder in DIR is an adapter, named by it. Adds what target modules "
        "cost over all of them.",
    ),
]
TrafficOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="With --adapters-dir: a .json of {name: requests}, or what a server's /v1/adapters "
        "answers, to weight adapters by.",
    ),
]
DeviceOption = Annotated[
    str | None,
    typer.Option(
        metavar="KIND",
        help=f"Plan and estimate for this device ({', '.join(DEVICE_KINDS)}); unset: this machine.",
    ),
]
TokensOption = Annotated[
    int, typer.Option(min=1, help="Tokens of the batches that bytes and times are told for.")
]
LoadOption = Annotated[
    bool,
    typer.Option(
        "--load", help="Load the weights and wrap the model, in the place of reading headers alone."
    ),
]


@with_settings(WrapConfig, without=("policy",))
def audit(
    model: ModelArgument,
    *,
    adapter: AdapterOption = None,
    adapters_dir: AdaptersDirOption = None,
    traffic: TrafficOption = None,
    policy: PolicyOption = None,
    device: DeviceOption = None,
    tokens: TokensOption = 64,
    load: LoadOption = False,
    calibration: CalibrationOption = None,
    json: JsonOption = False,
    settings: WrapConfig,
) -> None:
    """Show for every site who reads its output, its route for each set of adapters, and its cost.

    The sets are: no adapter, each adapter alone, all of them together.  Weights are not loaded:
    config, headers and adapters tell all but what was calibrated.  Exit code 2 where a part could
    not be read; the rest is shown all the same.
    """
    _refuse_useless(load or calibration is not None, device, adapters_dir, traffic)
    try:
        settings = _with_policy(settings, policy)
        session = Session(Path(model), adapter or (), calibration, settings)
        with results_only_on_stdout():
            if load or calibration is not None:
                report = session.serve().audit(policy=policy, tokens=tokens)
            else:
                report = _of_folder(session, policy, device, tokens, _fleet(adapters_dir, traffic))
    except BranchlineError as error:
        note("error: " + " ".join(str(error).split()))
        raise typer.Exit(INCOMPLETE) from error
    if json:
        print_json(report.model_dump_json(indent=2))
    else:
        report.render(console())
    if report.problems:
        raise typer.Exit(INCOMPLETE)


def _refuse_useless(
    loads: bool, device: str | None, adapters_dir: Path | None, traffic: Path | None
) -> None:
    if traffic is not None and adapters_dir is None:
        raise typer.BadParameter("weights a fleet: add --adapters-dir", param_hint="--traffic")
    for flag, given in (("--device", device), ("--adapters-dir", adapters_dir)):
        if loads and given is not None:
            raise typer.BadParameter(
                "needs no weights: drop --load and --calibration", param_hint=flag
            )


def _with_policy(settings: WrapConfig, policies: list[str] | None) -> WrapConfig:
    if not policies:
        return settings
    given = settings.model_dump(include=settings.model_fields_set)
    return type(settings).checked(**{**given, "policy": policies[0]})


def _of_folder(
    session: Session,
    policies: list[str] | None,
    device: str | None,
    tokens: int,
    fleet: tuple[Path, Mapping[str, float] | None] | None,
) -> AuditReport:
    session.say(f"reading {session.folder}")
    # transformers and PEFT come with it.
    from ..core.platform import detect_platform
    from ..policies.cost import cost_model_for, cost_model_of
    from ..policies.policy import make_policy
    from ..serving.hollow.audit import Fleet, FolderAudit

    names = policies or [session.settings.policy]
    model = cost_model_of(detect_platform()) if device is None else cost_model_for(device)
    return FolderAudit(
        session.folder,
        session.settings,
        model.device.platform,
        model,
        tuple(map(make_policy, names)),
        {given.name: given.source for given in session.adapters},
        None if fleet is None else Fleet(*fleet),
        tokens,
    ).run()


def _fleet(
    folder: Path | None, traffic: Path | None
) -> tuple[Path, Mapping[str, float] | None] | None:
    if folder is None:
        return None
    return folder, None if traffic is None else read_traffic(traffic)


def read_traffic(path: Path) -> dict[str, float]:
    """How often each adapter is used.

    Args:
        path: JSON: an object of numbers by name, or what `/v1/adapters` answers.

    Raises:
        ConfigError: it is neither.
    """
    subject = f"traffic file {str(path)!r}"
    remedy = "write {name: requests}, or save what the server's /v1/adapters answers"
    try:
        given = jsonlib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(subject, f"cannot be read ({error})", remedy) from error
    if isinstance(given, dict) and isinstance(given.get("data"), list):
        given = {
            entry.get("name"): entry.get("hits")
            for entry in given["data"]
            if isinstance(entry, dict)
        }
    try:
        return TypeAdapter(dict[str, Annotated[float, Field(ge=0, strict=True)]]).validate_python(
            given
        )
    except ValidationError as error:
        raise ConfigError(subject, "holds no numbers by name", remedy) from error

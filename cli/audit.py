"""`branchline audit`: which sites are fused, for whom, why, and what adapters cost."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import Field, TypeAdapter, ValidationError

from ..core.devices import DEVICE_KINDS
from ..core.errors import BranchlineError, ConfigError
from ..serving.config import WrapConfig
from .audit_output import FIRED, INCOMPLETE, code_of, told, write, write_diff
from .options import help_of, with_settings
from .output import console, note, results_only_on_stdout
from .session import AdapterOption, CalibrationOption, JsonOption, Session

if TYPE_CHECKING:
    from ..policies.audit.diff import AuditDiff
    from ..policies.audit.report import AuditReport
    from ..policies.audit.rules import Rule

TargetsArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="MODEL | URL | diff BEFORE AFTER",
        help="Folder of a transformers checkpoint; address of a running server (http://...); or "
        "two audits that were saved with --json, to be compared.",
    ),
]
PolicyOption = Annotated[
    list[str] | None,
    typer.Option(
        help=f"{help_of(WrapConfig.model_fields['policy'])} Repeatable: routes and costs are "
        "shown under each."
    ),
]
CompareOption = Annotated[
    tuple[str, str] | None,
    typer.Option(metavar="POLICY POLICY", help="Show what changes from one policy to another."),
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
    int,
    typer.Option(
        min=1, max=1 << 20, help="Tokens of the batches that bytes and times are told for."
    ),
]
LoadOption = Annotated[
    bool,
    typer.Option(
        "--load", help="Load the weights and wrap the model, in the place of reading headers alone."
    ),
]
FailOnOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="RULE",
        help="Exit with 1 where RULE is true, such as 'unfused>10%', 'adapter:sql unfused>3', "
        "'bytes>25%', 'reason:hook', 'kernel:emulated', mismatch; of a comparison: worse. "
        "Repeatable.",
    ),
]
HtmlOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write one HTML file that needs nothing else.")
]
MarkdownOption = Annotated[bool, typer.Option("--markdown", help="Print Markdown.")]
KeyOption = Annotated[
    str | None, typer.Option(envvar="BRANCHLINE_ADMIN_KEY", help="Of a server: an admin key.")
]
WatchOption = Annotated[
    bool, typer.Option("--watch", help="Of a server: show its routes live, until Ctrl-C.")
]
IntervalOption = Annotated[
    float, typer.Option(min=0.1, max=3600, help="With --watch: seconds between two looks.")
]

#: The rule of comparisons.
_WORSE = "worse"


@dataclass(frozen=True)
class _Form:
    """How the report is told, and what it must not say."""

    json: bool
    markdown: bool
    html: Path | None
    fail_on: tuple[str, ...]
    compare: tuple[str, str] | None

    @property
    def compares(self) -> bool:
        return self.compare is not None


@with_settings(WrapConfig, without=("policy",))
def audit(
    targets: TargetsArgument,
    *,
    adapter: AdapterOption = None,
    adapters_dir: AdaptersDirOption = None,
    traffic: TrafficOption = None,
    policy: PolicyOption = None,
    compare: CompareOption = None,
    device: DeviceOption = None,
    tokens: TokensOption = 64,
    load: LoadOption = False,
    calibration: CalibrationOption = None,
    api_key: KeyOption = None,
    watch: WatchOption = False,
    interval: IntervalOption = 2.0,
    fail_on: FailOnOption = None,
    json: JsonOption = False,
    markdown: MarkdownOption = False,
    html: HtmlOption = None,
    settings: WrapConfig,
) -> None:
    """Show for every site who reads its output, its route for each set of adapters, and its cost.

    The sets are: no adapter, each adapter alone, all of them together.  Weights are not loaded:
    config, headers and adapters tell all but what was calibrated; with --load everything has to
    load.  Exit code 0 where all is well, 1
    where a rule of --fail-on fires, 2 where a part could not be audited (the rest is shown all the
    same).
    """
    form = _Form(json, markdown, html, tuple(fail_on or ()), compare)
    policies = list(dict.fromkeys((*(policy or ()), *(compare or ()))))
    try:
        if json and markdown:
            raise typer.BadParameter("prints one of the two", param_hint="--json, --markdown")
        if compare is not None and (markdown or html is not None):
            raise typer.BadParameter(
                "is for whole audits; a comparison is text or --json",
                param_hint="--markdown, --html",
            )
        if targets[0] == "diff" and len(targets) > 1:
            _refuse_of_differences(
                adapter, adapters_dir, traffic, policy, compare, device, load, calibration, watch,
                markdown, html,
            )  # fmt: skip
            code = _diff(targets[1:], form)
        elif len(targets) > 1:
            raise typer.BadParameter(f"one model, not {len(targets)}: {' '.join(targets)}")
        elif targets[0].lower().startswith(("http://", "https://")):
            _refuse_of_servers(adapter, adapters_dir, device, load, calibration)
            code = _of_server(targets[0], api_key, policies, tokens, form, watch, interval)
        else:
            if watch:
                raise typer.BadParameter("is for a running server", param_hint="--watch")
            _refuse_useless(load or calibration is not None, device, adapters_dir, traffic)
            settings = _with_policy(settings, policies)
            session = Session(Path(targets[0]), adapter or (), calibration, settings)
            rules = _rules(form)
            with results_only_on_stdout():
                if load or calibration is not None:
                    report = session.serve().audit(policy=policies, tokens=tokens)
                else:
                    fleet = _fleet(adapters_dir, traffic)
                    report = _of_folder(session, policies, device, tokens, fleet)
            code = _finish(report, rules, form)
    except BranchlineError as error:
        note("error: " + " ".join(str(error).split()))
        raise typer.Exit(INCOMPLETE) from error
    if code:
        raise typer.Exit(code)


# --- what is asked for ---------------------------------------------------------------------------


def _rules(form: _Form) -> tuple[Rule, ...]:
    from ..policies.audit.rules import Rule

    return tuple(Rule.parse(text) for text in form.fail_on if text != _WORSE or not form.compares)


def _finish(report: AuditReport, rules: Sequence[Rule], form: _Form) -> int:
    """Tell the report as it was asked for; the exit code."""
    fired = told(report, rules)
    code = code_of(report, fired)
    if form.compare is None:
        write(report, fired, json=form.json, markdown=form.markdown, html=form.html)
        return code
    from ..policies.audit.diff import compare
    from ..policies.base import label_of
    from ..policies.policy import make_policy

    first, second = (label_of(make_policy(text)) for text in form.compare)
    return max(code, _tell_diff(compare(report, first, second), form))


def _tell_diff(found: AuditDiff, form: _Form) -> int:
    write_diff(found, json=form.json)
    return FIRED if found.worse and _WORSE in form.fail_on else 0


def _diff(paths: Sequence[str], form: _Form) -> int:
    if len(paths) != 2:
        raise typer.BadParameter("diff takes two saved audits: diff BEFORE.json AFTER.json")
    if unknown := [rule for rule in form.fail_on if rule != _WORSE]:
        raise typer.BadParameter(f"of two audits: worse, not {unknown[0]}", param_hint="--fail-on")
    from ..policies.audit.diff import diff
    from ..policies.audit.schema import read_report

    before, after = (read_report(Path(path)) for path in paths)
    return _tell_diff(diff(before, after), form)


def _of_server(
    url: str,
    api_key: str | None,
    policies: list[str],
    tokens: int,
    form: _Form,
    watches: bool,
    interval: float,
) -> int:
    from ..serving.remote_audit import RemoteAudit

    rules = _rules(form)
    with RemoteAudit(url, api_key, policies) as remote:
        if watches:
            _refuse_of_watching(form)
            from .watch import watch

            watch(remote.report, console(), interval)
            return 0
        return _finish(remote.report(tokens), rules, form)


def _refuse_of_watching(form: _Form) -> None:
    given = {
        "--json": form.json, "--markdown": form.markdown, "--html": form.html,
        "--fail-on": form.fail_on, "--compare": form.compare,
    }  # fmt: skip
    for flag, value in given.items():
        if value:
            raise typer.BadParameter("is for one look, not for --watch", param_hint=flag)


def _refuse_of_differences(*given: object) -> None:
    flags = (
        "--adapter", "--adapters-dir", "--traffic", "--policy", "--compare", "--device", "--load",
        "--calibration", "--watch", "--markdown", "--html",
    )  # fmt: skip
    for flag, value in zip(flags, given, strict=True):
        if value:
            raise typer.BadParameter("has no effect on two saved audits", param_hint=flag)


def _refuse_of_servers(*given: object) -> None:
    flags = ("--adapter", "--adapters-dir", "--device", "--load", "--calibration")
    for flag, value in zip(flags, given, strict=True):
        if value:
            raise typer.BadParameter("is the running server's matter", param_hint=flag)


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
        return TypeAdapter(
            dict[str, Annotated[float, Field(ge=0, le=1e15, strict=True)]]
        ).validate_python(given)
    except ValidationError as error:
        raise ConfigError(subject, "holds no numbers by name", remedy) from error

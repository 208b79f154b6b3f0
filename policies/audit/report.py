"""What an audit says: one document, told as text, JSON, Markdown or HTML."""

from __future__ import annotations

import io
from typing import Annotated, Literal

from pydantic import Field
from rich.console import Console

from ...core.report import ReportPart

#: Raised whenever a field goes, comes or changes its meaning.
SCHEMA_VERSION = 5


class Rejected(ReportPart):
    """A producer that was passed over."""

    producer: str
    reason: str


class RouteReport(ReportPart):
    """One site's route for one adapter set under one policy.

    `code` is the reason as a word (`ReasonCode`).
    `bytes_per_token` counts what the route writes and reads again until codes and shrunk rows are
    there, of a batch in which every row has one of the adapters, evenly spread; `seconds_per_token`
    is what the device takes for that by the cost model.
    """

    policy: str
    adapters: tuple[str, ...]
    route: Literal["fused", "unfused", "dual", "absorbed"]
    code: str
    reason: str
    producer: str
    emulated: bool
    rejected: tuple[Rejected, ...]
    raw_readers: tuple[str, ...]
    blame: tuple[str, ...]
    bytes_per_token: float
    seconds_per_token: float


class SiteReport(ReportPart):
    """One site: what it is, what is planned, and what ran.

    `columns` is the width of its output, `rows_per_token` how many rows a token has there (between
    the projections of experts, one for each expert that it is given to).  `share` is its part of
    the model's activation traffic without adapters, under the first policy.  `planned` counts calls
    by the route that their plan said, `ran` by the one they took; where the two differ, or a
    planned producer did not run, `mismatches` says so.
    """

    site: str
    kind: str
    semantics: str | None
    key: str | None
    columns: int
    rows_per_token: int
    share: float
    consumers: tuple[str, ...]
    other_readers: tuple[str, ...]
    kernels: tuple[str, ...]
    emulated_kernel: bool
    routes: tuple[RouteReport, ...]
    planned: dict[str, int]
    ran: dict[str, int]
    fallbacks: dict[str, int]
    mismatches: tuple[str, ...]


class AdapterCost(ReportPart):
    """What one adapter costs under one policy, in a batch of which every row has it.

    The counts are of sites that are fused without it.  `extra_bytes_per_token` is what its batch
    moves more than one without adapters, `extra_share` the same as a part of the latter;
    `extra_seconds_per_token` by the cost model.
    """

    policy: str
    sites_unfused: int
    sites_dual: int
    sites_absorbed: int
    bytes_per_token: float
    extra_bytes_per_token: float
    extra_share: float
    extra_seconds_per_token: float


class Advice(ReportPart):
    """What would cost less, with numbers.

    `sites` is how many stay fused by it; `saved_share` the activation traffic that it saves, as a
    part of what the adapter's batch moves.
    """

    text: str
    sites: int
    saved_share: float


class AdapterReport(ReportPart):
    """One adapter and what it costs; `sites_unfused` is under the first policy."""

    name: str
    digest: str
    source: str
    rank: int
    modules: int
    nbytes: int
    notes: tuple[str, ...]
    sites_unfused: int
    peft_type: str
    state: str
    tier: str
    costs: Annotated[tuple[AdapterCost, ...], Field(min_length=1)]
    advice: tuple[Advice, ...]


class TargetCost(ReportPart):
    """What adapters on some target modules cost a whole fleet, under the first policy.

    `targets` are ends of module names whose branches together keep sites from being fused;
    `adapters` how many have them, `weight` their part of the traffic, `sites` how many each takes
    at most, `extra_bytes_per_token` the mean over all traffic.
    """

    targets: tuple[str, ...]
    adapters: int
    weight: float
    sites: int
    extra_bytes_per_token: float
    extra_share: float


class FleetReport(ReportPart):
    """All adapters together: `shapes` of them differ; `weights` says what they are weighted by."""

    adapters: int
    shapes: int
    weights: Literal["evenly", "traffic"]
    targets: tuple[TargetCost, ...]


class Excluded(ReportPart):
    """A linear, or experts, that no site feeds or that were not wrapped, and why."""

    name: str
    reason: str


class PassedOver(ReportPart):
    """A base matmul kernel that was preferred, and why it was not chosen."""

    kernel: str
    reason: str


class KernelReport(ReportPart):
    """A base matmul kernel, how many linears it serves, and why no other does.

    `experts` is how many experts each of its `linears` has, which are then projections of experts;
    0 for linears of their own.  `weight_bytes` counts the weights of those linears in memory,
    scales included; `scales` says where calibrated input scales come from.
    """

    name: str
    key: str | None
    emulated: bool
    linears: int
    experts: int
    weight_bytes: int
    scales: tuple[str, ...]
    rejected: tuple[PassedOver, ...]


class BranchReport(ReportPart):
    """A kernel of adapters' low-rank products, how many linears it serves, and why no other does.

    `fallbacks` counts the calls that the eager definition computed in its place, by reason.
    """

    name: str
    linears: int
    rejected: tuple[PassedOver, ...]
    fallbacks: dict[str, int]


class CheckpointReport(ReportPart):
    """How a quantised checkpoint was read: what was chosen from where, and what matched nothing."""

    decisions: tuple[str, ...]
    unmatched: tuple[str, ...]


class DeviceReport(ReportPart):
    """What times are estimated for.

    `bandwidth` in bytes a second; `measured` whether the constants were measured on this device (by
    `branchline calibrate`) or are those of its datasheet; `note` why they were not.
    """

    kind: str
    bandwidth: float
    measured: bool
    fingerprint: str
    note: str


class Problem(ReportPart):
    """A part that could not be audited; the rest was."""

    part: str
    reason: str
    remedy: str


class AuditReport(ReportPart):
    """What `ServedModel.audit()` returns; `str()` is the table, `model_dump_json()` the JSON.

    `source` says what was audited: "model" (one that is served), "folder" (headers and config, no
    weights) or "server".  `policy` is the first of `policies`.  `tokens` is the batch that bytes
    and seconds per token are told for.  `assumptions` say what a folder without weights does not
    tell.  `loaded` counts all adapters that were read; where they are many, `adapters` lists those
    in slots.
    """

    schema_version: int = SCHEMA_VERSION
    source: Literal["model", "folder", "server"]
    model: str
    versions: dict[str, str]
    epoch: int
    policy: str
    policies: tuple[str, ...]
    platform: str
    native_reason: str
    device: DeviceReport
    tokens: int
    assumptions: tuple[str, ...]
    problems: tuple[Problem, ...]
    kernels: tuple[KernelReport, ...]
    branches: tuple[BranchReport, ...]
    checkpoint: CheckpointReport | None
    adapter_sets: tuple[tuple[str, ...], ...]
    sites: tuple[SiteReport, ...]
    adapters: tuple[AdapterReport, ...]
    fleet: FleetReport | None
    loaded: int
    unsited: tuple[Excluded, ...]
    unwrapped: tuple[Excluded, ...]

    def render(self, console: Console) -> None:
        """Print the report for a person."""
        from .tables import headline, tables

        console.print(headline(self))
        for table in tables(self):
            console.print(table)

    def __str__(self) -> str:
        buffer = io.StringIO()
        self.render(Console(file=buffer, width=140, no_color=True))
        return buffer.getvalue()

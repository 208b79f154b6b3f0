"""What a simulation says."""

from __future__ import annotations

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from ...core.report import ReportPart

SCHEMA_VERSION = 1


class SimulatedCase(ReportPart):
    """One policy with so many slots.

    `hit_rate` is of requests with an adapter: those whose adapter had a slot at their first
    forward.  `stall_seconds_per_request` is what forwards waited for slots to be written.
    `share_lost` is the part of the busy time that the same forwards without adapters would not
    take, stalls included.  Tokens a second are of one replica while it is busy; the whole fleet's
    are `fleet_tokens_per_second`, while it answers.
    """

    policy: str
    slots: int
    hit_rate: float
    loads_per_request: float
    stall_seconds_per_request: float
    stall_share: float
    share_lost: float
    tokens_per_second: float
    fleet_tokens_per_second: float
    first_token_p50: float
    first_token_p99: float


class SimulationReport(ReportPart):
    """What `branchline simulate` returns; `simulated` replicas stand for all of them."""

    schema_version: int = SCHEMA_VERSION
    model: str
    device: str
    measured: bool
    trace: str
    requests: int
    adapters: int
    replicas: int
    simulated: int
    routing: str
    seconds: float
    cases: tuple[SimulatedCase, ...]

    def render(self, console: Console) -> None:
        """Print the report for a person."""
        costs = "measured" if self.measured else "datasheet"
        head = Text(
            f"{self.requests} requests of {self.adapters} adapters on {self.replicas} replicas "
            f"({self.simulated} simulated) of {self.device} ({costs} costs), {self.routing} "
            f"routing, {self.trace}"
        )
        console.print(head)
        names = ("slots", "hits", "loads", "stall", "stalled", "lost to adapters")
        last = ("tokens/s", "of all", "first token", "p99")
        note = "loads and stalls a request; tokens/s of one busy replica; first token: median, p99"
        table = Table(
            "policy", *(Column(name, justify="right") for name in (*names, *last)), caption=note
        )
        for case in self.cases:
            table.add_row(
                case.policy,
                str(case.slots),
                f"{100 * case.hit_rate:.1f} %",
                f"{case.loads_per_request:.3f}",
                f"{1e3 * case.stall_seconds_per_request:.3f} ms",
                f"{100 * case.stall_share:.1f} %",
                f"{100 * case.share_lost:.1f} %",
                f"{case.tokens_per_second:,.0f}",
                f"{case.fleet_tokens_per_second:,.0f}",
                f"{1e3 * case.first_token_p50:.1f} ms",
                f"{1e3 * case.first_token_p99:.1f} ms",
            )
        console.print(table)

"""Rules for a build: what an audit must not say.

    unfused>10%                 unfused sites, of all (also fused, dual, absorbed, emulated)
    unfused>=3, fused<90%       by number, and by the other signs
    adapter:sql unfused>3       the same in batches of one adapter alone ("my sql" with blanks)
    policy:absorbed unfused>0   the same under one policy, where several were audited
    bytes>2e5                   bytes a token that an adapter's batch moves more than one without
    bytes>25%                   the same, as a part of what a batch without adapters moves
    reason:unknown-consumer     a site is unfused for this reason (see `ReasonCode`)
    kernel:emulated             a base kernel of this name, or an emulated one
    producer:eager              a producer of this name, or an emulated one, is planned
    mismatch                    what ran is not what was planned
    problem                     a part could not be audited

A rule fires where it is true.  Counts are of the worst adapter set that was audited.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ...core.errors import ConfigError
from ...core.report import ReportPart
from ...core.route import Route
from ...fusion import REGISTRY
from ...linear.experts.kernels.selection import grouped_kernel_names
from ...linear.kernels.float import FloatLinear
from ...linear.kernels.native_bf16 import NativeBf16Linear
from ...linear.kernels.selection import kernel_names
from ..reasons import ReasonCode
from .groups import without_index
from .report import AuditReport, RouteReport, SiteReport

_FORMS = (
    "write such as unfused>10%, unfused>3, adapter:sql unfused>3, policy:dual unfused>0, "
    "bytes>25%, reason:hook, kernel:emulated, producer:eager, mismatch or problem"
)
_COUNT = re.compile(
    r"(?P<what>[a-z]+)\s*(?P<sign>[<>]=?)\s*(?P<number>\d+(?:\.\d+)?(?:e\d+)?)\s*(?P<part>%?)",
    re.ASCII,
)
_SCOPE = re.compile(r'(adapter|policy):("[^"]+"|\S+)\s+')
_SIGNS: Mapping[str, Callable[[float, float], bool]] = MappingProxyType(
    {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}
)
_NAMED = re.compile(r"(reason|kernel|producer):(\S+)")
_EMULATED = "emulated"
_FLOAT_KERNELS = (FloatLinear.name, NativeBf16Linear.name)
_KNOWN: Mapping[str, Callable[[], set[str]]] = MappingProxyType(
    {
        "kernel": lambda: {*kernel_names(), *grouped_kernel_names(), *_FLOAT_KERNELS},
        "producer": lambda: {p.name for entry in REGISTRY.entries().values() for p in entry},
    }
)
_ROUTES = tuple(str(route) for route in Route)


class Fired(ReportPart):
    """A rule that is true, and where."""

    rule: str
    found: str


@dataclass(frozen=True)
class Rule:
    """One rule.

    Attributes:
        text: as it was written.
        check: says where it is true, of a report; nothing where it is not.
    """

    text: str
    check: Callable[[AuditReport], Iterable[str]]

    @classmethod
    def parse(cls, text: str) -> Rule:
        """Read a rule.

        Raises:
            ConfigError: it is none; the message says which part is not understood.
        """
        return cls(text, _parse(text))

    def fired(self, report: AuditReport) -> Iterator[Fired]:
        """Where it is true.

        Raises:
            ConfigError: it names an adapter or a policy that was not audited.
        """
        for found in self.check(report):
            yield Fired(rule=self.text, found=found)


def check_rules(rules: Iterable[Rule], report: AuditReport) -> tuple[Fired, ...]:
    """All that fire.

    Raises:
        ConfigError: as `Rule.fired`.
    """
    return tuple(fired for rule in rules for fired in rule.fired(report))


def _refuse(text: str, reason: str) -> ConfigError:
    return ConfigError(f"rule {text!r}", reason, f"{_FORMS} (command line: --fail-on)")


# --- reading -------------------------------------------------------------------------------------


def _parse(text: str) -> Callable[[AuditReport], Iterable[str]]:
    rest, scope = text.strip(), _Scope(text)
    while (found := _SCOPE.match(rest)) is not None:
        scope = scope.narrowed(found[1], found[2].strip('"'))
        rest = rest[found.end() :]
    facts = {"mismatch": _mismatches, "problem": _problems}
    if rest in facts:
        if scope != _Scope(text):
            raise _refuse(text, f"{rest} is the same for all adapters and policies")
        return facts[rest]
    named = _NAMED.fullmatch(rest)
    if named is not None:
        return _named(text, named[1], named[2], scope)
    count = _COUNT.fullmatch(rest)
    if count is None:
        raise _refuse(text, f"{rest!r} is no condition")
    return _counted(text, count, scope)


@dataclass(frozen=True)
class _Scope:
    """Which of the audited routes a rule looks at."""

    text: str
    adapter: str | None = None
    policy: str | None = None

    def narrowed(self, what: str, name: str) -> _Scope:
        if getattr(self, what) is not None:
            raise _refuse(self.text, f"names {what}s twice")
        adapter, policy = self.adapter, self.policy
        return _Scope(
            self.text,
            name if what == "adapter" else adapter,
            name if what == "policy" else policy,
        )

    def policies(self, report: AuditReport) -> tuple[str, ...]:
        if self.policy is None:
            return report.policies
        if self.policy not in report.policies:
            known = ", ".join(report.policies)
            raise _refuse(self.text, f"policy {self.policy!r} was not audited, but {known}")
        return (self.policy,)

    def sets(self, report: AuditReport) -> tuple[tuple[str, ...], ...]:
        if self.adapter is None:
            return report.adapter_sets
        if (self.adapter,) not in report.adapter_sets:
            names = ", ".join(s[0] for s in report.adapter_sets if len(s) == 1) or "none"
            reason = f"adapter {self.adapter!r} was not audited alone; those that were: {names}"
            raise _refuse(self.text, reason)
        return ((self.adapter,),)

    def routes(self, report: AuditReport) -> Iterator[tuple[SiteReport, RouteReport]]:
        policies, sets = self.policies(report), self.sets(report)
        for site in report.sites:
            for route in site.routes:
                if route.policy in policies and route.adapters in sets:
                    yield site, route


# --- conditions ----------------------------------------------------------------------------------


def _named(
    text: str, what: str, name: str, scope: _Scope
) -> Callable[[AuditReport], Iterable[str]]:
    if what == "reason":
        if name not in tuple(ReasonCode):
            raise _refuse(text, f"{name!r} is no reason: {', '.join(ReasonCode)}")
        return lambda report: _grouped(
            (without_index(f"{site.site}: {route.reason}"), _batch(route))
            for site, route in scope.routes(report)
            if route.code == name
        )
    if name != _EMULATED and name not in (known := _KNOWN[what]()):
        raise _refuse(text, f"{name!r} is no {what}: {', '.join(sorted(known))}")
    if what == "producer":
        return lambda report: _grouped(
            (without_index(f"{site.site}: {route.route} by {route.producer}"), _batch(route))
            for site, route in scope.routes(report)
            if route.producer == name or (name == _EMULATED and route.emulated)
        )
    if scope != _Scope(text):
        raise _refuse(text, "kernels are the same for all adapters and policies")
    return lambda report: (
        f"kernel {kernel.name} serves {kernel.linears} linears"
        for kernel in report.kernels
        if kernel.name == name or (name == _EMULATED and kernel.emulated)
    )


def _counted(
    text: str, count: re.Match[str], scope: _Scope
) -> Callable[[AuditReport], Iterable[str]]:
    limit = float(count["number"]) / (100 if count["part"] else 1)
    compare = _SIGNS[count["sign"]]

    def beyond(value: float) -> bool:
        return compare(value, limit)

    if count["what"] == "bytes":
        return lambda report: _dear(report, scope, beyond, share=bool(count["part"]))
    if count["what"] not in (*_ROUTES, _EMULATED):
        known = ", ".join((*_ROUTES, _EMULATED, "bytes"))
        raise _refuse(text, f"{count['what']!r} cannot be counted; what can: {known}")
    return lambda report: _many(report, scope, count["what"], beyond, share=bool(count["part"]))


def _many(
    report: AuditReport,
    scope: _Scope,
    route: str,
    beyond: Callable[[float], bool],
    *,
    share: bool,
) -> Iterator[str]:
    counts: dict[tuple[str, tuple[str, ...]], int] = {}
    for _, planned in scope.routes(report):
        key = planned.policy, planned.adapters
        counted = planned.emulated if route == _EMULATED else planned.route == route
        counts[key] = counts.get(key, 0) + counted
    total = len(report.sites)
    for (policy, adapters), number in counts.items():
        if total and beyond(number / total if share else number):
            yield f"{number} of {total} sites are {route} {_told(policy, adapters)}"


def _dear(
    report: AuditReport, scope: _Scope, beyond: Callable[[float], bool], *, share: bool
) -> Iterator[str]:
    policies = scope.policies(report)
    known = {adapter.name for adapter in report.adapters}
    if scope.adapter is not None and scope.adapter not in known:
        scope.sets(report)
    for adapter in report.adapters:
        if scope.adapter not in (None, adapter.name):
            continue
        for cost in adapter.costs:
            value = cost.extra_share if share else cost.extra_bytes_per_token
            if cost.policy in policies and beyond(value):
                yield (
                    f"adapter {adapter.name} moves {cost.extra_bytes_per_token:,.0f} bytes a token "
                    f"more ({100 * cost.extra_share:.1f} %) under policy {cost.policy}"
                )


def _mismatches(report: AuditReport) -> Iterator[str]:
    return (f"{site.site}: {text}" for site in report.sites for text in site.mismatches)


def _problems(report: AuditReport) -> Iterator[str]:
    return (f"{problem.part}: {problem.reason}" for problem in report.problems)


def _batch(route: RouteReport) -> str:
    return _told(route.policy, route.adapters)


def _told(policy: str, adapters: tuple[str, ...]) -> str:
    return f"in batches of {', '.join(adapters) or 'no adapter'} under policy {policy}"


def _grouped(found: Iterable[tuple[str, str]]) -> Iterator[str]:
    """What is alike for several batches, once."""
    first: dict[str, list[str]] = {}
    for what, batch in found:
        first.setdefault(what, []).append(batch)
    for what, batches in first.items():
        more = f" and {len(batches) - 1} more" if len(batches) > 1 else ""
        yield f"{what} ({batches[0]}{more})"

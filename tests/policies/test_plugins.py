"""Policies of other distributions: found by name, checked, and told when broken."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import Annotated, ClassVar

import pytest
from pydantic import BaseModel, ConfigDict, Field

from branchline.core.errors import ConfigError
from branchline.policies import plugins
from branchline.policies.base import Policy
from branchline.policies.own import DynamicPolicy
from branchline.policies.policy import make_policy, policy_names


class _Mine(Policy):
    def choose(self, state):
        return DynamicPolicy().choose(state)


class Tuned(BaseModel, _Mine):
    model_config = ConfigDict(frozen=True)
    name: ClassVar[str] = "tuned"
    least: Annotated[int, Field(ge=1)] = 8
    quick: bool = False


@dataclass(frozen=True)
class Plain(_Mine):
    name: ClassVar[str] = "plain"
    share: float = 0.5


@dataclass
class Mutable(_Mine):
    name: ClassVar[str] = "mutable"


class Thawed(BaseModel, _Mine):
    name: ClassVar[str] = "thawed"


@dataclass(frozen=True)
class Misnamed(_Mine):
    name: ClassVar[str] = "another"


@dataclass(frozen=True)
class Unfinished(Policy):
    name: ClassVar[str] = "unfinished"


def function():
    """No policy."""


class _Dist:
    def __init__(self, name: str) -> None:
        self.name = name


@pytest.fixture
def installed(monkeypatch):
    """Pretends that distributions with these entry points are installed."""

    def install(**points: str) -> None:
        made = [
            EntryPoint(name.rstrip("_"), value, plugins.GROUP)._for(_Dist(f"dist-of-{name}"))  # type: ignore[attr-defined]
            for name, value in points.items()
        ]
        monkeypatch.setattr(plugins, "entry_points", lambda group: made)

    return install


HERE = __name__


def test_a_plug_in_is_found_with_its_options(installed):
    installed(tuned=f"{HERE}:Tuned", plain=f"{HERE}:Plain")
    assert {"tuned", "plain", "auto", "dynamic"} <= set(policy_names())
    assert make_policy("tuned") == Tuned()
    assert make_policy("tuned:least=3, quick=true") == Tuned(least=3, quick=True)
    assert make_policy("plain:share=0.25").share == 0.25
    assert make_policy("plain") == make_policy("plain")
    assert hash(make_policy("tuned:least=3")) == hash(Tuned(least=3))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tuned:least=0", "option least: Input should be greater than or equal to 1"),
        ("tuned:least=many", "option least: Input should be a valid integer"),
        ("plain:share=half", "option share"),
        ("tuned:most=3", "has no option 'most'; choose from: least, quick"),
        ("dynamic:fast=1", "has no option 'fast'; write its name alone"),
        ("tuned:least", "'least' is no key=value"),
        ("tuned:", "is no key=value"),
        ("tuned:least=1,least=2", "sets least twice"),
        ("auto:device=abacus", ""),
    ],
)
def test_wrong_options_are_refused(installed, text, message):
    installed(tuned=f"{HERE}:Tuned", plain=f"{HERE}:Plain")
    if text.startswith("auto"):
        from branchline.core.platform import detect_platform

        with pytest.raises(ConfigError, match="abacus"):
            make_policy(text).bound(detect_platform())
        return
    with pytest.raises(ConfigError) as caught:
        make_policy(text)
    assert message in str(caught.value)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("gone", "no.such.module:Thing", "cannot be loaded from no.such.module:Thing"),
        ("lacking", f"{HERE}:Nowhere", "AttributeError"),
        ("function", f"{HERE}:function", "is no subclass of branchline.policies.Policy"),
        ("mutable", f"{HERE}:Mutable", "neither a frozen dataclass nor a frozen pydantic model"),
        ("thawed", f"{HERE}:Thawed", "is a model that is not frozen"),
        ("misnamed", f"{HERE}:Misnamed", "calls itself 'another'"),
        ("unfinished", f"{HERE}:Unfinished", "lacks choose"),
    ],
)
def test_a_broken_plug_in_is_told_and_disturbs_no_other(installed, name, value, message):
    installed(**{name: value, "plain": f"{HERE}:Plain"})
    with pytest.raises(ConfigError) as caught:
        make_policy(name)
    for part in (name, f"dist-of-{name}", message, "--policy"):
        assert part in str(caught.value)
    assert make_policy("plain") == Plain()
    assert make_policy("dynamic") == DynamicPolicy()
    assert name in policy_names()


def test_clashes_are_refused_by_all_their_owners(installed):
    installed(plain=f"{HERE}:Plain", plain_=f"{HERE}:Plain", dynamic=f"{HERE}:Plain")
    with pytest.raises(ConfigError, match="dist-of-plain, dist-of-plain_"):
        make_policy("plain")
    with pytest.raises(ConfigError, match="of branchline, dist-of-dynamic"):
        make_policy("dynamic")
    assert make_policy("dual").name == "dual"


def test_an_unknown_policy_lists_plug_ins_too(installed):
    installed(plain=f"{HERE}:Plain")
    with pytest.raises(ConfigError, match="absorbed, auto, dual, dynamic, plain, static"):
        make_policy("plane")

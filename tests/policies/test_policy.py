from __future__ import annotations

import dataclasses

import pytest

from branchline.core.errors import ConfigError
from branchline.core.route import Route
from branchline.linear.registry import RawReader
from branchline.policies.policy import (
    AbsorbedPolicy,
    DualPolicy,
    DynamicPolicy,
    SiteState,
    StaticPolicy,
    make_policy,
)

BRANCH = RawReader("branch", "sql", "layers.3.mlp.down_proj")
HOOK = RawReader("hook", "log_inputs", "layers.3.mlp.up_proj")


@pytest.mark.parametrize("may_carry", [False, True])
def test_dynamic_fuses_unless_a_reader_is_live(may_carry):
    policy = DynamicPolicy()
    assert policy.choose(SiteState((), may_carry))[0].route is Route.FUSED
    assert policy.choose(SiteState((BRANCH,), may_carry))[0].route is Route.UNFUSED
    assert policy.choose(SiteState((HOOK,), may_carry))[0].route is Route.UNFUSED


def test_dynamic_names_adapter_hook_and_layer():
    reason = DynamicPolicy().choose(SiteState((BRANCH, HOOK), True))[0].reason
    for part in ("sql", "layers.3.mlp.down_proj", "log_inputs", "layers.3.mlp.up_proj"):
        assert part in reason
    assert DynamicPolicy().choose(SiteState((), True))[0].reason


def test_static_never_fuses_what_may_carry_an_adapter():
    policy = StaticPolicy()
    choice = policy.choose(SiteState((), True))[0]
    assert choice.route is Route.UNFUSED
    assert "static" in choice.reason
    assert policy.choose(SiteState((BRANCH,), True))[0].route is Route.UNFUSED
    assert policy.choose(SiteState((), False))[0].route is Route.FUSED
    assert policy.choose(SiteState((HOOK,), False))[0].route is Route.UNFUSED
    assert "log_inputs" in policy.choose(SiteState((HOOK,), False))[0].reason


LORA = RawReader("branch", "chat", "layers.3.mlp.down_proj", shrink_rank=16)


def routes(policy, *readers: RawReader) -> list[Route]:
    return [choice.route for choice in policy.choose(SiteState(readers, True))]


def test_dual_prefers_raw_beside_the_codes_where_only_branches_read():
    assert routes(DualPolicy()) == [Route.FUSED]
    assert routes(DualPolicy(), BRANCH, LORA) == [Route.DUAL, Route.UNFUSED]
    assert routes(DualPolicy(), BRANCH, HOOK) == [Route.UNFUSED]


def test_absorbed_takes_lora_alone():
    assert routes(AbsorbedPolicy()) == [Route.FUSED]
    assert routes(AbsorbedPolicy(), LORA) == [Route.ABSORBED, Route.DUAL, Route.UNFUSED]
    assert routes(AbsorbedPolicy(), LORA, BRANCH) == [Route.DUAL, Route.UNFUSED]
    assert routes(AbsorbedPolicy(), LORA, HOOK) == [Route.UNFUSED]
    choice = AbsorbedPolicy().choose(SiteState((LORA, BRANCH), True))[0]
    assert "no LoRA shrink: adapter 'sql'" in choice.reason


@pytest.mark.parametrize(
    "policy", [DynamicPolicy(), DualPolicy(), AbsorbedPolicy()], ids=lambda p: p.name
)
def test_what_is_changed_before_the_linears_cannot_be_codes(policy):
    changer = RawReader("branch", "boft", "layers.3.mlp.down_proj", changes_input=True)
    for readers in ((changer,), (LORA, changer)):
        (choice,) = policy.choose(SiteState(readers, True))
        assert choice.route is Route.UNFUSED
        assert choice.reason == f"changed before the linears by {changer}"


@pytest.mark.parametrize(
    ("name", "cls"),
    [
        ("dynamic", DynamicPolicy),
        ("static", StaticPolicy),
        ("dual", DualPolicy),
        ("absorbed", AbsorbedPolicy),
    ],
)
def test_policies_by_name(name, cls):
    policy = make_policy(name)
    assert type(policy) is cls
    assert policy.name == name


@pytest.mark.parametrize("name", ["", "Dynamic", "fastest", " static"])
def test_unknown_policies_are_refused_with_the_known_ones(name):
    with pytest.raises(ConfigError, match=r"dynamic.*static") as caught:
        make_policy(name)
    assert repr(name) in str(caught.value)


def test_a_policy_sees_a_frozen_state():
    state = SiteState((BRANCH,), True)
    with pytest.raises(dataclasses.FrozenInstanceError):
        state.raw_readers = ()

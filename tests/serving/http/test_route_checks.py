"""The routes of a content are compared before its first request, whatever keeps the slots."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from branchline.adapters.manager import AdapterManager
from branchline.serving.http import route_checks
from branchline.serving.http.audits import KeptAudits
from branchline.serving.http.route_checks import RouteChecks


@pytest.fixture
def served(make_family):
    """One slot, and two adapters of which `attn` has it."""
    family = make_family("llama")
    # Under `absorbed` adapters have routes of their own, that can be compared.
    served = family.wrap(max_loras=1, policy="absorbed")
    for name in ("attn", "mlp"):
        served.adapters.load(name, family.folders[name])
    return served


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...] | None]:
    """What every check was asked to compare."""
    asked: list[tuple[str, ...] | None] = []
    real = route_checks.check_numerics

    def watched(served, *, adapters=None):
        asked.append(None if adapters is None else tuple(adapters))
        return real(served, adapters=adapters)

    monkeypatch.setattr(route_checks, "check_numerics", watched)
    return asked


def no_forwards_run(call) -> Future:
    raise AssertionError("nothing keeps the slots")


def use(checks: RouteChecks, adapters: AdapterManager, name: str) -> None:
    with adapters.lease(name) as lease:
        checks.before_use(lease)


def test_what_was_compared_is_not_compared_again(served, compared):
    checks = RouteChecks(served, no_forwards_run)
    assert checks.at_start().ok
    for _ in range(2):
        for name in ("attn", "mlp"):
            use(checks, served.adapters, name)
    assert compared == [None]
    # Another name of the same content.
    served.adapters.load("again", served.adapters.info("mlp").source)
    use(checks, served.adapters, "again")
    assert compared == [None]


def test_content_that_nobody_compared_is_compared_before_its_first_request(
    served, compared, make_family
):
    checks = RouteChecks(served, no_forwards_run)
    checks.at_start()
    served.adapters.swap("mlp", make_family("llama").folders["all"])
    for _ in range(2):
        use(checks, served.adapters, "mlp")
    assert compared == [None, ("mlp",)]
    assert checks.latest is not None
    assert checks.latest.adapters == ("mlp",)
    assert checks.latest.routes > 0


def test_where_batches_keep_all_slots_the_check_is_made_between_them(served, compared, caplog):
    batch = served.adapters.rows(["attn"])

    def after_the_batch(call) -> Future:
        batch.__exit__(None, None, None)
        made: Future = Future()
        made.set_result(call())
        return made

    checks = RouteChecks(served, after_the_batch)
    with served.adapters.rows(["attn"]):
        pass
    batch.__enter__()
    checks.loaded("mlp")
    assert compared == [("mlp",)] * 2
    assert checks.latest is not None
    assert (checks.latest.adapters, checks.latest.unchecked) == (("mlp",), ())
    assert checks.latest.routes > 0
    use(checks, served.adapters, "mlp")
    assert len(compared) == 2
    assert not caplog.records


def test_what_stays_unchecked_is_told_and_tried_at_the_next_request(served, compared, caplog):
    def at_once(call) -> Future:
        made: Future = Future()
        made.set_result(call())
        return made

    checks = RouteChecks(served, at_once)
    with served.adapters.rows(["attn"]):
        checks.loaded("mlp")
    assert checks.latest is not None
    assert [left.adapters for left in checks.latest.unchecked] == [("mlp",)]
    assert "was not checked" in caplog.text
    use(checks, served.adapters, "mlp")
    assert checks.latest.unchecked == ()
    assert len(compared) == 3


def test_a_check_that_fails_is_logged_and_not_repeated(served, monkeypatch, caplog):
    tries = []

    def fails(served, *, adapters):
        tries.append(adapters)
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(route_checks, "check_numerics", fails)
    checks = RouteChecks(served, no_forwards_run)
    for _ in range(2):
        use(checks, served.adapters, "attn")
    assert tries == [["attn"]]
    assert "could not be checked" in caplog.text


def test_contents_without_a_name_are_forgotten(served, compared, make_family):
    checks = RouteChecks(served, no_forwards_run)
    checks.at_start()
    served.adapters.unload("mlp")
    checks.loaded("mlp")
    checks.loaded("attn")
    served.adapters.load("mlp", make_family("llama").folders["mlp"])
    use(checks, served.adapters, "mlp")
    assert compared == [None, ("attn",), ("mlp",)]


# --- audits --------------------------------------------------------------------------------------


def test_an_audit_is_made_once_an_epoch_for_all_who_look(served, monkeypatch, make_family):
    made = []
    audit = type(served).audit

    def watched(self, **settings):
        made.append(settings["adapter_sets"])
        return audit(self, **settings)

    monkeypatch.setattr(type(served), "audit", watched)
    audits = KeptAudits(served)
    first = audits.of(())
    assert audits.of(()) is first
    assert audits.of(("mlp",)).adapter_sets == ((), ("mlp",))
    assert made == [[()], [(), ("mlp",)]]
    served.adapters.swap("mlp", make_family("llama").folders["all"])
    costs = {adapter.name: adapter.digest for adapter in audits.of(()).adapters}
    assert costs["mlp"] == served.adapters.info("mlp").digest
    assert len(made) == 3

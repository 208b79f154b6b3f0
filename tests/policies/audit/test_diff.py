from __future__ import annotations

import io

import pytest
from rich.console import Console

from branchline import wrap
from branchline.core.errors import ConfigError
from branchline.policies.audit.diff import AuditDiff, compare, diff
from tests import models


def shown(found: AuditDiff) -> str:
    buffer = io.StringIO()
    found.render(Console(file=buffer, width=160))
    return buffer.getvalue()


def test_the_same_audit_changed_nothing(report):
    found = diff(report, report)
    assert found.nothing
    assert "nothing changed" in shown(found)


def test_from_one_policy_to_another(report):
    found = compare(report, "dynamic", "absorbed")
    assert (found.before, found.after) == ("policy dynamic", "policy absorbed")
    assert not found.added
    assert not found.removed
    assert not found.worse
    sql = [change for change in found.routes if change.adapters == ("sql",)]
    assert len(sql) == 4
    assert all(c.before == "unfused" and c.after == "absorbed by native" for c in sql)
    assert all(c.bytes_after < c.bytes_before for c in sql)
    assert any(c.what == "sql: extra bytes/token" for c in found.adapters)
    back = compare(report, "absorbed", "dynamic")
    assert len(back.worse) == len(found.routes)
    text = shown(found)
    assert "model.layers.*.mlp.silu_mul (x2)" in text
    assert "policy dynamic to policy absorbed" in text


def test_a_policy_that_was_not_audited_is_refused(report):
    with pytest.raises(ConfigError, match="--policy static"):
        compare(report, "dynamic", "static")


def test_what_came_and_went_and_changed(report, audited, tmp_path):
    other = wrap(models.build("llama"), ignore=("*.down_proj",))
    folder = tmp_path / "new"
    models.save_adapter(models.build("llama"), folder, ["q_proj"], rank=8, seed=3)
    other.adapters.load("sql", folder)
    after = other.audit(policy=report.policies)
    found = diff(report, after)
    assert "adapter tone" in found.removed
    assert not found.added
    assert any(c.what.endswith("silu_mul: key") for c in found.sites)
    whats = {change.what for change in found.adapters}
    assert {"sql: digest", "sql: rank"} <= whats
    lost = [c for c in found.worse if "silu_mul" in c.site and not c.adapters]
    assert len(lost) == 2 * len(report.policies)
    assert all("takes no quantised input" in change.reason for change in lost)
    assert any(change.what == "native-fp8" for change in found.kernels)
    versions = {**report.versions, "torch": "2.12"}
    older = report.model_copy(update={"versions": versions})
    assert [c.what for c in diff(older, report).settings] == ["version of torch"]

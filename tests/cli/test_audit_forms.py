"""`branchline audit`: folders without weights, fleets, rules, comparisons and documents."""

from __future__ import annotations

import json
import shutil

import pytest

from branchline.cli.audit_output import FIRED, INCOMPLETE
from branchline.core.errors import RemoteAuditError
from branchline.serving.remote_audit import RemoteAudit


def test_a_folder_is_audited_for_a_device_that_is_not_here(branchline, model_folder, sql):
    done = branchline(
        "audit", model_folder, "--adapter", f"sql={sql}", "--device", "b200",
        "--policy", "dynamic", "--policy", "absorbed", "--tokens", 16, "--json",
    )  # fmt: skip
    assert done.code == 0, done.err
    report = done.json
    assert (report["source"], report["device"]["kind"]) == ("folder", "b200")
    assert report["policies"] == ["dynamic", "absorbed"]
    assert report["tokens"] == 16
    assert {r["producer"] for s in report["sites"] for r in s["routes"]} == {"triton", ""}
    (adapter,) = report["adapters"]
    assert [cost["policy"] for cost in adapter["costs"]] == ["dynamic", "absorbed"]
    assert any("policy absorbed recovers" in given["text"] for given in adapter["advice"])


def test_an_unknown_device_is_refused_with_those_there_are(branchline, model_folder):
    line = branchline("audit", model_folder, "--device", "abacus").error
    assert "'abacus' is not known" in line or "device 'abacus'" in line
    assert "h200" in line


def test_a_broken_adapter_is_told_and_the_rest_is_audited(branchline, model_folder, sql, tmp_path):
    done = branchline(
        "audit", model_folder, "--adapter", f"sql={sql}", "--adapter", f"gone={tmp_path}/none",
    )  # fmt: skip
    assert done.code == INCOMPLETE
    assert "adapter 'gone'" in done.out
    assert "silu_mul" in done.out
    told = json.loads(
        branchline("audit", model_folder, "--adapter", f"gone={tmp_path}/none", "--json").out
    )
    assert [problem["part"] for problem in told["problems"]] == ["adapter 'gone'"]


def test_a_fleet_is_weighted_by_traffic(branchline, model_folder, sql, tone, tmp_path):
    fleet = tmp_path / "fleet"
    for name, source in (("sql", sql), ("tone", tone), ("tone2", tone)):
        shutil.copytree(source, fleet / name)
    command = ("audit", model_folder, "--adapters-dir", fleet)
    evenly = branchline(*command, "--json").json["fleet"]
    assert (evenly["adapters"], evenly["weights"]) == (3, "evenly")
    traffic = tmp_path / "traffic.json"
    traffic.write_text('{"sql": 90, "tone": 10}')
    weighted = branchline(*command, "--traffic", traffic, "--json").json["fleet"]
    assert weighted["weights"] == "traffic"
    assert sum(target["weight"] for target in weighted["targets"]) >= 0.9
    # As a server's list of adapters tells it.
    traffic.write_text(
        json.dumps({"data": [{"name": "sql", "hits": 90}, {"name": "tone", "hits": 10}]})
    )
    assert branchline(*command, "--traffic", traffic, "--json").json["fleet"] == weighted
    assert "what target modules cost over 3 adapters" in branchline(*command).out


@pytest.mark.parametrize(
    "text", ["{", "[1]", '{"a": "x"}', '{"a": -1}', '{"data": [{"name": "a"}]}']
)
def test_a_traffic_file_that_is_none(branchline, model_folder, tmp_path, text):
    (tmp_path / "fleet").mkdir()
    file = tmp_path / "traffic.json"
    file.write_text(text)
    done = branchline(
        "audit", model_folder, "--adapters-dir", tmp_path / "fleet", "--traffic", file
    )
    assert done.code == INCOMPLETE
    assert str(file) in done.error


def test_a_name_that_is_given_twice_and_one_that_cannot_be_printed(
    branchline, model_folder, sql, tmp_path
):
    fleet = tmp_path / "fleet"
    shutil.copytree(sql, fleet / "sql")
    shutil.copytree(sql, fleet / "a\x1b[31mred")
    done = branchline("audit", model_folder, "--adapter", f"sql={sql}", "--adapters-dir", fleet)
    assert done.code == INCOMPLETE
    assert "is given twice" in done.out
    assert "cannot be printed" in done.out
    assert "\x1b[31mred" not in done.out


def test_traffic_that_names_nobody_is_told(branchline, model_folder, sql, tmp_path):
    shutil.copytree(sql, tmp_path / "fleet" / "sql")
    file = tmp_path / "traffic.json"
    file.write_text('{"nobody": 5}')
    done = branchline(
        "audit", model_folder, "--adapters-dir", tmp_path / "fleet", "--traffic", file
    )
    assert done.code == INCOMPLETE
    assert "names none of its adapters" in done.out


def test_options_of_one_policy_tell_two_of_its_kind_apart(branchline, model_folder, sql):
    command = ("audit", model_folder, "--adapter", f"sql={sql}")
    policies = ("auto:device=h200", "auto:device=cpu")
    report = branchline(*command, "--policy", policies[0], "--policy", policies[1], "--json").json
    assert report["policies"] == list(policies)
    done = branchline(*command, "--compare", *policies, "--json")
    assert done.code == 0, done.err
    assert done.json["before"] == "policy auto:device=h200"


@pytest.mark.parametrize(
    "flags", [["--html", "x"], ["--markdown"], ["--policy", "dual"], ["--watch"]]
)
def test_flags_without_an_effect_are_refused(branchline, model_folder, tmp_path, flags):
    assert branchline("audit", "diff", "a.json", "b.json", *flags).code == 2
    if "--policy" not in flags:
        compared = ("audit", model_folder, "--compare", "dual", "dynamic")
        assert branchline(*compared, *flags).code == 2


# --- rules ---------------------------------------------------------------------------------------


def test_rules_decide_the_exit_code(branchline, model_folder, sql):
    command = ("audit", model_folder, "--adapter", f"sql={sql}")
    fires = branchline(*command, "--fail-on", "adapter:sql unfused>0", "--fail-on", "unfused>90%")
    assert fires.code == FIRED
    assert "rule adapter:sql unfused>0 fired" in fires.err
    assert "unfused>90% fired" not in fires.err
    assert "silu_mul" in fires.out
    holds = branchline(*command, "--fail-on", "kernel:emulated", "--fail-on", "mismatch")
    assert holds.code == 0, holds.err


def test_a_wrong_rule_is_told_before_anything_is_read(branchline):
    done = branchline("audit", "nowhere", "--fail-on", "fuzed>3")
    assert done.code == INCOMPLETE
    assert "'fuzed' cannot be counted" in done.error


def test_a_rule_about_what_was_not_audited(branchline, model_folder):
    done = branchline("audit", model_folder, "--fail-on", "adapter:sql unfused>0")
    assert done.code == INCOMPLETE
    assert "'sql' was not audited" in done.error


def test_what_could_not_be_audited_outweighs_a_rule(branchline, model_folder, tmp_path):
    done = branchline(
        "audit", model_folder, "--adapter", f"gone={tmp_path}/none", "--fail-on", "fused>0"
    )
    assert done.code == INCOMPLETE
    assert "fused>0 fired" in done.err


# --- comparisons ---------------------------------------------------------------------------------


def test_policies_are_compared(branchline, model_folder, sql):
    command = ("audit", model_folder, "--adapter", f"sql={sql}", "--compare")
    done = branchline(*command, "dynamic", "absorbed")
    assert done.code == 0, done.err
    assert "policy dynamic to policy absorbed" in done.out
    assert "absorbed by native" in done.out
    assert branchline(*command, "absorbed", "dynamic", "--fail-on", "worse").code == FIRED
    told = branchline(*command, "dynamic", "static", "--json").json
    assert {change["after"] for change in told["routes"]} == {"unfused"}


def test_saved_audits_are_compared(branchline, model_folder, sql, tone, tmp_path):
    files = []
    for name, adapter in (("a", sql), ("b", tone)):
        report = branchline("audit", model_folder, "--adapter", f"x={adapter}", "--json").out
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text(report)
    same = branchline("audit", "diff", files[0], files[0])
    assert same.code == 0, same.err
    assert "nothing changed" in same.out
    done = branchline("audit", "diff", *files, "--fail-on", "worse")
    assert done.code == FIRED
    assert "x: digest" in done.out
    assert branchline("audit", "diff", *files, "--json").json["schema_version"] == 1


def test_what_cannot_be_compared(branchline, model_folder, tmp_path):
    file = tmp_path / "old.json"
    file.write_text('{"schema_version": 1}')
    assert "schema version 1" in branchline("audit", "diff", file, file).error
    assert "cannot be read" in branchline("audit", "diff", tmp_path / "x", file).error
    assert branchline("audit", "diff", file).code == 2
    assert branchline("audit", "diff", file, file, "--fail-on", "unfused>1").code == 2
    assert branchline("audit", model_folder, model_folder).code == 2


# --- documents -----------------------------------------------------------------------------------


def test_html_and_markdown_are_written(branchline, model_folder, sql, tmp_path):
    file = tmp_path / "audit.html"
    command = ("audit", model_folder, "--adapter", f"sql={sql}")
    done = branchline(*command, "--html", file)
    assert done.code == 0, done.err
    assert done.out == ""
    assert f"wrote {file}" in done.err
    assert "<!doctype html>" in file.read_text()
    both = branchline(*command, "--html", file, "--markdown", "--fail-on", "fused>0")
    assert both.out.startswith("## Audit of")
    assert "Rules that fired" in both.out
    assert "Rule fused&gt;0" in file.read_text()
    refused = branchline(*command, "--html", tmp_path / "none" / "audit.html")
    assert refused.code == INCOMPLETE
    assert "cannot be written" in refused.err


# --- servers -------------------------------------------------------------------------------------


def test_a_server_that_is_not_there(branchline):
    done = branchline("audit", "http://127.0.0.1:9", "--json")
    assert done.code == INCOMPLETE
    assert "cannot be reached" in done.error
    assert branchline("audit", "--watch", "http://127.0.0.1:9").code == INCOMPLETE


def test_an_address_that_is_none():
    with pytest.raises(RemoteAuditError, match="cannot be reached"), RemoteAudit("http://") as one:
        one.report()


@pytest.mark.parametrize("flag", [["--load"], ["--device", "cpu"], ["--adapter", "a=b"]])
def test_what_is_the_servers_matter(branchline, flag):
    assert branchline("audit", "http://127.0.0.1:9", *flag).code == 2


def test_folders_are_not_watched(branchline, model_folder):
    assert branchline("audit", model_folder, "--watch").code == 2

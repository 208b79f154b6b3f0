"""The audit of a running server by its address, once and live."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time

import httpx
import pytest
from rich.console import Console

from branchline.cli.watch import view
from branchline.core.errors import RemoteAuditError
from branchline.serving.remote_audit import RemoteAudit


def ask(server, model: str, tokens: int = 3) -> None:
    body = {"model": model, "prompt": [5, 6, 7], "max_tokens": tokens, "ignore_eos": True}
    assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 200


def shown(*given) -> str:
    buffer = io.StringIO()
    Console(file=buffer, width=160).print(view(*given))
    return buffer.getvalue()


def test_a_server_is_audited_by_its_address(server):
    ask(server, server.model)
    with RemoteAudit(server.url, policies=("dynamic", "absorbed")) as remote:
        report = remote.report(tokens=8)
    assert report.source == "server"
    assert report.policies == ("dynamic", "absorbed")
    assert report.tokens == 8
    assert {"attn", "mlp", "all"} <= {adapter.name for adapter in report.adapters}
    assert all(site.ran for site in report.sites)
    assert not any(site.mismatches for site in report.sites)


def test_what_a_server_does_between_two_looks_is_shown(server):
    with RemoteAudit(server.url) as remote:
        before = remote.report()
        ask(server, "all", tokens=5)
        after = remote.report()
    text = shown(after, before, 2.0)
    assert "model.layers.*.mlp.silu_mul (x2)" in text
    assert "as planned" in text
    assert "attn" in text
    first = shown(before, None, 0.0)
    assert "unfused/s" in first
    (line,) = [line for line in text.splitlines() if "silu_mul" in line]
    (still,) = [line for line in first.splitlines() if "silu_mul" in line]
    # Five forwards of two layers in two seconds.
    assert "5" in line.split("│")[4]
    assert not still.split("│")[4].strip()


def test_a_key_is_asked_for(start_server):
    guarded = start_server("--admin-key", "secret", "--api-key", "user")
    with RemoteAudit(guarded.url) as remote, pytest.raises(RemoteAuditError, match="--api-key"):
        remote.report()
    with RemoteAudit(guarded.url, "secret") as remote:
        assert remote.report().sites
    with (
        RemoteAudit(guarded.url, "secret", ("nonsense",)) as remote,
        pytest.raises(RemoteAuditError, match=r"answers 400: .*nonsense"),
    ):
        remote.report()


def watching(url: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "branchline", "audit", "--watch", url, "--interval", "0.2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "COLUMNS": "160"},
    )


def test_watching_ends_with_ctrl_c(server):
    process = watching(server.url)
    with RemoteAudit(server.url) as remote:
        remote.report()
    time.sleep(8)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 0, err
    assert "silu_mul" in out
    assert "Traceback" not in err


def test_watching_a_server_that_goes_ends_with_its_reason(start_server):
    going = start_server()
    process = watching(going.url)
    time.sleep(8)
    going.stop()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    # It says so itself, if it is asked just then.
    assert "cannot be reached" in err or "the server is stopping" in err
    assert "Traceback" not in err

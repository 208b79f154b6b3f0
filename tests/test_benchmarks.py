"""The benchmarks run: on the CPU, and the script for GPUs at toy sizes in the interpreter."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def run(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_cpu_benchmarks_run():
    out = run("benchmarks", "--short")
    for part in (
        "relu2",
        "silu_mul",
        "rms_norm[llama]",
        "dual for 1 of 16 rows",
        "absorbed",
        "512 tokens",
    ):
        assert part in out


def test_results_are_written_with_the_machine_they_come_from(tmp_path):
    out = tmp_path / "results.json"
    printed = run("benchmarks", "--short", "--only", "norm", "--only", "matmul", "--out", str(out))
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["short"]
    assert found["machine"]["cpu"]
    assert found["machine"]["memory"] > 2**28
    assert f"C kernels on {found['machine']['isa']}" in printed
    assert found["printed"] == []
    results = found["results"]
    assert {line["benchmark"] for line in results} == {"norm", "matmul"}
    assert {line["against"] for line in results} >= {"eager", "clone()", "the faster F.linear"}
    assert all(line["value"] > 0 and line["ratio"] > 0 and line["case"] for line in results)
    assert all((line["aim"] is not None) == (line["benchmark"] == "matmul") for line in results)
    # What is written is what was printed.
    for line in results:
        assert line["case"].split(", ")[0] in printed


@pytest.mark.triton_interpreted
def test_the_gpu_script_runs(tmp_path):
    out = tmp_path / "results.json"
    small = ["--device", "cpu", "--rows", "2", "--columns", "64", "--rounds", "1", "--no-verify"]
    small += ["--tokens", "2", "17", "--weights", "64x128", "--layers", "3x2x32x64"]
    run("benchmarks.gpu", *small, "--out", str(out))
    results = json.loads(out.read_text(encoding="utf-8"))
    lines, matmuls = results["lines"], results["matmuls"]
    assert {line["producer"] for line in lines} == {"triton"}
    assert {line["route"] for line in lines} == {"fused", "dual", "absorbed"}
    assert all(line["microseconds"] > 0 for line in lines)
    triton = {"triton-rowwise", "triton-block"}
    assert {line["kernel"] for line in matmuls} >= triton
    assert {line["rows"] for line in matmuls} == {2, 17}
    assert all(line["microseconds"] > 0 for line in matmuls)
    grouped = results["experts"]
    assert {line["kernel"] for line in grouped} >= triton
    assert {line["tokens"] for line in grouped} == {2, 17}
    assert all(line["microseconds"] > 0 for line in grouped)

"""The command line on a quantised checkpoint with experts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.moe import checkpoints as moe
from tests.moe.models import build

SCHEME = "fp8-block128x128 x fp8-dynamic-group128"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A layer of a MiniMax-M2, under its published names."""
    model = build("minimax_m2", num_hidden_layers=1)
    where = tmp_path_factory.mktemp("moe") / "model"
    return moe.write(where, model, moe.fine_grained(), moe.fp8_config())


def test_inspect(branchline, folder):
    done = branchline("inspect", folder, "--json")
    assert done.code == 0, done.err
    (scheme,) = done.json["quantization"]["schemes"]
    assert scheme["scheme"] == SCHEME
    singles = [name for name in scheme["linears"] if ".block_sparse_moe.experts." in name]
    assert len(singles) == 3 * 4
    assert done.json["quantization"]["unmatched"] == ["e_score_correction_bias"]
    assert SCHEME in branchline("inspect", folder).out


def test_inspect_says_what_speaks_against_experts(branchline, folder, tmp_path):
    model = build("minimax_m2", num_hidden_layers=1)
    damaged = moe.write(tmp_path / "model", model, moe.fine_grained(), moe.fp8_config())
    lost = "model.layers.0.block_sparse_moe.experts.2.w3.weight_scale_inv"
    moe.change(damaged, lambda tensors: tensors.pop(lost))
    done = branchline("inspect", damaged)
    assert done.code == 1
    assert "experts.2.w3" in done.out


def test_audit(branchline, folder):
    done = branchline("audit", folder, "--json")
    assert done.code == 0, done.err
    assert any(SCHEME in line for line in done.json["checkpoint"]["decisions"])
    assert done.json["checkpoint"]["unmatched"] == ["e_score_correction_bias"]

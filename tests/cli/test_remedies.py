"""What an error advises can be done where it is read: in Python and on the command line."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import branchline
from branchline.cli.options import flag_name
from branchline.core.errors import CalibrationError, ConfigError, KernelUnavailableError
from branchline.serving import WrapConfig, quantize_checkpoint
from branchline.serving.quantize_plan import QuantizeConfig
from tests.models import build

ROOT = Path(branchline.__file__).resolve().parent
LAYERS = ("core", "linear", "fusion", "adapters", "policies", "serving")
# Methods that no command calls.
PYTHON_ONLY = {"serving/requantize.py", "core/quantized_activation.py"}
SETTINGS = {*WrapConfig.model_fields, *QuantizeConfig.model_fields, "calibration"}
ASSIGNED = re.compile(r"\b(?P<setting>\w+)=")


def remedies() -> Iterator[tuple[str, str]]:
    """Place and text of the remedy of every error that is made in the package."""
    for layer in LAYERS:
        for path in sorted((ROOT / layer).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                is_error = isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Error")
                if is_error and len(node.args) == 3 and name not in PYTHON_ONLY:
                    parts = ast.walk(node.args[2])
                    texts = [p.value for p in parts if isinstance(p, ast.Constant)]
                    yield f"{name}:{node.lineno}", "".join(t for t in texts if isinstance(t, str))


def test_a_setting_is_named_with_its_flag():
    named = 0
    for place, text in remedies():
        for setting in {found["setting"] for found in ASSIGNED.finditer(text)} & SETTINGS:
            named += 1
            assert "command line" in text, (place, text)
            assert flag_name(setting) in text, (place, text)
    assert named > 5


def without_scales(tmp_path: Path) -> None:
    branchline.wrap(build("llama"), quant="fp8-static")


def scales_without_use(tmp_path: Path) -> None:
    branchline.wrap(build("llama"), calibration=[torch.tensor([1, 2])])


def no_scales_to_write(tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path / "model")
    quantize_checkpoint(tmp_path / "model", tmp_path / "out", scheme="fp8-static")


def forced_kernel(tmp_path: Path) -> None:
    branchline.wrap(build("llama"), linear_kernel="torch-scaled-mm")


@pytest.mark.parametrize(
    ("fails", "error", "flag"),
    [
        (without_scales, CalibrationError, "--calibration FILE"),
        (scales_without_use, ConfigError, "--quant fp8-static"),
        (no_scales_to_write, CalibrationError, "--calibration FILE"),
        (forced_kernel, KernelUnavailableError, "--linear-kernel"),
    ],
)
def test_both_forms_are_told(fails, error, flag, tmp_path):
    with pytest.raises(error) as raised:
        fails(tmp_path)
    assert flag in raised.value.remedy
    assert "command line" in raised.value.remedy

"""Packages import what they export when it is asked for, and find all of it."""

import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec

import pytest

from branchline.core.lazy import lazy_exports

LAZY = [
    "branchline",
    *(f"branchline.{name}" for name in ("core", "adapters", "policies", "serving")),
]


@pytest.mark.parametrize("name", LAZY)
def test_everything_that_is_listed_is_found_and_no_module_hides_it(name: str):
    package = import_module(name)
    for export in package.__all__:
        assert getattr(package, export) is not None
        assert find_spec(f"{name}.{export}") is None, "whoever imports the module hides it"


def test_an_unknown_name_is_no_attribute():
    get = lazy_exports("branchline.core", {"QuantKey": "quant_key"})
    assert get("QuantKey") is import_module("branchline.core.quant_key").QuantKey
    with pytest.raises(AttributeError, match=r"branchline\.core.*'QuantKeys'"):
        get("QuantKeys")


@pytest.mark.parametrize(
    ("modules", "absent"),
    [
        ("branchline.cli", ("torch", "transformers", "peft")),
        ("branchline.cli.serve", ("peft", "transformers.modeling_utils", "uvicorn")),
    ],
)
def test_the_command_line_waits_for_no_library_that_it_does_not_use(
    modules: str, absent: tuple[str, ...]
):
    code = f"import sys, {modules}; print(*(m for m in {absent} if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not done.stdout.strip()

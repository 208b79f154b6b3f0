"""What every test shares: how the tree is collected, in which Triton mode, and the real model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import torch

from branchline.fusion.identify.alike import Proofs

# Files that take longest: first, so that no worker is left alone with one of them at the end.
_LONGEST = (
    "tests/serving/test_real_model.py",
    "tests/serving/test_ray.py",
    "tests/fusion/test_identify_activation.py",
    "tests/fusion/producers/test_aot.py",
    "tests/serving/http/test_lifecycle.py",
    "tests/serving/http/test_known_faults.py",
    "tests/serving/http/test_rough_clients.py",
    "tests/serving/http/test_under_load.py",
    "tests/serving/http/test_schema.py",
    "tests/test_demo.py",
)
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


class RootIsNoTestPackage:
    """The repository root has an `__init__.py`, so pytest would import it by its folder's name."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_collect_directory(self, path, parent):
        """Collect the root as a plain folder."""
        return pytest.Dir.from_parent(parent, path=path) if path == parent.config.rootpath else None


def pytest_configure(config):
    """Registered as a plugin: a conftest's own hooks do not reach folders above it."""
    config.pluginmanager.register(RootIsNoTestPackage())


def pytest_collection_modifyitems(config, items):
    """Triton decides when a kernel is decorated whether it interprets: one mode a process.

    `make test` runs both; what belongs to the other run is deselected here, not skipped.  Workers
    begin with what takes longest.
    """
    wanted = [
        item
        for item in items
        if (item.get_closest_marker("triton_interpreted") is not None) == _INTERPRETED
    ]
    if len(wanted) != len(items):
        config.hook.pytest_deselected(items=[item for item in items if item not in set(wanted)])
        items[:] = wanted
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: _place(item.nodeid.partition("::")[0]))
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))


def _place(file: str) -> int:
    return _LONGEST.index(file) if file in _LONGEST else len(_LONGEST)


@pytest.fixture(autouse=True)
def _no_grad():
    """Serving never records gradients."""
    with torch.no_grad():
        yield


@pytest.fixture(scope="session", autouse=True)
def _threads():
    # Workers side by side with two threads each would wait for one another at every barrier.
    torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)


@pytest.fixture(scope="session", autouse=True)
def _proofs_are_kept() -> Iterator[None]:
    """What is proved of one model's activations holds for the next one's that are the same.

    A wrapped model proves what each of its own computes; the small models of the tests are many,
    and their activations few.
    """
    kept = Proofs()
    with pytest.MonkeyPatch.context() as patch:
        # By its module's name: the package has a function of that name.
        patch.setattr(import_module("branchline.fusion.discover"), "Proofs", lambda: kept)
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_calibration_of_this_machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What a developer has measured here changes no estimate in tests, and tests write none there.

    Not by the variable, which also says where models lie.
    """
    own = tmp_path_factory.mktemp("cache")
    given = os.environ.get("XDG_CACHE_HOME")

    def cache_path(name: str) -> Path:
        asked = os.environ.get("XDG_CACHE_HOME")
        return (Path(asked) if asked and asked != given else own) / name

    with pytest.MonkeyPatch.context() as patch:
        calibration = import_module("branchline.policies.cost.calibration")
        patch.setattr(calibration, "user_cache_path", cache_path)
        yield

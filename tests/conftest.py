"""What every test shares: how the tree is collected, in which Triton mode, and the real model."""

from __future__ import annotations

import os

import pytest
import torch

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

    `make test` runs both; what belongs to the other run is deselected here, not skipped.
    """
    wanted = [
        item
        for item in items
        if (item.get_closest_marker("triton_interpreted") is not None) == _INTERPRETED
    ]
    if len(wanted) != len(items):
        config.hook.pytest_deselected(items=[item for item in items if item not in set(wanted)])
        items[:] = wanted
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))


@pytest.fixture(autouse=True)
def _no_grad():
    """Serving never records gradients."""
    with torch.no_grad():
        yield


@pytest.fixture(scope="session", autouse=True)
def _threads():
    # Workers side by side with two threads each would wait for one another at every barrier.
    torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)

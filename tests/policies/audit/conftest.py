"""One served model with adapters of hostile and of ordinary names, and its audit."""

from __future__ import annotations

import pytest

from branchline import wrap
from tests import models

MARKUP = "<script>alert(1)</script>"
POLICIES = ("dynamic", "dual", "absorbed")


@pytest.fixture(scope="session")
def audited(tmp_path_factory):
    """A served model that has answered one batch."""
    root = tmp_path_factory.mktemp("audited")
    served = wrap(models.build("llama"))
    adapters = {"sql": ["down_proj", "q_proj"], "tone": ["v_proj"], MARKUP: "all-linear"}
    for index, (name, targets) in enumerate(adapters.items()):
        folder = root / str(index)
        models.save_adapter(models.build("llama"), folder, targets, rank=4, seed=index)
        served.adapters.load(name, folder)
    served(models.token_ids(2, 4))
    return served


@pytest.fixture(scope="session")
def report(audited):
    return audited.audit(policy=POLICIES)

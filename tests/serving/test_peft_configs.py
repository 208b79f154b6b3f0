"""PEFT's config of a served adapter: made for whatever loads, and never a raw error."""

import json
import warnings
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import PeftConfig

from branchline.adapters.config_file import parse_config
from branchline.adapters.tuners import TUNERS
from branchline.core.errors import AdapterError, AdapterUnsupportedError
from branchline.serving.peft_status import peft_config
from tests.peft_types import CASES, NAMES

FILED = json.loads(Path(__file__, "../../adapters/cases.json").resolve().read_text())["cases"]
LORA = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}


@pytest.fixture(autouse=True)
def _quiet():
    # PEFT warns of settings of training.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def loads(raw) -> bool:
    try:
        return not parse_config(raw, "x").findings
    except AdapterError:
        return False


@pytest.mark.parametrize("name", CASES)
def test_every_served_type_has_the_config_that_it_was_made_with(name):
    made = CASES[name](NAMES["llama"])
    raw = json.loads(json.dumps(made.to_dict(), default=list))
    found = peft_config("a", raw)
    assert type(found) is type(made)
    served = TUNERS[raw["peft_type"]].keys.all_served
    for key in served & raw.keys():
        assert getattr(found, key) == getattr(made, key), key


@pytest.mark.parametrize("case", [c for c in FILED if loads(c["config"])], ids=lambda c: c["id"])
def test_every_filed_config_that_loads_has_one(case):
    raw = case["config"]
    found = peft_config("a", raw)
    assert isinstance(found, PeftConfig)
    assert found.peft_type == raw["peft_type"]


@pytest.mark.parametrize(
    "odd", [{"eva_config": 5}, {"lora_ga_config": 3}, {"eva_config": {"x": 1}, "lora_dropout": []}]
)  # fmt: skip
def test_a_key_of_training_that_peft_refuses_takes_nothing_else_along(odd):
    raw = {**LORA, **odd, "rank_pattern": {"q_proj": 2}, "alpha_pattern": None}
    assert loads(raw)
    found = peft_config("a", raw)
    assert (found.r, found.lora_alpha, found.target_modules) == (4, 8, {"q_proj"})
    assert (found.rank_pattern, found.alpha_pattern) == ({"q_proj": 2}, {})


def test_what_peft_itself_cannot_load_is_told_by_name():
    # PEFT asks for the number of training steps, which no tensor hangs on.
    raw = {"peft_type": "ADALORA", "init_r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    assert loads(raw)
    with pytest.raises(AdapterUnsupportedError, match="AdaLoraConfig refuses") as caught:
        peft_config("a", raw)
    assert "adapters.config" in caught.value.remedy


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=4,
)  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(st.data(), st.sampled_from(sorted(TUNERS)))
def test_no_value_leads_to_a_raw_error(data, kind):
    tuner = TUNERS[kind]
    keys = sorted(tuner.keys.all_harmless | dict.fromkeys(tuner.keys.all_served - {"peft_type"}))
    raw = {"peft_type": kind} | dict.fromkeys(tuner.keys.required, 4)
    raw |= data.draw(st.dictionaries(st.sampled_from(keys), JSON, max_size=4))
    if not loads(raw):
        return
    # Whatever else it raised would end the test.
    with suppress(AdapterUnsupportedError):
        assert isinstance(peft_config("a", raw), PeftConfig)

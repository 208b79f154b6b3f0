"""The tables of config keys, and the value checks of adapter_config.json."""

import json

import peft
import pytest

from branchline.adapters import config_file
from branchline.adapters.findings import Finding, damaged, listing, mismatch, raise_findings
from branchline.adapters.tuners import TUNERS
from branchline.core.errors import (
    AdapterFormatError,
    AdapterMismatchError,
    AdapterUnsupportedError,
)

REFUSED = TUNERS["LORA"].keys.refused
PLAIN = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}


def parse(**changes):
    config = {**PLAIN, **changes}
    return config_file.parse_config(config, "adapter 'x'")


def texts(findings: list[Finding]) -> str:
    return " ".join(finding.text for finding in findings)


def test_what_peft_writes_by_default_is_accepted():
    raw = peft.LoraConfig(target_modules=["q_proj"]).to_dict()
    raw = json.loads(json.dumps(raw, default=list))
    parsed = config_file.parse_config(raw, "x")
    assert (parsed.config.r, parsed.config.lora_alpha) == (8, 8)
    assert (parsed.findings, parsed.refused) == ([], frozenset())


@pytest.mark.parametrize("key", sorted(REFUSED))
def test_a_refused_key_is_named_with_its_feature_and_may_be_off(key):
    for off in (None, False, "", [], {}):
        assert parse(**{key: off})[2:4] == ([], frozenset())
    for on in (True, 1, 0, ["score"], {"top_k": 3}):
        _, _, findings, refused, _ = parse(**{key: on})
        assert refused == {key}
        assert key in texts(findings)
        assert REFUSED[key] in texts(findings)
        assert {finding.error for finding in findings} == {AdapterUnsupportedError}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lora_dropout", 0.3),
        ("inference_mode", False),
        ("base_model_name_or_path", "some/model"),
        ("fan_in_fan_out", True),
        ("auto_mapping", {"base_model_class": "X"}),
        ("merge_weights", True),
        ("runtime_config", {"ephemeral_gpu_offload": True}),
        ("eva_config", {"rho": 2.0}),
        ("qalora_group_size", 16),
        ("megatron_core", "megatron.core"),
    ],
)
def test_a_harmless_key_is_taken_whatever_it_says(key, value):
    assert parse(**{key: value}).findings == []


@pytest.mark.parametrize("value", [True, False, None, "gaussian", "eva", "orthogonal", "MiCA"])
def test_an_initialisation_that_only_fills_a_and_b_is_harmless(value):
    assert parse(init_lora_weights=value).findings == []


@pytest.mark.parametrize(
    "value", ["pissa", "pissa_niter_16", "olora", "OLoRA", "corda", "loftq", "lora_ga"]
)
def test_an_initialisation_that_changes_base_weights_is_refused(value):
    findings = parse(init_lora_weights=value).findings
    assert "base weights" in texts(findings)
    assert value in texts(findings)


@pytest.mark.parametrize("value", ["future", 3, ["x"]])
def test_an_unknown_initialisation_is_refused(value):
    assert "unknown" in texts(parse(init_lora_weights=value).findings)


@pytest.mark.parametrize("value", ["all", "lora_only", True])
def test_trained_biases_are_refused(value):
    _, _, findings, refused, _ = parse(bias=value)
    assert "bias=" in texts(findings)
    assert refused == {"bias"}


def test_an_unknown_key_is_refused_unless_it_is_off():
    assert parse(frobnicate=None, wobble=[], twist=False).findings == []
    findings = parse(frobnicate=0, wobble={"x": 1}).findings
    assert "'frobnicate' = 0" in texts(findings)
    assert "wobble" in texts(findings)


BAD_VALUES = [
    ("r", "8"),
    ("r", 0),
    ("r", -8),
    ("r", True),
    ("r", 8.0),
    ("r", None),
    ("r", 2**40),
    ("lora_alpha", "16"),
    ("lora_alpha", True),
    ("lora_alpha", None),
    ("lora_alpha", float("nan")),
    ("lora_alpha", float("inf")),
    ("lora_alpha", 10**400),
    ("use_rslora", "yes"),
    ("use_rslora", 1),
    ("rank_pattern", ["q_proj"]),
    ("rank_pattern", {"q_proj": 0}),
    ("rank_pattern", {"q_proj": "16"}),
    ("rank_pattern", {"q_proj": True}),
    ("rank_pattern", {"q_proj(": 16}),
    ("rank_pattern", {"(?i)q_proj": 16}),
    ("alpha_pattern", {"q_proj": float("nan")}),
    ("alpha_pattern", {"q_proj": None}),
    ("target_modules", 3),
    ("target_modules", ["q_proj", 3]),
    ("target_modules", "(q_proj"),
    ("target_modules", "a{99999999999999999999}"),
    ("exclude_modules", {"q": 1}),
    ("exclude_modules", "*"),
    ("layers_to_transform", "1"),
    ("layers_to_transform", [True]),
    ("layers_to_transform", -1),
    ("layers_pattern", ["("]),
    ("task_type", 3),
]


@pytest.mark.parametrize(("key", "value"), BAD_VALUES)
def test_a_value_of_a_wrong_kind_is_a_format_error_that_names_the_key(key, value):
    with pytest.raises(AdapterFormatError, match=key):
        parse(**{key: value})


@pytest.mark.parametrize("key", ["r", "lora_alpha"])
def test_rank_and_alpha_are_never_guessed(key):
    config = {name: value for name, value in PLAIN.items() if name != key}
    with pytest.raises(AdapterFormatError, match=f"{key}: Field required"):
        config_file.parse_config(config, "x")


def test_bad_values_and_refused_features_come_in_one_error():
    with pytest.raises(AdapterFormatError) as caught:
        parse(r="8", lora_alpha=True, use_qalora=True)
    for word in ("r: ", "lora_alpha", "QALoRA", "3 problems"):
        assert word in str(caught.value)


@pytest.mark.parametrize("alpha", [16, 16.0, 0, -4, 0.5])
def test_alpha_keeps_its_type(alpha):
    config = parse(lora_alpha=alpha).config
    assert (config.lora_alpha, type(config.lora_alpha)) == (alpha, type(alpha))


@pytest.mark.parametrize("key", ["rank_pattern", "alpha_pattern", "use_rslora", "exclude_modules"])
def test_null_is_what_an_absent_key_means(key):
    assert parse(**{key: None}).config == parse().config


@pytest.mark.parametrize(
    "changes",
    [
        {"target_modules": ".*q_proj", "layers_to_transform": [1]},
        {"target_modules": "all-linear", "layers_pattern": "layers"},
        {"layers_pattern": "layers"},
    ],
)
def test_combinations_that_peft_refuses(changes):
    with pytest.raises(AdapterFormatError, match="layers_"):
        parse(**changes)


@pytest.mark.parametrize(
    "kind", [*sorted(set(peft.PeftType) - TUNERS.keys()), "HYPERTUNING", "lora"]
)
def test_other_types_are_refused_by_name(kind):
    with pytest.raises(AdapterUnsupportedError, match=f"'{str.__str__(kind)}'"):
        parse(peft_type=str.__str__(kind))


@pytest.mark.parametrize("kind", [None, 3, ["LORA"]])
def test_a_missing_or_odd_type_is_a_format_error(kind):
    with pytest.raises(AdapterFormatError, match="peft_type"):
        parse(peft_type=kind)


@pytest.mark.parametrize(
    ("raw", "tool"),
    [
        ({"fine_tune_type": "lora"}, "mlx-lm"),
        ({"lora_parameters": {"rank": 8}}, "mlx-lm"),
        ({"version": "adapters.1.0.0"}, "AdapterHub"),
        ({"model_class": "X", "config": "pfeiffer"}, "AdapterHub"),
        ({"version": "1"}, "peft_type"),
        ({}, "peft_type"),
    ],
)
def test_other_tools_are_named(raw, tool):
    with pytest.raises(AdapterFormatError, match=tool):
        config_file.parse_config(raw, "x")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[1]",
        b"null",
        b'"LORA"',
        b"\xff\xfe\xfa",
        b'{"r": 8, "r": 16}',
        b'{"r": ' + b"9" * 5000 + b"}",
        b"[" * 100_000,
    ],
    ids=range(9),
)
def test_bytes_that_are_no_json_object(data):
    with pytest.raises(AdapterFormatError, match=r"adapter_config\.json"):
        config_file.load_config(data, "x")


def test_findings_are_raised_as_the_gravest_and_cut_at_ten():
    raise_findings("x", [])
    findings = [mismatch(f"layer {index}") for index in range(14)]
    with pytest.raises(AdapterMismatchError, match=r"14 problems: .* and 4 more"):
        raise_findings("x", findings)
    with pytest.raises(AdapterFormatError, match=r"^x: 15 problems: broken \| layer 0"):
        raise_findings("x", [*findings, damaged("broken")])
    assert listing(["a", "b"]) == "'a', 'b'"
    assert listing("abcdefghijkl").endswith("'j' and 2 more")

"""Entries of lists: each producer's dialect, at dots, and in bounded time."""

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from branchline.linear.checkpoint import matching
from branchline.linear.checkpoint.matching import Entry, How, LinearNames, literal
from tests.linear.checkpoint.samples import ct, fp8, modelopt, quark, read

NAMES = [
    "lm_head",
    "model.layers.0.mlp.gate",
    "model.layers.0.mlp.gate_proj",
    "model.layers.0.self_attn.q_proj",
    "model.layers.1.mlp.gate",
    "model.layers.10.mlp.gate",
    "vision.blocks.0.lm_head",
]


def hits(dialect, entry):
    return sorted(LinearNames(NAMES).matching(dialect(entry)))


GATES = [name for name in NAMES if name.endswith("mlp.gate")]
LAYER_0 = [name for name in NAMES if name.startswith("model.layers.0.")]
ONES = ["model.layers.1.mlp.gate", "model.layers.10.mlp.gate"]


@pytest.mark.parametrize(
    ("dialect", "entry", "expected"),
    [
        (matching.compressed_tensors, "lm_head", ["lm_head"]),
        (matching.compressed_tensors, "model.layers.0.mlp", []),
        (matching.compressed_tensors, "Linear", NAMES),
        (matching.compressed_tensors, "re:.*mlp.gate$", GATES),
        # The package matches from the start of a name and leaves its end open.
        (matching.compressed_tensors, "re:.*mlp.gate", [*GATES, NAMES[2]]),
        (matching.compressed_tensors, "re:lm_head", ["lm_head"]),
        (matching.compressed_tensors, r"re:model\.layers\.1\..*", ["model.layers.1.mlp.gate"]),
        (matching.compressed_tensors, "model.layers.1*", []),
        (matching.transformers, "lm_head", ["lm_head", "vision.blocks.0.lm_head"]),
        (matching.transformers, "gate", GATES),
        (matching.transformers, "mlp.gate", GATES),
        (matching.transformers, "lp.gate", []),
        (matching.transformers, "model.layers.1", ["model.layers.1.mlp.gate"]),
        (matching.transformers, "model.layers.0", LAYER_0),
        (matching.transformers, "model.layers.(0|10).mlp.gate", [GATES[0], GATES[2]]),
        (matching.transformers, "model.layers.*.gate", GATES),
        (matching.transformers, "re:.*gate$", GATES),
        (matching.modelopt, "lm_head", ["lm_head"]),
        (matching.modelopt, "*lm_head", ["lm_head", "vision.blocks.0.lm_head"]),
        (matching.modelopt, "model.layers.1*", ONES),
        (matching.modelopt, "model.layers.1.*", ONES[:1]),
        (matching.modelopt, "model.layers.1", ONES[:1]),
        (matching.modelopt, "model.layers.?.mlp.gate", GATES[:2]),
        (matching.modelopt, "model.layers.[01].mlp.gate*", [*GATES[:2], NAMES[2]]),
        (matching.modelopt, "gate", []),
        (matching.quark, "lm_head", ["lm_head"]),
        (matching.quark, "model.layers.0", []),
        (matching.quark, "*.mlp.gate", GATES),
        (matching.quark, "re:model.*q_proj", [NAMES[3]]),
    ],
)
def test_dialects(dialect, entry, expected):
    assert hits(dialect, entry) == sorted(expected)


@pytest.mark.parametrize(
    ("pattern", "text", "rest"),
    [
        (r"model\.layers\.0", "model.layers.0", ""),
        (r"up\-to\.x$", "up-to.x", "$"),
        ("model.layers", "model", ".layers"),
        ("gates?", "gate", "s?"),
        ("gate*", "gat", "e*"),
        ("gate{0}", "gat", "e{0}"),
        (r"a\.?b", "a", r"\.?b"),
        ("gate+", "gate", "+"),
        ("a|b", "", "a|b"),
        ("(ab)?c", "", "(ab)?c"),
        (r"\d", "", r"\d"),
        ("", "", ""),
    ],
)
def test_literal(pattern, text, rest):
    assert literal(pattern) == (text, rest)


WORDS = st.text(alphabet="ab.", min_size=1, max_size=6)


@settings(max_examples=300, deadline=None)
@given(names=st.lists(WORDS, max_size=8), how=st.sampled_from(list(How)), text=WORDS)
def test_look_ups_are_what_reading_every_name_gives(names, how, text):
    tests = {
        How.EVERY: lambda name: True,
        How.EXACT: lambda name: name == text,
        How.UNDER: lambda name: f"{name}.".startswith(f"{text}."),
        How.EITHER_END: lambda name: (
            f"{name}.".startswith(f"{text}.") or f".{name}".endswith(f".{text}")
        ),
        How.BEGIN: lambda name: name.startswith(text),
        How.PATTERN: lambda name: re.match(text, name) is not None,
    }
    found = LinearNames(names).matching(Entry(how, text))
    assert set(found) == {name for name in names if tests[how](name)}


@pytest.mark.parametrize(
    "pattern", ["model\\.layers.*", "a?b", "ab*|ba", "a{0,2}b", "(?i)A", "^ab"]
)
@settings(max_examples=50, deadline=None)
@given(names=st.lists(st.text(alphabet="abA.model", max_size=8), max_size=8))
def test_the_literal_part_loses_no_match(pattern, names):
    for entry in (Entry(How.PATTERN, pattern), matching.quark(f"re:{pattern}")):
        found = LinearNames(names).matching(entry)
        assert set(found) == {name for name in names if re.match(pattern, name)}


# --- large lists ---------------------------------------------------------------------------------

EXPERTS = [
    f"model.layers.{i}.mlp.experts.{j}.{part}_proj"
    for i in range(58)
    for j in range(128)
    for part in ("gate", "up", "down")
]
KEPT = [f"model.layers.{i}.self_attn.q_proj" for i in range(58)]


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda names: {"config": ct(ignore=names)}, id="compressed-tensors"),
        pytest.param(
            lambda names: {"config": ct(ignore=["re:" + re.escape(name) + "$" for name in names])},
            id="compressed-tensors-patterns",
        ),
        pytest.param(lambda names: {"config": fp8(modules_to_not_convert=names)}, id="fp8"),
        pytest.param(lambda names: {"own": modelopt(exclude_modules=names)}, id="modelopt"),
        pytest.param(
            lambda names: {"own": modelopt(exclude_modules=[name + "*" for name in names])},
            id="modelopt-globs",
        ),
        pytest.param(lambda names: {"config": quark(exclude=names)}, id="quark"),
    ],
)
def test_twenty_two_thousand_entries_take_seconds(make, tmp_path):
    files = make(EXPERTS)
    read(tmp_path, **files).resolve(KEPT, None)  # imports
    began = time.process_time()
    resolved = read(tmp_path, **files).resolve([*EXPERTS, *KEPT], None)
    assert time.process_time() - began < 4
    assert list(resolved.schemes) == KEPT
    assert resolved.unmatched == ()


def test_a_scheme_for_each_of_many_layers(tmp_path):
    layers = {name: {"quant_algo": "FP8"} for name in EXPERTS}
    found = read(tmp_path, own=modelopt("MIXED_PRECISION", quantized_layers=layers))
    began = time.process_time()
    assert len(found.resolve([*EXPERTS, *KEPT], None).schemes) == len(EXPERTS)
    assert time.process_time() - began < 4


def test_a_pattern_that_takes_for_ever_is_refused():
    names = LinearNames(["a" * 60 + "b"])
    for pattern in (r"(a|aa)+$", r"(?:\w|\w\w)+\d$"):
        with pytest.raises(re.error, match="takes more than"):
            names.matching(Entry(How.PATTERN, pattern))
    for pattern in (r"(?:[\w.]+)+!$", ".*" * 16 + "!", r"(.*)*x$"):
        assert not names.matching(Entry(How.PATTERN, pattern))

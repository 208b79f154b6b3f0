"""Names in configs: the answers are PEFT's, hostile ones end soon, and normal ones cost little."""

import json
import re
import struct
import time
from types import SimpleNamespace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key
from pydantic import ValidationError

from branchline.adapters import config_file, read
from branchline.adapters.patterns import DottedPatterns, EndPatterns, TextEnds, Within
from branchline.adapters.selection import ModuleSelection
from branchline.adapters.tuners import TUNERS
from branchline.core.errors import (
    AdapterFormatError,
    AdapterMismatchError,
    AdapterUnsupportedError,
)
from branchline.core.expressions import Patience

# --- as PEFT ------------------------------------------------------------------------------------

_PARTS = [
    "model",
    "layers",
    "h",
    "experts",
    "0",
    "1",
    "11",
    "q_proj",
    "v_proj",
    "q",
    "",
    "a-b",
    "é",
]
NAMES = st.lists(st.sampled_from(_PARTS), min_size=1, max_size=6).map(".".join)
ODD_NAMES = NAMES | st.tuples(NAMES, NAMES).map("\n".join) | NAMES.map(lambda name: name + "\n")
_PIECES = [*_PARTS, r"\.", ".", "*", "+", "?", "(", ")", "|", "[hq]", r"\d", r"\w", "^", "$",
           "{1,2}", "(?:", "(?!", "{", "[[:alpha:]]", "{e}", "_proj", r"\-", ".*"]  # fmt: skip


def is_expression(text: str, *frames: str) -> bool:
    try:
        for frame in ("{}", *frames):
            re.compile(frame.replace("{}", text))
    except re.error:
        return False
    return True


PATTERNS = st.lists(st.sampled_from(_PIECES), max_size=6).map("".join)
EXPRESSIONS = PATTERNS.filter(is_expression)
ENDS = PATTERNS.filter(lambda text: is_expression(text, r"(.*\.)?({})$", r".*\.{}$"))
LISTED = PATTERNS.filter(
    lambda text: is_expression(text, r"(^|.*\.){}($|\..*)", r"(?:^|.*?\.){}\.(?P<idx>\d+)\.")
)
TARGETS = st.lists(NAMES, max_size=4) | EXPRESSIONS


@pytest.mark.filterwarnings("ignore:Possible nested set:FutureWarning")
@settings(max_examples=300, deadline=None)
@given(
    targets=TARGETS,
    exclude=st.none() | TARGETS,
    layers=st.none() | st.integers(0, 11) | st.lists(st.integers(0, 11), max_size=3),
    pattern=st.none() | LISTED | st.lists(LISTED, max_size=3),
    saved=st.none() | st.lists(LISTED, max_size=3),
    names=st.lists(ODD_NAMES, min_size=1, max_size=8),
)
def test_modules_are_selected_as_peft_selects_them(targets, exclude, layers, pattern, saved, names):
    theirs = SimpleNamespace(
        target_modules=targets,
        target_parameters=None,
        exclude_modules=exclude,
        layers_to_transform=layers,
        layers_pattern=pattern,
        modules_to_save=saved,
    )
    ours = ModuleSelection(
        targets,
        exclude=exclude,
        layers=layers,
        layers_pattern=pattern,
        modules_to_save=saved,
    )
    for name in names:
        assert ours.selects(name) == bool(check_target_module_exists(theirs, name)), name


@pytest.mark.filterwarnings("ignore:Possible nested set:FutureWarning")
@settings(max_examples=300, deadline=None)
@given(patterns=st.lists(ENDS, max_size=6, unique=True), names=st.lists(ODD_NAMES, max_size=6))
def test_the_pattern_that_counts_is_pefts(patterns, names):
    # With names of other alphabets, repeats of groups are refused: the two packages know different
    # versions of Unicode.
    assume(all(map(str.isascii, names)) or not any(re.search(r"\)[*+?{]", p) for p in patterns))
    ours = EndPatterns(dict.fromkeys(patterns, 1), "rank_pattern")
    dotted = DottedPatterns(dict.fromkeys(patterns, 1), "n_frequency_pattern")
    for name in names:
        assert ours.key_of(name) == get_pattern_key(patterns, name)
        # As FourierFT and C3A write it.
        first = next((p for p in patterns if re.match(rf".*\.{p}$", name)), name)
        assert dotted.key_of(name) == first
    alone = [p for p in patterns if any(re.match(rf"(.*\.)?({p})$", name) for name in names)]
    assert ours.unmatched(names) == [p for p in patterns if p not in alone]


@given(entries=st.lists(st.text("ab.", max_size=3)), name=st.text("ab.", max_size=8))
def test_ends_and_parts_of_a_text(entries, name):
    assert set(TextEnds(entries).of(name)) == {e for e in entries if name.endswith(e)}
    assert Within(entries).has(name) == any(entry in name for entry in entries)


# --- expressions that take for ever --------------------------------------------------------------

SLOW = r"(\w|\w\w|\w\w\w|\.)+\s"


def changed(folder, **changes):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("target_modules", {"target_modules": SLOW}),
        ("exclude_modules", {"exclude_modules": SLOW}),
        ("modules_to_save", {"modules_to_save": [SLOW]}),
        ("layers_pattern", {"layers_pattern": [SLOW], "layers_to_transform": [0]}),
        ("rank_pattern", {"rank_pattern": {SLOW: 8}}),
        ("alpha_pattern", {"alpha_pattern": {"q_proj": 8, SLOW: 8}}),
        ("target_modules", {"target_modules": "(?:(?:(?:(?:a|b){60}){60}){60}){60}"}),
    ],
)
def test_an_expression_that_takes_for_ever_ends_soon_in_an_error(plain, base, key, changes):
    began = time.process_time()
    with pytest.raises(AdapterUnsupportedError) as caught:
        read.read_adapter(changed(plain, **changes), base, max_rank=16)
    assert time.process_time() - began < 3
    assert f"adapter_config.json: {key}: to match the pattern" in caught.value.reason
    assert "takes too long" in caught.value.reason
    assert f"write {key} without nested repeats" in caught.value.remedy


def test_every_pattern_key_of_every_type_gives_up():
    for name, tuner in TUNERS.items():
        keys = [k for k in tuner.config.model_fields if k.endswith("_pattern")]
        for key in keys:
            if key == "layers_pattern" or name == "ADALORA":
                # A name there is no expression; the other one is tested above.
                continue
            raw = {"peft_type": name, key: {SLOW: 3}}
            raw |= {k: 4 for k in tuner.keys.required if k != key}
            config = config_file.parse_config(raw, "x").config
            config.patterns[key]._patience = Patience(0.05)
            with pytest.raises(AdapterUnsupportedError, match=f"{key}: to match the pattern"):
                config.patterns[key].key_of("model." + "a" * 60)


def test_ia3_gives_up_on_its_feed_forward_modules():
    raw = {"peft_type": "IA3", "target_modules": ["q"], "feedforward_modules": SLOW}
    config = config_file.parse_config(raw, "x").config
    with pytest.raises(AdapterUnsupportedError, match="feedforward_modules"):
        config.is_feedforward("a" * 60)


# --- very many entries --------------------------------------------------------------------------

MANY = 50_000


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"target_modules": ["q_proj", "v_proj", *(f"x{i}.q" for i in range(MANY))]},
                     id="targets"),
        pytest.param({"exclude_modules": [f"x{i}.q" for i in range(MANY)]}, id="excluded"),
        pytest.param({"modules_to_save": [f"x{i}" for i in range(MANY)]}, id="saved"),
        pytest.param({"layers_to_transform": list(range(MANY)), "layers_pattern": "layers"},
                     id="layers"),
    ],
)  # fmt: skip
def test_very_many_entries_are_read_in_a_moment(plain, base, changes):
    began = time.process_time()
    read.read_adapter(changed(plain, **changes), base, max_rank=16)
    assert time.process_time() - began < 3


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        pytest.param({"rank_pattern": {f"x{i}.q": 8 for i in range(MANY)}}, "match no target",
                     id="names"),
        pytest.param({"rank_pattern": {f"{i:017b}q".replace("1", "."): 8 for i in range(MANY)}},
                     "rank_pattern", id="dots"),
        pytest.param({"rank_pattern": {f"x{i}(a)?": 8 for i in range(MANY)}}, "characters together",
                     id="expressions"),
        pytest.param({"modules_to_save": [f"x{i}.*" for i in range(MANY)]}, "characters together",
                     id="saved"),
        pytest.param({"target_modules": "|".join(f"x{i}" for i in range(MANY))},
                     "characters together", id="one"),
    ],
)  # fmt: skip
def test_very_many_entries_that_fit_nothing_are_refused_in_a_moment(plain, base, changes, words):
    began = time.process_time()
    with pytest.raises((AdapterUnsupportedError, AdapterFormatError, LookupError, ValueError),
                       match=words):  # fmt: skip
        read.read_adapter(changed(plain, **changes), base, max_rank=16)
    assert time.process_time() - began < 3


def test_a_pattern_for_every_module_of_a_large_model_costs_little():
    # As initialisations by activations write them: a rank for each module, by its full name.
    names = [f"model.layers.{i}.{part}_proj" for i in range(200) for part in "qkvo"]
    began = time.process_time()
    patterns = EndPatterns({name: index for index, name in enumerate(names)})
    assert [patterns[patterns.key_of(name)] for name in names] == list(range(len(names)))
    assert time.process_time() - began < 0.5


def test_patterns_still_compare_and_print_as_the_config_wrote_them():
    raw = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "rank_pattern": {"q_proj": 4, "v.*": 2}}
    config = config_file.parse_config(raw, "x").config
    assert config.rank_pattern == {"q_proj": 4, "v.*": 2}
    assert config.model_dump()["rank_pattern"] == {"q_proj": 4, "v.*": 2}
    with pytest.raises(ValidationError):
        config.rank_pattern = {}


# --- very many tensors --------------------------------------------------------------------------


def write_headers(folder, names):
    """A file of tensors without numbers."""
    entry = {"dtype": "F32", "shape": [0, 64], "data_offsets": [0, 0]}
    header = json.dumps(dict.fromkeys(names, entry)).encode()
    path = folder / "adapter_model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    return folder


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ("base_model.model.x{}.lora_A.weight", "holds 20,000 tensors"),
        ("base_model.model.x{}.token_adapter.trainable_tokens_delta", "holds 20,000 tensors"),
    ],
)
def test_more_tensors_than_an_adapter_of_the_model_has(plain, base, form, words):
    write_headers(plain, [form.format(index) for index in range(20_000)])
    raw = {"trainable_token_indices": {"embed_tokens": [1]}}
    began = time.process_time()
    with pytest.raises(AdapterMismatchError, match=words):
        read.read_adapter(changed(plain, **raw), base, max_rank=16)
    assert time.process_time() - began < 2


def test_a_name_that_no_module_has(plain, base):
    write_headers(plain, ["base_model.model." + "a." * 1000 + "q_proj.lora_A.weight"])
    with pytest.raises(AdapterFormatError, match="more than 1,024 characters"):
        read.read_adapter(plain, base, max_rank=16)

"""The probe, on tuners written here and on every type that PEFT has for a linear."""

from __future__ import annotations

import copy
import warnings

import peft
import pytest
import torch
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import PeftType
from torch import nn

from branchline.adapters.lowering import (
    adalora,
    beft,
    boft,
    c3a,
    delora,
    fourierft,
    hira,
    ia3,
    loha,
    lokr,
    lora,
    miss,
    oft,
    road,
    vera,
)
from branchline.adapters.lowering.base import Effect
from branchline.adapters.tuner_probe import probe
from branchline.adapters.tuners import TUNERS, UNSERVED
from tests.adapters.lowering.peft_linear import Adapted, Net, conv1d, linear
from tests.parts_reference import effect_of

SIZE = 32

# Type: the config's options, the module that lowers it, and its settings.
LOWERED = {
    "LORA": ({"r": 4}, lora, lora.LoraSettings(4, 8)),
    "LORA with DoRA": ({"r": 4, "use_dora": True}, lora, lora.LoraSettings(4, 8, use_dora=True)),
    "ADALORA": ({"init_r": 4, "total_step": 9}, adalora, adalora.AdaLoraSettings(4, 4, 8)),
    "IA3": ({"feedforward_modules": []}, ia3, ia3.Ia3Settings(False)),
    "IA3 in a feed-forward": ({"feedforward_modules": ["proj"]}, ia3, ia3.Ia3Settings(True)),
    "VERA": ({"r": 4}, vera, vera.VeraSettings(4, vera.regenerate(0, 4, SIZE, SIZE))),
    "LOHA": ({"r": 2}, loha, loha.LoHaSettings(2, 8)),
    "LOKR": ({"r": 2}, lokr, lokr.LoKrSettings(2, 8)),
    "OFT": ({"oft_block_size": 8, "r": 0}, oft, oft.OftSettings(0, 8)),
    "BOFT": ({"boft_block_size": 8}, boft, boft.BoftSettings(8)),
    "FOURIERFT": ({"n_frequency": 9}, fourierft, fourierft.FourierFTSettings(9, 150.0, 777)),
    "C3A": ({"block_size": 8}, c3a, c3a.C3aSettings(8)),
    "HIRA": ({"r": 4}, hira, hira.HiraSettings(4)),
    "MISS": ({"r": 4}, miss, miss.MissSettings(4)),
    "MISS with mini": (
        {"r": 4, "init_weights": "mini", "mini_r": 8},
        miss,
        miss.MissSettings(4, "mini", 8),
    ),
    "BEFT": ({}, beft, beft.BeftSettings()),
    "ROAD": ({"group_size": 8}, road, road.RoadSettings("road_1", 8)),
    "DELORA": ({"r": 4}, delora, delora.DeloraSettings(4)),
}
# Type: the config's options, its effect, and whether it reads the weight of the base as well.
NOT_LOWERED = {
    "DEFT": ({}, Effect.RAW, False),
    "FROD": ({}, Effect.BYPASS, False),
    "GLORA": ({}, Effect.RAW, True),
    "GRALORA": ({}, Effect.RAW, False),
    "HRA": ({}, Effect.BYPASS, True),
    "LILY": ({}, Effect.RAW, False),
    "MISS with bat": ({"r": 4, "init_weights": "bat"}, Effect.BYPASS, True),
    "OSF": ({}, Effect.RAW, False),
    "PEANUT": ({}, Effect.RAW, True),
    "PSOFT": ({}, Effect.RAW, False),
    "PVERA": ({}, Effect.RAW, False),
    "RANDLORA": ({}, Effect.RAW, False),
    "SHIRA": ({"r": 2}, Effect.BYPASS, True),
    "SUPERTUNING": ({}, Effect.BYPASS, True),
    "TINYLORA": ({}, Effect.RAW, False),
    "UNILORA": ({}, Effect.RAW, False),
    "VBLORA": ({"vector_length": 4, "num_vectors": 30}, Effect.RAW, False),
    "WAVEFT": ({"n_frequency": 20}, Effect.RAW, False),
}
IN_DOUBT = {"POLY": {}, "TRAINABLE_TOKENS": {}}
# What PEFT does not put in the place of one linear: prompts, routers, norms; or cannot make here.
ELSEWHERE = {
    "ADAMSS",  # wants scikit-learn
    "ADAPTION_PROMPT",
    "CARTRIDGE",
    "CPT",
    "LN_TUNING",
    "MULTITASK_PROMPT_TUNING",
    "PREFIX_TUNING",
    "PROMPT_TUNING",
    "P_TUNING",
    "SHADOW",
    "XLORA",
}


def config_of(name: str, options: dict) -> peft.PeftConfig:
    kind = PEFT_TYPE_TO_CONFIG_MAPPING[PeftType(name.split()[0])]
    return kind(target_modules=["proj"], **options)


def tuner_layer(name: str, options: dict, **changes) -> nn.Module:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(Net(linear(SIZE, SIZE)), config_of(name, options | changes))
    return model.base_model.model.net["proj"]


def test_every_type_of_peft_is_in_the_table():
    named = {name.split()[0] for name in [*LOWERED, *NOT_LOWERED, *IN_DOUBT]}
    assert named | ELSEWHERE == {kind.value for kind in PEFT_TYPE_TO_TUNER_MAPPING}
    assert not named & ELSEWHERE


@pytest.mark.parametrize("name", LOWERED)
def test_the_probe_agrees_with_the_parts(name):
    options, module, settings = LOWERED[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = Adapted(config_of(name, options), linear(SIZE, SIZE))
    parts = module.lower(adapted.tensors, settings, adapted.base())
    found = probe(adapted.model.base_model.model.net["proj"])
    assert found.effect is effect_of(parts), found
    assert found.reads_weight == (name in ("LORA with DoRA", "HIRA"))


# From what leaves the base's input alone to what does not.
RISING = (Effect.OUTPUT, Effect.RAW, Effect.INPUT)


def test_every_served_type_is_watched_and_states_its_effect():
    watched: dict[str, Effect] = {}
    for name, (options, _, _) in LOWERED.items():
        kind, effect = name.split()[0], probe(tuner_layer(name, options)).effect
        watched[kind] = max(watched.get(kind, effect), effect, key=RISING.index)
    # These two sit on no linear.
    assert TUNERS.keys() - watched.keys() == {"LN_TUNING", "TRAINABLE_TOKENS"}
    assert watched == {kind: TUNERS[kind].effect for kind in watched}


@pytest.mark.parametrize("name", [name for name in NOT_LOWERED if name in UNSERVED])
def test_a_refusal_says_what_the_probe_sees(name):
    found, reason = probe(tuner_layer(name, NOT_LOWERED[name][0])), UNSERVED[name].reason
    if found.effect is Effect.BYPASS:
        assert "a changed weight in the base's place" in reason
    else:
        assert found.effect is Effect.RAW
        assert "reads the raw input" in reason
        assert found.reads_weight == ("and the base's weight" in reason)


def test_what_is_not_lowered_is_refused():
    kinds = {name.split()[0] for name in NOT_LOWERED}
    assert kinds - TUNERS.keys() <= UNSERVED.keys()
    assert kinds & TUNERS.keys() == {"MISS"}


@pytest.mark.parametrize("name", NOT_LOWERED)
def test_the_probe_classes_the_other_types(name):
    options, effect, reads_weight = NOT_LOWERED[name]
    found = probe(tuner_layer(name, options))
    assert (found.effect, found.reads_weight) == (effect, reads_weight), found


@pytest.mark.parametrize("name", IN_DOUBT)
def test_what_cannot_be_watched_is_raw(name):
    found = probe(tuner_layer(name, IN_DOUBT[name]))
    assert found.effect is Effect.RAW
    assert "in doubt" in found.reason


def test_a_fresh_adapter_is_classed_by_what_it_will_read():
    assert not torch.count_nonzero(tuner_layer("LORA", {}).lora_B["default"].weight)
    assert probe(tuner_layer("LORA", {})).effect is Effect.RAW


def test_a_product_that_bfloat16_would_round_away_is_seen():
    layer = tuner_layer("LORA", {"r": 1, "lora_bias": True}, lora_alpha=1e-6).bfloat16()
    layer.lora_B["default"].bias.data.fill_(1e6)
    assert probe(layer).effect is Effect.RAW


def test_activated_lora_without_offsets_is_raw():
    found = probe(tuner_layer("LORA", {"alora_invocation_tokens": [1, 2]}))
    assert found.effect is Effect.RAW
    assert "changed nothing" in found.reason


def test_lora_on_the_parameter_edits_the_weight():
    config = peft.LoraConfig(target_modules=[], target_parameters=["proj.weight"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(Net(linear(SIZE, SIZE)), config)
    assert probe(model.base_model.model.net["proj"]).effect is Effect.EDIT


def test_a_conv1d_is_a_linear():
    adapted = Adapted(peft.LoraConfig(), conv1d(32, 48))
    found = probe(adapted.model.base_model.model.net["proj"])
    assert (found.effect, found.reads_weight) == (Effect.RAW, False)
    assert "in doubt" not in found.reason


@pytest.mark.parametrize("way", ["disabled", "merged", "deleted", "inactive"])
def test_an_adapter_that_is_not_live_counts_for_nothing(way):
    layer = tuner_layer("LORA", {})
    if way == "disabled":
        layer.enable_adapters(False)
    elif way == "merged":
        layer.merge()
    elif way == "deleted":
        layer.delete_adapter("default")
    else:
        layer.set_adapter([])
    assert probe(layer).effect is None


def test_the_layer_and_the_generator_are_left_alone():
    layer = tuner_layer("OFT", {"oft_block_size": 8, "r": 0, "coft": True})
    layer.oft_R["default"].weight.data.normal_()
    before = copy.deepcopy(layer.state_dict())
    state = torch.random.get_rng_state()
    layer.train()
    probe(layer)
    after = layer.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert layer.training
    assert "forward" not in vars(layer.get_base_layer())


class Unknown(nn.Module, BaseTunerLayer):
    """A tuner that nobody has heard of, whose forward is given."""

    adapter_layer_names = ("own",)

    def __init__(self, forward, base=None):
        super().__init__()
        self.base_layer = linear(8, 6) if base is None else base
        self.own = nn.ParameterDict({"default": nn.Parameter(torch.zeros(6))})
        self._active_adapter = "default"
        self.merged_adapters = []
        self.given_forward = forward

    def forward(self, x):
        return self.given_forward(self, x, self.base_layer)


def edited(layer, x, base):
    saved = base.weight.clone()
    base.weight += layer.own["default"][:, None]
    result = base(x)
    base.weight.copy_(saved)
    return result


def refuses(layer, x, base):
    raise KeyError("task")


OWN = {
    "output": (lambda s, x, base: base(x) * (1 + s.own["default"]), Effect.OUTPUT, False),
    "raw": (
        lambda s, x, base: base(x) + x.sum(-1, keepdim=True) * s.own["default"],
        Effect.RAW,
        False,
    ),
    "raw-by-one-column": (
        lambda s, x, base: base(x) + x[..., :1] * s.own["default"],
        Effect.RAW,
        False,
    ),
    "input": (lambda s, x, base: base(x + s.own["default"].sum()), Effect.INPUT, False),
    "input-of-a-second-call": (lambda s, x, base: base(x) + base(2 * x), Effect.INPUT, False),
    "flattened": (
        lambda s, x, base: base(x.flatten(0, 1)).reshape(2, 3, 6) + s.own["default"],
        Effect.OUTPUT,
        False,
    ),
    "bypass": (
        lambda s, x, base: x @ (base.weight * (1 + s.own["default"][:, None])).T,
        Effect.BYPASS,
        True,
    ),
    "own-weight": (lambda s, x, base: x[..., :6] * s.own["default"], Effect.RAW, False),
    "edited": (edited, Effect.EDIT, False),
    "weight-beside": (
        lambda s, x, base: base(x) + x @ (base.weight * s.own["default"][:, None]).T,
        Effect.RAW,
        True,
    ),
}


@pytest.mark.parametrize("name", OWN)
def test_an_unknown_tuner(name):
    forward, effect, reads_weight = OWN[name]
    found = probe(Unknown(forward))
    assert (found.effect, found.reads_weight) == (effect, reads_weight), found
    assert "in doubt" not in found.reason


def test_an_adapter_kept_where_peft_does_not_look_counts():
    layer = Unknown(OWN["raw"][0])
    layer.adapter_layer_names = ()
    assert probe(layer).effect is Effect.RAW
    layer.given_forward = lambda s, x, base: base(x)
    assert probe(layer).effect is None


@pytest.mark.parametrize(
    ("layer", "text"),
    [
        (lambda: Unknown(refuses), "KeyError"),
        (lambda: Unknown(lambda s, x, base: base(x) * torch.inf), "not finite"),
        (lambda: Unknown(lambda s, x, base: base(x)), "changed nothing"),
        (lambda: Unknown(OWN["output"][0], nn.Embedding(8, 6)), "no linear"),
        (lambda: nn.Linear(8, 6), "no layer of a PEFT tuner"),
    ],
)
def test_in_doubt_it_reads_raw(layer, text):
    found = probe(layer())
    assert found.effect is Effect.RAW
    assert "in doubt" in found.reason
    assert text in found.reason

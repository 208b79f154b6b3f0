"""Adapters of every PEFT type that is served, made by PEFT for small models of four families."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import peft
import torch
from torch import nn

FAMILIES = ("llama", "qwen3", "gemma3", "gpt2")


@dataclass(frozen=True)
class Names:
    """What the modules of one family are called.

    Args:
        attention: linears of the attention, the first of which takes patterns.
        up: a linear into the feed-forward part.
        down: the linear out of it.
        table: the input embedding.
        norms: norms, by the ends of their names.
    """

    attention: tuple[str, ...]
    up: str
    down: str
    table: str
    norms: tuple[str, ...]

    @property
    def linears(self) -> list[str]:
        """Some of the attention, and the one that ends the feed-forward part."""
        return [*self.attention, self.down]


_LLAMA = Names(
    ("q_proj", "v_proj"), "gate_proj", "down_proj", "embed_tokens", ("input_layernorm", "norm")
)
NAMES = {
    "llama": _LLAMA,
    "qwen3": _LLAMA,
    "gemma3": _LLAMA,
    "gpt2": Names(("c_attn",), "c_fc", "mlp.c_proj", "wte", ("ln_1", "ln_f")),
}

Maker = Callable[[Names], peft.PeftConfig]


def _lora(targets: Callable[[Names], list[str]], rank: int = 4, **settings) -> Maker:
    # Initialised at random: B is zero else, and an adapter of zeros shows nothing.
    settings = {"init_lora_weights": False, "lora_alpha": 2 * rank} | settings
    return lambda n: peft.LoraConfig(r=rank, target_modules=targets(n), **settings)


def _of(config: type, targets: Callable[[Names], list[str]], **settings) -> Maker:
    return lambda n: config(target_modules=targets(n), **settings)


def _linears(n: Names) -> list[str]:
    return n.linears


def _attention(n: Names) -> list[str]:
    return list(n.attention)


#: One adapter each; together all types, and what one type can do in several ways.
CASES: dict[str, Maker] = {
    "lora": _lora(_linears),
    "lora-rslora": _lora(_attention, 8, use_rslora=True),
    "lora-patterns": lambda n: peft.LoraConfig(
        r=4,
        target_modules=n.linears,
        rank_pattern={n.attention[0]: 7},
        alpha_pattern={n.down: 3},
        init_lora_weights=False,
    ),
    "lora-bias": _lora(_linears, 2, lora_bias=True),
    "lora-dora": _lora(_linears, 6, use_dora=True),
    "lora-blocks": lambda n: peft.LoraConfig(
        r=8,
        target_modules=n.linears,
        use_bdlora=peft.BdLoraConfig(
            target_modules_bd_a=[n.down], target_modules_bd_b=list(n.attention), nblocks=2
        ),
        init_lora_weights=False,
    ),
    "lora-embedding": _lora(lambda n: [n.table, *n.attention], 3),
    "lora-head": _lora(lambda n: ["lm_head", n.up], 5),
    "lora-saved": lambda n: peft.LoraConfig(
        r=2,
        target_modules=[n.up],
        modules_to_save=[n.attention[0], n.norms[1]],
        init_lora_weights=False,
    ),
    "lora-saved-head": _lora(lambda n: [n.up], 2, modules_to_save=["lm_head"]),
    "lora-tokens": _lora(_attention, 2, trainable_token_indices=[9, 3, 77]),
    "adalora": _of(
        peft.AdaLoraConfig, _linears, init_r=6, target_r=3, total_step=10, lora_alpha=12
    ),
    "ia3": lambda n: peft.IA3Config(target_modules=n.linears, feedforward_modules=[n.down]),
    "ia3-gain": _of(peft.IA3Config, _attention, feedforward_modules=[]),
    "vera": _of(peft.VeraConfig, _linears, r=12),
    # PEFT's default, above all slots.
    "vera-wide": _of(peft.VeraConfig, _attention, r=256),
    "vera-drawn": _of(
        peft.VeraConfig, _attention, r=8, save_projection=False, projection_prng_key=5
    ),
    "loha": _of(peft.LoHaConfig, _linears, r=2, alpha=3),
    "loha-dense": _of(peft.LoHaConfig, _attention, r=8, alpha=8),
    "lokr": _of(peft.LoKrConfig, _linears, r=2, alpha=3),
    "lokr-both": _of(
        peft.LoKrConfig, _attention, r=2, alpha=3, decompose_both=True, decompose_factor=8
    ),
    "oft": _of(peft.OFTConfig, _linears, oft_block_size=16),
    "boft": _of(peft.BOFTConfig, _linears, boft_block_size=4, boft_n_butterfly_factor=2),
    "ln_tuning": lambda n: peft.LNTuningConfig(target_modules=list(n.norms)),
    "trainable_tokens": lambda n: peft.TrainableTokensConfig(
        target_modules=[n.table], token_indices=[4, 250, 31]
    ),
    "fourierft": _of(peft.FourierFTConfig, _linears, n_frequency=40),
    "c3a": _of(peft.C3AConfig, _linears, block_size=16),
    "hira": _of(peft.HiraConfig, _linears, r=4),
    "miss": _of(peft.MissConfig, _linears, r=8),
    "miss-mini": _of(peft.MissConfig, _attention, r=8, mini_r=4, init_weights="mini"),
    "delora": _of(peft.DeloraConfig, _linears, r=4),
    "road": _of(peft.RoadConfig, _linears, variant="road_1", group_size=32),
    "road-4": _of(peft.RoadConfig, _attention, variant="road_4", group_size=16),
    "beft": _of(peft.BeftConfig, _linears),
}

# How far parameters move, where a tenth would hardly show.
_SPREAD = {
    "adalora": 0.3,
    "vera": 0.3,
    "vera-drawn": 0.3,
    "vera-wide": 0.5,
    "loha-dense": 0.2,
    "lokr-both": 0.2,
    "c3a": 0.4,
    "hira": 0.3,
}

#: What PEFT cannot make, and what it says.
UNMADE: dict[tuple[str, str], str] = {
    ("lora-blocks", "gpt2"): "'Conv1D' object has no attribute 'out_features'",
    **{
        (case, "gpt2"): "Target module .*Conv1D.* (is )?not supported"
        for case in (
            "loha", "loha-dense", "lokr", "lokr-both", "oft", "boft", "c3a", "miss", "miss-mini",
            "delora", "road", "road-4", "beft",
        )
    },
}  # fmt: skip


def made_for(family: str) -> list[str]:
    """The cases that PEFT can make for a family."""
    return [case for case in CASES if (case, family) not in UNMADE]


def make(case: str, family: str, model: nn.Module, task: str = "CAUSAL_LM") -> peft.PeftModel:
    """A PEFT model around a copy of `model`, whose adapter is away from its initialisation."""
    config = CASES[case](NAMES[family])
    config.task_type = task
    torch.manual_seed(sum(case.encode()))
    wrapped = peft.get_peft_model(copy.deepcopy(model), config)
    for name, value in wrapped.named_parameters():
        # AdaLoRA's number of ranks is no weight.
        if ".default" in name and value.requires_grad and "ranknum" not in name:
            value.add_(torch.randn_like(value), alpha=_SPREAD.get(case, 0.1))
    return wrapped.eval()

"""LoRA, and what PEFT builds on it: rsLoRA, DoRA, a bias, block-diagonal and activated LoRA."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from ...core.errors import AdapterUnsupportedError
from ..base import TargetEmbedding, TargetExperts, TargetLayer
from ..expert_names import is_apart, names_in_config
from ..findings import Finding, unsupported
from ..lowering import lora as lowering
from ..lowering.base import BaseLinear, Effect, Shapes
from ..patterns import EndPatterns, Within
from ..tensor_file import TensorHeader
from ..weights import AnyWeights
from . import lora_experts
from .base import Lowering, Module, TunerType
from .config import ConfigKeys, Index, Number, Numbers, Rank, Ranks, TunerConfig

# Initialisations that fill A and B and leave the base weight alone.
_PLAIN_INITIALISATIONS = frozenset({"gaussian", "eva", "orthogonal", "mica"})
# These subtract the first B @ A from the base weight (LoftQ: replace it). A and B then belong to
# the changed weight, and without it the sum is wrong.
_BASE_CHANGING_INITIALISATIONS = ("pissa", "olora", "corda", "loftq", "lora_ga")


class BlockDiagonal(BaseModel):
    """PEFT's `BdLoraConfig`: whose A, and whose B, is stored as `nblocks` diagonal blocks.

    `match_strict` asks training for a match of every target; saved tensors show what it came to.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    target_modules_bd_a: list[str] | None = None
    target_modules_bd_b: list[str] | None = None
    nblocks: Rank = 1
    match_strict: bool = True

    @cached_property
    def within_a(self) -> Within:
        """What names modules whose A is stored in blocks."""
        return Within(self.target_modules_bd_a or ())

    @cached_property
    def within_b(self) -> Within:
        """What names modules whose B is stored in blocks, where A is not."""
        return Within(self.target_modules_bd_b or ())


class LoraConfigFile(TunerConfig):
    """The served keys of a LoRA config, with PEFT's defaults except for `r` and `lora_alpha`.

    Those two have no default: every PEFT version writes them, and a file without them would
    otherwise be scaled by a guess.
    """

    r: Rank
    lora_alpha: Number
    use_rslora: bool = False
    use_dora: bool = False
    lora_bias: bool = False
    use_bdlora: BlockDiagonal | None = None
    alora_invocation_tokens: list[Index] | None = None
    rank_pattern: Ranks = Field(default_factory=lambda: EndPatterns({}))
    alpha_pattern: Numbers = Field(default_factory=lambda: EndPatterns({}))
    target_parameters: list[str] | None = None
    # Of any type: it counts only where it tells how a parameter's halves lie.
    peft_version: Any = None


class Lora(TunerType[LoraConfigFile]):
    """LoRA."""

    peft_type = "LORA"
    effect = Effect.RAW
    computed = (
        "a low-rank product, of each expert by itself on experts; DoRA also a gain, `lora_bias` a "
        "shift; activated LoRA from its invocation tokens on"
    )
    config = LoraConfigFile
    targets = (TargetLayer, TargetEmbedding, TargetExperts)
    kinds = "linear or embedding"
    keys = ConfigKeys(
        served=frozenset(
            {
                "bias",
                "r",
                "lora_alpha",
                "use_rslora",
                "use_dora",
                "lora_bias",
                "use_bdlora",
                "alora_invocation_tokens",
                "rank_pattern",
                "alpha_pattern",
                "target_modules",
                "target_parameters",
                "exclude_modules",
                "layers_to_transform",
                "layers_pattern",
                "modules_to_save",
                "trainable_token_indices",
            }
        ),
        harmless={
            "corda_config": "settings of an initialisation",
            "eva_config": "settings of an initialisation; the ranks it found are in rank_pattern",
            # PEFT corrects it to what the module is (False for nn.Linear, True for Conv1D) and
            # stores lora_A (r, K) and lora_B (N, r) either way.
            "fan_in_fan_out": "the layout of the base weight",
            "init_lora_weights": "checked: most only fill A and B",
            "lora_dropout": "acts in training only",
            "lora_ga_config": "settings of an initialisation",
            "loftq_config": "settings of an initialisation",
            "megatron_core": "read only together with megatron_config, which is refused",
            "merge_weights": "PEFT 0.2: whether evaluation merges",
            "qalora_group_size": "read only together with use_qalora, which is refused",
            "runtime_config": "PEFT itself ignores it in a file",
        },
        refused={
            "arrow_config": "Arrow routing",
            "enable_lora": "grouped LoRA of PEFT 0.2",
            "ensure_weight_tying": "tied adapters",
            "kasa_config": "KaSA",
            "layer_replication": "layer replication",
            "megatron_config": "Megatron layers",
            "monteclora_config": "Monteclora",
            "use_qalora": "QALoRA",
            "velora_config": "VeLoRA",
        },
        required=frozenset({"r", "lora_alpha"}),
        optional_none=frozenset({"bias"}),
    )

    def check_config(self, raw: Mapping[str, Any]) -> list[Finding]:
        """An initialisation that changed the base is refused, an unknown one too."""
        return [*_initialisation(raw.get("init_lora_weights")), *_combinations(raw)]

    def parts(self, config: LoraConfigFile) -> Mapping[str, str]:
        """lora_A and lora_B, or their embedding forms; what the variants add."""
        ends = {
            "lora_A": "lora_A.weight",
            "lora_B": "lora_B.weight",
            "lora_embedding_A": "lora_embedding_A",
            "lora_embedding_B": "lora_embedding_B",
        }
        if config.use_dora:
            ends["lora_magnitude_vector"] = "lora_magnitude_vector"
        if config.lora_bias:
            ends["lora_B.bias"] = "lora_B.bias"
        return ends

    def shapes(self, config: LoraConfigFile, module: Module) -> Shapes:
        """lora_A `(r, K)` and lora_B `(N, r)`; of an embedding A `(r, V)` and B `(D, r)`.

        Those of experts are told by `lora_experts`.
        """
        if isinstance(module.target, TargetExperts):
            _refuse_activated(config, module.target)
            settings_of = partial(self._settings, config)
            return lora_experts.shapes(module, settings_of, config.peft_version)
        settings, target = self.settings(config, module), module.target
        if isinstance(target, TargetEmbedding):
            return lowering.embedding_shapes(settings, target.num_embeddings, target.embedding_dim)
        layer = module.linear
        base = BaseLinear(layer.name, layer.in_features, layer.out_features)
        return lowering.shapes(settings, base)

    def dimensions(self, part: str) -> tuple[str, ...] | None:
        """Of every part that has a size of the layer's."""
        if part[0].isdigit():
            part = part.rpartition(".")[2]
        return {
            "experts.lora_A": ("ranks of all experts", "inputs"),
            "experts.lora_B": ("outputs", "ranks of all experts"),
            "stacked.lora_A": ("experts", "rank", "inputs"),
            "stacked.lora_B": ("experts", "outputs", "rank"),
            "lora_A": ("rank", "inputs"),
            "lora_B": ("outputs", "rank"),
            "lora_embedding_A": ("rank", "tokens"),
            "lora_embedding_B": ("columns", "rank"),
            "lora_B.bias": ("outputs",),
            "lora_magnitude_vector": ("outputs",),
        }.get(part)

    def rank(self, config: LoraConfigFile, module: Module) -> int:
        """After the patterns."""
        if isinstance(module.target, TargetExperts):
            return lora_experts.rank(module, partial(self._settings, config))
        return self._rank(config, module)

    def invocation(self, config: LoraConfigFile) -> tuple[int, ...]:
        """Of activated LoRA."""
        return tuple(config.alora_invocation_tokens or ())

    def needs_base(self, config: LoraConfigFile) -> str | None:
        """DoRA, whose gain is of the norms of the summed weight."""
        return "DoRA" if config.use_dora else None

    def sizes(
        self, config: LoraConfigFile, headers: Mapping[str, TensorHeader]
    ) -> tuple[int, int] | None:
        """The outer sizes of the halves; what is no matrix is refused before it counts."""
        outer = {part: header.shape for part, header in headers.items()}
        inputs = outer.get("lora_A", ())[-1:]
        outputs = outer.get("lora_B", ())[:1]
        if not inputs and not outputs and not outer.keys() & {"lora_A", "lora_B"}:
            return None
        layout = self._blocks(config, next(iter(headers.values())).name)
        return (inputs[0] * layout[0] if inputs else 0), (outputs[0] if outputs else 0)

    def lower(self, config: LoraConfigFile, module: Module, given: Lowering) -> AnyWeights:
        """A product; with DoRA also a gain, with `lora_bias` a shift."""
        if isinstance(module.target, TargetExperts):
            settings_of = partial(self._settings, config)
            return lora_experts.lower(module, dict(given.tensors), settings_of, config.peft_version)
        settings, target = self.settings(config, module), module.target
        if isinstance(target, TargetEmbedding):
            if config.alora_invocation_tokens:
                raise AdapterUnsupportedError(
                    f"embedding {target.name!r}",
                    "has a branch of an activated LoRA, which PEFT has on linears only",
                    "train the adapter on linears",
                )
            return lowering.lower_embedding(
                given.tensors, settings, target.name, target.num_embeddings, target.embedding_dim
            )
        return lowering.lower(given.tensors, settings, given.base_linear(module.linear))

    def settings(self, config: LoraConfigFile, module: Module) -> lowering.LoraSettings:
        """The settings of one module, after the patterns.

        Where an adapter has each expert by itself, those of the first one's first linear.
        """
        if is_apart(module):
            module = replace(module, alias=names_in_config(module)[0])
        return self._settings(config, module)

    def _rank(self, config: LoraConfigFile, module: Module) -> int:
        return self.patterned(config.rank_pattern, config.r, module)

    def _settings(self, config: LoraConfigFile, module: Module) -> lowering.LoraSettings:
        a_blocks, b_blocks = self._blocks(config, module.alias)
        return lowering.LoraSettings(
            rank=self._rank(config, module),
            alpha=self.patterned(config.alpha_pattern, config.lora_alpha, module),
            use_rslora=config.use_rslora,
            use_dora=config.use_dora,
            lora_bias=config.lora_bias,
            a_blocks=a_blocks,
            b_blocks=b_blocks,
        )

    def _blocks(self, config: LoraConfigFile, alias: str) -> tuple[int, int]:
        blocks = config.use_bdlora
        if blocks is None:
            return 1, 1
        # PEFT looks for the entries anywhere in the module's name, A's first.
        if blocks.within_a.has(alias):
            return blocks.nblocks, 1
        if blocks.within_b.has(alias):
            return 1, blocks.nblocks
        return 1, 1


def _refuse_activated(config: LoraConfigFile, target: TargetExperts) -> None:
    if config.alora_invocation_tokens:
        raise AdapterUnsupportedError(
            f"experts {target.name!r}",
            "have branches of an activated LoRA, which PEFT has on linears only",
            "train the adapter on linears",
        )


def _initialisation(value: object) -> list[Finding]:
    if value is None or isinstance(value, bool):
        return []
    name = value.lower() if isinstance(value, str) else None
    if name in _PLAIN_INITIALISATIONS:
        return []
    shown = repr(value)[:60]
    if name is not None and name.startswith(_BASE_CHANGING_INITIALISATIONS):
        text = f"init_lora_weights={shown} changes the base weights it was trained against"
        remedy = (
            "save it as plain LoRA with PEFT's "
            "save_pretrained(..., path_initial_model_for_weight_conversion=...)"
        )
        return [unsupported(text, remedy)]
    text = f"init_lora_weights={shown} is unknown"
    return [unsupported(text, "use an initialisation that leaves the base weights alone")]


def _combinations(raw: Mapping[str, Any]) -> list[Finding]:
    variants = ("use_dora", "lora_bias", "use_bdlora", "alora_invocation_tokens")
    used = [key for key in variants if raw.get(key)]
    if raw.get("target_parameters"):
        beside = [key for key in lora_experts.REFUSED_BESIDE_PARAMETERS if raw.get(key)]
        used = ["target_parameters", *beside]
    if raw.get("alora_invocation_tokens"):
        # They would have to act on some tokens of a row and not on others.
        used += [key for key in ("modules_to_save", "trainable_token_indices") if raw.get(key)]
    if len(used) < 2:
        return []
    text = f"{' together with '.join(used)} is not served"
    return [unsupported(text, "train the adapter with one of them")]

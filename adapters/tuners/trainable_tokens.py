"""Trained rows of an embedding, as a type of its own; a tied head has them too."""

from __future__ import annotations

from collections.abc import Mapping

from ..base import BaseFacts, TargetEmbedding
from ..lowering.base import Effect
from ..selection import ModuleSelection
from ..weights import AnyWeights, EmbeddingWeights
from .base import Lowering, Module, Shape, TunerType
from .config import ConfigKeys, Index, TunerConfig


class TrainableTokensConfigFile(TunerConfig):
    """The served keys of a config of trained tokens."""

    token_indices: list[Index]


class TrainableTokens(TunerType[TrainableTokensConfigFile]):
    """All its tensors are rows of tokens, which every type may have; see `tokens`."""

    peft_type = "TRAINABLE_TOKENS"
    effect = Effect.RAW
    computed = "rows in the embedding's place; on a tied head a low-rank product and a gain"
    config = TrainableTokensConfigFile
    targets = (TargetEmbedding,)
    kinds = "embedding"
    token_end = "trainable_tokens_delta"
    selects_targets = False
    keys = ConfigKeys(
        served=frozenset({"token_indices", "target_modules"}),
        harmless={"init_weights": "fills the rows only"},
        required=frozenset({"token_indices"}),
    )

    def parts(self, config: TrainableTokensConfigFile) -> Mapping[str, str]:
        """None beside the rows."""
        return {}

    def shapes(self, config: TrainableTokensConfigFile, module: Module) -> Mapping[str, Shape]:
        """None beside the rows."""
        return {}

    def token_rows(
        self, config: TrainableTokensConfigFile, base: BaseFacts, aliases: Mapping[str, str]
    ) -> dict[str, tuple[int, ...]]:
        """The tokens, for each target; the input embedding where there is none."""
        ids, targets = tuple(config.token_indices), config.target_modules
        if targets is None:
            return {base.input_embedding or "embed_tokens": ids}
        selection = ModuleSelection(targets)
        names = [name for alias, name in aliases.items() if selection.selects(alias)]
        return dict.fromkeys(names or [str(targets)], ids)

    def lower(
        self, config: TrainableTokensConfigFile, module: Module, given: Lowering
    ) -> AnyWeights:
        """Nothing: it has no parts beside the rows."""
        return EmbeddingWeights()

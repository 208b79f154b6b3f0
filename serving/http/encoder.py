"""An encoder's forwards: token ids to one vector a text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...adapters.lease import Lease
from ...core.errors import WrapError
from ..model import ServedModel
from .pooling import PoolingConfig


class Encoder:
    """Makes vectors of texts, one forward at a time.

    Args:
        served: a model that makes no text.
        padding: the token that fills up shorter texts.
        folder: of the checkpoint, which says how vectors are made.

    Attributes:
        pooling: how vectors are made.
        width: of a vector.

    Raises:
        WrapError: see `PoolingConfig.read`; or the head's input is made for the head alone.
    """

    def __init__(self, served: ServedModel, padding: int, folder: Path) -> None:
        self.pooling = PoolingConfig.read(folder)
        self.width: int = served.config.get_text_config().hidden_size
        self._served = served
        self._padding = padding
        model: Any = served.model
        self._model = model.base_model
        if self._model is not model:
            self._keep_raw(type(model).__name__)

    def run(self, texts: Sequence[Sequence[int]], lease: Lease | None) -> torch.Tensor:
        """The vectors of texts that share a forward.

        Args:
            texts: their tokens, of each at least one.
            lease: of the adapter; None for the base model.

        Returns:
            float32 (texts, width), on the CPU.
        """
        longest = max(map(len, texts))
        ids = torch.full((len(texts), longest), self._padding)
        mask = torch.zeros_like(ids)
        for row, text in enumerate(texts):
            ids[row, : len(text)] = torch.tensor(text)
            mask[row, : len(text)] = 1
        ids, mask = ids.to(self._model.device), mask.to(self._model.device)
        return self.pooling.pool(self._hidden(ids, mask, lease), mask).cpu()

    def _hidden(
        self, ids: torch.Tensor, mask: torch.Tensor, lease: Lease | None = None
    ) -> torch.Tensor:
        # What a head makes of the hidden states (of a masked language model, say) is no embedding.
        with torch.no_grad(), self._served.adapters.rows([lease] * len(ids)):
            return self._model(input_ids=ids, attention_mask=mask).last_hidden_state

    def _keep_raw(self, name: str) -> None:
        """Let every plan know that the last hidden states are read here, not by the head alone."""
        makers: dict[int, tuple[nn.Module, torch.Tensor]] = {}

        def note(module: nn.Module, inputs: Any, output: Any) -> None:
            if isinstance(output, torch.Tensor):
                makers.setdefault(id(output), (module, output))

        ids = torch.zeros(1, 2, dtype=torch.long, device=self._model.device)
        hooks = [module.register_forward_hook(note) for module in self._model.modules()]
        hidden = self._hidden(ids, torch.ones_like(ids))
        for hook in hooks:
            hook.remove()
        maker = makers.get(id(hidden))
        if maker is not None:
            # A hook is a reader that plans ask for.
            maker[0].register_forward_hook(_reads)
        if not isinstance(self._hidden(ids, torch.ones_like(ids)), torch.Tensor):
            raise WrapError(
                f"model {name}",
                "hands its last hidden states to its head in codes alone",
                "save the model without its head, or use policy='static' (command line: "
                "--policy static)",
            )


def _reads(module: nn.Module, inputs: Any, output: Any) -> None:
    """Changes nothing."""

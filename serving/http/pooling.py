"""From an encoder's hidden states to one vector a text, as the checkpoint says."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch

from ...core.errors import WrapError

_MODULES = "modules.json"
_KNOWN = ("Transformer", "Pooling", "Normalize")


class Pooling(StrEnum):
    """Which hidden states make the vector."""

    MEAN = "mean"
    CLS = "cls"
    LAST = "lasttoken"
    MAX = "max"


# As sentence-transformers' Pooling module writes them.
_FLAGS = {
    "pooling_mode_mean_tokens": Pooling.MEAN,
    "pooling_mode_cls_token": Pooling.CLS,
    "pooling_mode_lasttoken": Pooling.LAST,
    "pooling_mode_max_tokens": Pooling.MAX,
}


@dataclass(frozen=True)
class PoolingConfig:
    """How a checkpoint's vectors are made.

    Attributes:
        pooling: which hidden states.
        normalize: to length 1.
    """

    pooling: Pooling = Pooling.MEAN
    normalize: bool = True

    @classmethod
    def read(cls, folder: Path) -> PoolingConfig:
        """What the files of sentence-transformers in `folder` say; the mean, normalised, if none.

        Raises:
            WrapError: they cannot be read, or ask for a step that is not served.
        """
        if not (folder / _MODULES).is_file():
            return cls()
        modules = _read(folder, _MODULES, list)
        kinds = [_kind(folder, module) for module in modules]
        unknown = [kind for kind in kinds if kind not in _KNOWN]
        if unknown:
            raise _unserved(folder, f"its {_MODULES} asks for {unknown[0]}")
        pooling = Pooling.MEAN
        for kind, module in zip(kinds, modules, strict=True):
            if kind == "Pooling":
                pooling = _pooling(folder, str(module.get("path", "")))
        return cls(pooling, "Normalize" in kinds)

    def pool(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """The vectors of texts.

        Args:
            hidden: of the last layer, float (rows, tokens, width).
            mask: int64 (rows, tokens), 1 where there is a token; padding is on the right.

        Returns:
            float32 (rows, width).
        """
        states, there = hidden.float(), mask.unsqueeze(-1).bool()
        if self.pooling is Pooling.CLS:
            pooled = states[:, 0]
        elif self.pooling is Pooling.LAST:
            pooled = states[torch.arange(len(states)), mask.sum(1) - 1]
        elif self.pooling is Pooling.MAX:
            pooled = states.masked_fill(~there, -torch.inf).amax(1)
        else:
            pooled = states.masked_fill(~there, 0.0).sum(1) / mask.sum(1, keepdim=True)
        return normalized(pooled) if self.normalize else pooled

    def shorten(self, vectors: torch.Tensor, dimensions: int | None) -> torch.Tensor:
        """The first `dimensions` of each, of length 1 again where they were."""
        if dimensions is None or dimensions == vectors.shape[-1]:
            return vectors
        short = vectors[:, :dimensions]
        return normalized(short) if self.normalize else short


def normalized(vectors: torch.Tensor) -> torch.Tensor:
    """Vectors (rows, width) of length 1; those of length 0 stay."""
    return torch.nn.functional.normalize(vectors, dim=-1)


def _kind(folder: Path, module: Any) -> str:
    if not isinstance(module, dict):
        raise _unserved(folder, f"its {_MODULES} lists what is no object")
    return str(module.get("type", "")).rsplit(".", 1)[-1]


def _pooling(folder: Path, path: str) -> Pooling:
    name = f"{path}/config.json".lstrip("/")
    config = _read(folder, name, dict)
    if "pooling_mode" in config:
        asked = config["pooling_mode"]
        chosen = [asked] if isinstance(asked, str) else asked
    else:
        chosen = [
            _FLAGS.get(flag, flag)
            for flag, on in config.items()
            if flag.startswith("pooling_mode_") and on
        ]
    if not isinstance(chosen, list) or len(chosen) != 1 or chosen[0] not in tuple(Pooling):
        raise _unserved(folder, f"its {name} asks for {chosen}")
    return Pooling(chosen[0])


def _read(folder: Path, name: str, kind: type) -> Any:
    place = (folder / name).resolve()
    if not place.is_relative_to(folder.resolve()):
        raise _unserved(folder, f"its {_MODULES} names {name!r}, which lies outside of it")
    try:
        found = json.loads(place.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _unserved(folder, f"its {name} cannot be read ({error})") from error
    if not isinstance(found, kind):
        raise _unserved(folder, f"its {name} holds no {kind.__name__}")
    return found


def _unserved(folder: Path, reason: str) -> WrapError:
    return WrapError(
        f"model {str(folder)!r}",
        reason,
        f"a transformer, one pooling ({', '.join(Pooling)}) and a normalisation are served",
    )

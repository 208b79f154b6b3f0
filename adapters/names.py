"""From the names in an adapter file to the layers of a base model.

Two explicit tables and nothing guessed: which wrappers' prefixes are known, and which tensors of
other features are recognised so that they can be refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import dataclass

PEFT_PREFIX = "base_model.model."


@dataclass(frozen=True)
class NameRule:
    """One known way in which an adapter's names differ from the base model's.

    Args:
        pairs: (prefix in the adapter, prefix in the base model), the first that fits is taken; a
            name that fits none stays as it is.
    """

    pairs: tuple[tuple[str, str], ...] = ()

    def to_base(self, name: str) -> str:
        """The base model's name of a module that the adapter names."""
        for adapter, base in self.pairs:
            if name.startswith(adapter):
                return base + name[len(adapter) :]
        return name

    def to_adapter(self, name: str) -> str:
        """The adapter's name of a base module: what its config's patterns were written for."""
        for adapter, base in self.pairs:
            if name.startswith(base):
                return adapter + name[len(base) :]
        return name

    @property
    def note(self) -> str | None:
        """What a listing says about the mapping; None if names are taken as they are."""
        if not self.pairs:
            return None
        return "names mapped: " + ", ".join(
            f"{adapter}* -> {base}*" for adapter, base in self.pairs
        )


# The layer lists are spelled out so that the vision part of a checkpoint, whose names share the
# wrapper, is not mistaken for the text part.
RULES: tuple[NameRule, ...] = (
    NameRule(),
    # The text part of a multimodal checkpoint.
    NameRule((("model.language_model.layers.", "model.layers."),)),
    NameRule((("model.text_model.layers.", "model.layers."),)),
    # The same as transformers 4 named it.
    NameRule(
        (
            ("language_model.model.layers.", "model.layers."),
            ("language_model.lm_head", "lm_head"),
        )
    ),
    # Saved from a model under torch.compile.
    NameRule((("_orig_mod.", ""),)),
)

# (text in the tensor's name, the feature, the config key that switches it on)
_FEATURES: tuple[tuple[str, str, str | None], ...] = (
    ("lora_magnitude_vector", "DoRA magnitudes (lora_magnitude_vector)", "use_dora"),
    (".lora_embedding_", "LoRA on an embedding (lora_embedding)", None),
    ("lora_diag", "KaSA singular values (lora_diag)", "kasa_config"),
    ("lora_velora", "VeLoRA projections (lora_velora)", "velora_config"),
    ("lora_arrow", "Arrow routing (lora_arrow)", "arrow_config"),
    ("monteclora", "Monteclora samplers", "monteclora_config"),
    ("trainable_tokens", "trained tokens (trainable_tokens)", "trainable_token_indices"),
    (".lora_E", "AdaLoRA's singular values (lora_E)", None),
    (".ranknum", "AdaLoRA's ranks (ranknum)", None),
    (".ia3_l", "IA3 vectors (ia3_l)", None),
    (".hada_", "LoHa factors (hada)", None),
    (".lokr_", "LoKr factors (lokr)", None),
    (".oft_", "OFT rotations (oft)", None),
    (".vera_lambda", "VeRA vectors (vera_lambda)", None),
    ("prompt_embeddings", "a learned prompt (prompt_embeddings)", None),
    (
        ".base_layer.",
        "a copy of a base weight (PEFT adds it when lm_head or embed_tokens is a target; "
        "save with save_embedding_layers=False)",
        None,
    ),
    (".modules_to_save.", "a module saved whole (modules_to_save)", "modules_to_save"),
)
_LORA_BIAS = re.compile(r"\.lora_[AB](?:\.[^.]+)?\.bias$")


@dataclass(frozen=True)
class PartName:
    """The name of one tensor of a module's adapter, taken apart.

    Args:
        tensor: the name in the file.
        module: the adapter's name of the module, without PEFT's prefix; empty for a tensor that
            all modules share.
        part: which tensor of the module it is ("lora_A").
        adapter: the adapter's name, where the tensor's name carries one.
        prefixed: whether PEFT's prefix was there.
    """

    tensor: str
    module: str
    part: str
    adapter: str | None
    prefixed: bool


class NameParser:
    """Takes the names of a type's tensors apart.

    Args:
        parts: parts of a module to the ends of their names ("lora_A" -> "lora_A.weight").
        shared: names of tensors that all modules share.
    """

    def __init__(self, parts: Mapping[str, str], shared: Iterable[str] = ()) -> None:
        self._ends = [(part, _ending(end)) for part, end in parts.items()]
        self._shared = [
            (name, re.compile(rf"(?:base_model\.)?{re.escape(name)}(?:\.(?P<adapter>[^.]+))?"))
            for name in shared
        ]

    def parse(self, tensor: str) -> PartName | None:
        """Take a name apart; None for a tensor that is no part of the type."""
        for part, pattern in self._ends:
            match = pattern.fullmatch(tensor)
            if match is not None:
                module = match["module"]
                prefixed = module.startswith(PEFT_PREFIX)
                module = module.removeprefix(PEFT_PREFIX)
                return PartName(tensor, module, part, match["adapter"], prefixed)
        for name, pattern in self._shared:
            match = pattern.fullmatch(tensor)
            if match is not None:
                return PartName(tensor, "", name, match["adapter"], True)
        return None


def _ending(end: str) -> re.Pattern[str]:
    """The pattern of names that end so, with or without an adapter's name in them."""
    stem, _, tail = end.partition(".")
    # PEFT has written vectors with and without a ".weight" of their own.
    rest = rf"\.{re.escape(tail)}" if tail else r"(?:\.weight)?"
    adapter = r"(?:\.(?P<adapter>(?!weight$)[^.]+))?"
    return re.compile(rf"(?P<module>.+)\.{re.escape(stem)}{adapter}{rest}", re.DOTALL)


def choose_rule(modules: Collection[str], layers: Container[str]) -> NameRule:
    """The rule under which most modules name a layer; the first of the table among equals."""
    return max(RULES, key=lambda rule: sum(rule.to_base(name) in layers for name in modules))


def common_prefix(names: Iterable[str]) -> str:
    """The dotted prefix that all names share ("thinker.talker.layers"); may be empty."""
    split = [name.split(".") for name in names]
    shared = []
    for parts in zip(*split, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)


def features_of(
    tensors: Iterable[str], explained: Collection[str]
) -> Mapping[str, tuple[str | None, list[str]]]:
    """Sort tensors that nothing uses by the feature they belong to.

    Args:
        tensors: names in the file.
        explained: config keys that are already refused; their tensors are left out.

    Returns:
        Feature to (its config key or None, its tensors).
    """
    found: dict[str, tuple[str | None, list[str]]] = {}
    for tensor in tensors:
        feature, key = _feature(tensor)
        if key not in explained:
            found.setdefault(feature, (key, []))[1].append(tensor)
    return found


def _feature(tensor: str) -> tuple[str, str | None]:
    if _LORA_BIAS.search(tensor):
        return "a bias on a half of LoRA (lora_bias)", "lora_bias"
    for text, feature, key in _FEATURES:
        if text in tensor:
            return feature, key
    if "lora_" not in tensor and tensor.endswith(".weight"):
        # PEFT strips the words modules_to_save from the names of what it saves whole.
        return "a trained head or another module saved whole", "modules_to_save"
    if "lora_" not in tensor and tensor.endswith(".bias"):
        return "a trained bias", "bias"
    return "no part of this PEFT type", None

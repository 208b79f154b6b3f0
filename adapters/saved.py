"""What an adapter may hold beside its type's own tensors: whole modules and rows of tokens.

`modules_to_save` keeps modules whole, `trainable_token_indices` rows of an embedding, and PEFT
copies the base weight of a targeted head or embedding into the file.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .base import BaseFacts, Target, TargetEmbedding, TargetLayer, TargetNorm
from .findings import Finding, damaged, listing, mismatch, unsupported
from .names import PEFT_PREFIX, NameRule
from .patterns import TextEnds
from .tensor_file import TensorHeader
from .tuners.base import TunerType
from .tuners.config import TunerConfig

#: At the end of the module of a copy of base weights.
COPY_SUFFIX = ".base_layer"


@dataclass(frozen=True)
class TokenRows:
    """Trained rows of one embedding, or of the head tied to it.

    Args:
        tensor: the name in the file, of `(T, D)`.
        ids: the tokens, in the order of the rows.
    """

    tensor: str
    ids: tuple[int, ...]


@dataclass
class SavedParts:
    """By the base model's names of the modules; filled by `find_saved`.

    Args:
        whole: "weight" and "bias" of modules saved whole, to the names of their tensors.
        copies: the same of copies of base weights.
        tokens: trained rows.
        leftover: tensors that are none of these.
        findings: what speaks against loading.
        notes: for the listing.
    """

    whole: dict[str, dict[str, str]] = field(default_factory=dict)
    copies: dict[str, dict[str, str]] = field(default_factory=dict)
    tokens: dict[str, TokenRows] = field(default_factory=dict)
    leftover: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def modules(self) -> set[str]:
        """All that an adapter has something for."""
        return {*self.whole, *self.copies, *self.tokens}


def find_saved(
    tuner: TunerType[Any],
    config: TunerConfig,
    base: BaseFacts,
    rule: NameRule,
    headers: Mapping[str, TensorHeader],
    others: Collection[str],
    targeted: Collection[str],
) -> SavedParts:
    """Sort the tensors that are no parts of the type, and check them.

    Args:
        tuner: the type.
        config: its served keys.
        base: the model.
        rule: how the adapter's names differ from the model's.
        headers: all tensors of the file.
        others: those that are no parts of the type.
        targeted: modules that have parts of the type.
    """
    saved = SavedParts()
    rows = _token_rows(tuner, config, base, rule)
    selected = _selected(config, base, rule, saved)
    # PEFT adds copies of these two only.
    copied_from = {base.input_embedding, base.output_embedding} & set(targeted)
    for tensor in others:
        module, _, end = tensor.removeprefix(PEFT_PREFIX).rpartition(".")
        name = rule.to_base(module)
        copied = rule.to_base(module.removesuffix(COPY_SUFFIX))
        owner = tensor.removeprefix(PEFT_PREFIX).removesuffix(f".{tuner.token_end}")
        if tensor.endswith(f".{tuner.token_end}") and (rows or not tuner.selects_targets):
            owner = rule.to_base(owner)
            is_head = base.tied_head and owner == base.output_embedding
            source = base.input_embedding if is_head and owner not in rows else owner
            saved.tokens[owner] = TokenRows(tensor, rows.get(source or "", ()))
        elif name in selected and end in ("weight", "bias"):
            saved.whole.setdefault(name, {})[end] = tensor
        elif module.endswith(COPY_SUFFIX) and copied in copied_from and end in ("weight", "bias"):
            saved.copies.setdefault(copied, {})[end] = tensor
        else:
            saved.leftover.append(tensor)
    _check_whole(saved, base, headers, selected)
    _check_copies(saved, base, headers)
    _check_tokens(saved, base, headers, rows, targeted)
    if base.tied_head:
        _tie(saved, base, targeted)
    return saved


def _selected(
    config: TunerConfig, base: BaseFacts, rule: NameRule, saved: SavedParts
) -> dict[str, str]:
    """Linears, embeddings and norms that `modules_to_save` keeps, to the entry that names them."""
    found: dict[str, str] = {}
    unmatched = []
    if not config.modules_to_save:
        return found
    # By the end of the name's text, as PEFT does it, not by its dotted parts.
    ends, below = TextEnds(config.modules_to_save), _below(base.targets)
    _refuse_experts(ends, base, rule, saved)
    roots: dict[str, list[str]] = {}
    for name in base.modules:
        for entry in ends.of(rule.to_adapter(name)):
            roots.setdefault(entry, []).append(name)
    for entry in dict.fromkeys(config.modules_to_save):
        under = (name for root in roots.get(entry, ()) for name in below.get(root, ()))
        inside = [name for name in under if name not in base.experts]
        found.update(dict.fromkeys(inside, entry))
        if entry not in roots:
            unmatched.append(entry)
        elif not inside:
            text = f"modules_to_save keeps {entry!r}, which holds no linear, embedding or norm"
            saved.findings.append(unsupported(text, "train the adapter without it"))
    if unmatched:
        # PEFT accepts these, and adds names of heads that the model may not have.
        saved.notes.append(f"modules_to_save entries that name no module: {listing(unmatched)}")
    return found


def _refuse_experts(ends: TextEnds, base: BaseFacts, rule: NameRule, saved: SavedParts) -> None:
    """Of experts there are branches, and no weights of an adapter's own."""
    below = _below(base.experts)
    kept = [name for name in base.modules if name in below and ends.of(rule.to_adapter(name))]
    if kept:
        text = f"modules_to_save keeps modules with experts: {listing(kept)}"
        remedy = "train the experts with target_parameters"
        saved.findings.append(unsupported(text, remedy))


def _below(targets: Iterable[str]) -> dict[str, list[str]]:
    """Each module to the targets that it is, or that lie in it."""
    below: dict[str, list[str]] = {}
    for name in targets:
        below.setdefault(name, []).append(name)
        end = name.rfind(".")
        while end > 0:
            below.setdefault(name[:end], []).append(name)
            end = name.rfind(".", 0, end)
    return below


def _check_whole(
    saved: SavedParts,
    base: BaseFacts,
    headers: Mapping[str, TensorHeader],
    selected: Mapping[str, str],
) -> None:
    targets = base.targets
    missing = [name for name in selected if "weight" not in saved.whole.get(name, {})]
    if missing:
        text = f"modules_to_save keeps modules for which the file has no weight: {listing(missing)}"
        saved.findings.append(mismatch(text))
    for name, tensors in saved.whole.items():
        target = targets[name]
        if target.refusal is not None:
            text = f"module {name!r} cannot take an adapter's own weights: {target.refusal}"
            saved.findings.append(unsupported(text, "train the adapter without this module"))
        _check_shapes(saved, target, tensors, headers)


def _check_copies(saved: SavedParts, base: BaseFacts, headers: Mapping[str, TensorHeader]) -> None:
    for name, tensors in saved.copies.items():
        if "weight" not in tensors:
            text = f"the file has a copy of the bias of {name!r} but not of its weight"
            saved.findings.append(damaged(text, "the file is incomplete: save it again"))
        _check_shapes(saved, base.targets[name], tensors, headers)


def _check_shapes(
    saved: SavedParts,
    target: Target,
    tensors: Mapping[str, str],
    headers: Mapping[str, TensorHeader],
) -> None:
    name = target.name
    shapes: dict[str, tuple[int, ...]]
    if isinstance(target, TargetEmbedding):
        shapes = {"weight": (target.num_embeddings, target.embedding_dim)}
    elif isinstance(target, TargetLayer):
        shape = (target.out_features, target.in_features)
        shapes = {"weight": shape[::-1] if target.transposed else shape}
        if target.has_bias:
            shapes["bias"] = (target.out_features,)
    else:
        # No weights of experts are an adapter's own: `_refuse_experts`.
        assert isinstance(target, TargetNorm)
        shapes = {"weight": (target.size,)}
        if target.has_bias:
            shapes["bias"] = (target.size,)
    for part in sorted(shapes.keys() | tensors.keys()):
        if part not in shapes:
            text = f"tensor {tensors[part]!r} would not be used: {name!r} has no bias"
            saved.findings.append(mismatch(text))
        elif part not in tensors:
            text = f"the file has no {part} of {name!r}, which is saved whole"
            saved.findings.append(damaged(text, "the file is incomplete: save it again"))
        elif (found := headers[tensors[part]].shape) != shapes[part]:
            text = f"{name!r}: the saved {part} is {list(found)}, the model's {list(shapes[part])}"
            saved.findings.append(mismatch(text))


def _token_rows(
    tuner: TunerType[Any], config: TunerConfig, base: BaseFacts, rule: NameRule
) -> dict[str, tuple[int, ...]]:
    aliases = {rule.to_adapter(name): name for name in (*base.embeddings, *base.layers)}
    rows = tuner.token_rows(config, base, aliases)
    head = base.output_embedding
    if base.tied_head and head in rows and rows[head] == rows.get(base.input_embedding or ""):
        # One set of rows for both; PEFT keeps it at the embedding.
        del rows[head]
    return rows


def _check_tokens(
    saved: SavedParts,
    base: BaseFacts,
    headers: Mapping[str, TensorHeader],
    rows: Mapping[str, tuple[int, ...]],
    targeted: Collection[str],
) -> None:
    missing = [name for name in rows if name not in saved.tokens]
    if missing:
        text = f"the config trains tokens for which the file has no rows: {listing(missing)}"
        saved.findings.append(mismatch(text))
    rows = dict(rows)
    if base.tied_head and base.output_embedding and base.input_embedding in rows:
        # PEFT writes the rows a second time, under the name of the head.
        rows.setdefault(base.output_embedding, rows[base.input_embedding])
    tables = {**base.embeddings, **base.layers}
    for name, found in saved.tokens.items():
        target = tables.get(name)
        if name not in rows or target is None:
            text = f"rows of tokens that the config does not name: {listing([found.tensor])}"
            saved.findings.append(mismatch(text))
            continue
        if target.refusal is not None:
            text = f"module {name!r} cannot take rows of tokens: {target.refusal}"
            saved.findings.append(unsupported(text, "train the adapter without these tokens"))
        if name in saved.whole or name in targeted:
            text = f"{name!r} has trained tokens and another adapter as well"
            saved.findings.append(unsupported(text, "train it in one way"))
        _check_rows(saved, target, found, headers)


def _check_rows(
    saved: SavedParts,
    target: TargetEmbedding | TargetLayer,
    rows: TokenRows,
    headers: Mapping[str, TensorHeader],
) -> None:
    is_table = isinstance(target, TargetEmbedding)
    size, columns = (
        (target.num_embeddings, target.embedding_dim)
        if is_table
        else (target.out_features, target.in_features)
    )
    beyond = sorted(token for token in rows.ids if token >= size)
    if beyond:
        text = f"{target.name!r}: trained tokens {beyond[:10]}, but the model has {size}"
        saved.findings.append(mismatch(text))
    if len(set(rows.ids)) != len(rows.ids):
        text = f"{target.name!r}: a trained token is named twice"
        saved.findings.append(damaged(text, "restore adapter_config.json as PEFT wrote it"))
    found, expected = headers[rows.tensor].shape, (len(rows.ids), columns)
    if found != expected:
        text = f"{target.name!r}: the rows of tokens are {list(found)}, not {list(expected)}"
        saved.findings.append(mismatch(text))


def _tie(saved: SavedParts, base: BaseFacts, targeted: Collection[str]) -> None:
    """A head that shares the embedding's weight has the trained rows too, as in PEFT."""
    head, rows = base.output_embedding, saved.tokens.get(base.input_embedding or "")
    if head is None or rows is None or head in saved.tokens:
        return
    if head in targeted or head in saved.whole:
        text = f"the tied head {head!r} has trained tokens and another adapter as well"
        saved.findings.append(unsupported(text, "train it in one way"))
    refusal = base.layers[head].refusal if head in base.layers else "it is no linear"
    if refusal is not None:
        text = f"the head {head!r}, tied to the trained tokens, cannot take a branch: {refusal}"
        saved.findings.append(unsupported(text, "train the adapter without these tokens"))
    saved.tokens[head] = replace(rows)

"""What each linear and each expert of a checkpoint is, before a tensor is read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from transformers import PreTrainedModel

from ..core.errors import CheckpointError
from ..linear.checkpoint import CheckpointQuant, ResolvedQuant, TensorHeader
from ..linear.checkpoint.describe import check_shapes
from ..linear.checkpoint.experts import halves_scheme
from ..linear.weights import LinearModule, kind_refusal, linear_shape
from .checkpoint_names import CheckpointNames, checkpoint_names, tied_weight
from .folder import some
from .stored_experts import StoredExperts, as_linears, find_stored_experts

_ONE = "quantise all experts of a layer by one scheme"
_LIST = "serve a checkpoint that quantises all experts of a layer, or none"


@dataclass(frozen=True)
class StoredModel:
    """A quantised checkpoint, and the model that is made of it.

    Attributes:
        linears: name in the model -> name in the checkpoint, of quantised linears.
        experts: quantised experts by name in the model.
        resolved: what each linear is, those of single experts included.
        headers: dtype and shape of every tensor, by the name that `resolved` knows it by.
        in_files: full name in the files, of tensors that `resolved` knows by another.
    """

    linears: Mapping[str, str]
    experts: Mapping[str, StoredExperts]
    resolved: ResolvedQuant
    headers: Mapping[str, TensorHeader]
    in_files: Mapping[str, str]

    @classmethod
    def read(
        cls,
        model: PreTrainedModel,
        metadata: CheckpointQuant,
        headers: Mapping[str, TensorHeader],
    ) -> StoredModel:
        """Match metadata, headers and model.

        Args:
            model: on the meta device, not quantised.
            metadata: of the checkpoint.
            headers: dtype and shape of every tensor in its files.

        Raises:
            CheckpointError: they contradict each other, or something is quantised that is not
                served.
            ScaleError: weight scales of another shape than the scheme's.
        """
        names = checkpoint_names(model, headers)
        passed_over = _passed_over(model, names, headers)
        headers = {name: header for name, header in headers.items() if name not in passed_over}
        experts, reasons = find_stored_experts(model, names, headers)
        headers, in_files = as_linears(experts.values(), headers)
        linears = stored_linears(model, names)
        singles = [linear for stored in experts.values() for linear in stored.linears]
        resolved = metadata.resolve([*linears, *singles], headers, _modules(names, experts))
        chosen = {
            name: stored for name, stored in experts.items() if _is_quantized(stored, resolved)
        }
        in_model = names.in_model()
        single = set(singles)
        found = {in_model[s]: s for s in resolved.schemes if s not in single}
        for name in found:
            refuse_tied(model, name)
        shapes = {s: _shape(model, name) for name, s in found.items()}
        for stored in chosen.values():
            shapes |= stored.shapes()
        check_shapes(resolved, headers, shapes)
        _check_stacked(chosen, headers)
        _refuse_strays(names, chosen, model.base_model_prefix)
        _refuse_biases(chosen, headers)
        refuse_leftovers(headers, resolved, reasons)
        if passed_over:
            note = f"the model has no place for {len(passed_over)} tensors: {some(passed_over)}"
            resolved = replace(resolved, decisions=(*resolved.decisions, note))
        return cls(found, chosen, resolved, headers, in_files)


def stored_linears(model: PreTrainedModel, names: CheckpointNames) -> list[str]:
    """The model's linears as the checkpoint names them; those that it has not, by their own names.

    Linears whose weights transformers merges or splits have no name in the checkpoint.
    """
    return [
        names.stored.get(name, name)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and kind_refusal(module) is None
        and name not in names.converted
    ]


def _passed_over(
    model: PreTrainedModel, names: CheckpointNames, headers: Mapping[str, TensorHeader]
) -> set[str]:
    """Tensors that the model's own class leaves out, such as those of layers that only predict."""
    patterns = [re.compile(text) for text in model._keys_to_ignore_on_load_unexpected or ()]
    if not patterns:
        return set()
    placed = set(names.whole.values())
    return {
        name
        for name in headers
        if name.rpartition(".")[0] in names.unplaced
        and name not in placed
        and any(pattern.search(name) for pattern in patterns)
    }


def _modules(
    names: CheckpointNames, experts: Mapping[str, StoredExperts]
) -> dict[str, tuple[str, ...]]:
    """What lists may name beside linears: routers and norms, and experts as one module."""
    found: dict[str, tuple[str, ...]] = dict.fromkeys(names.stored.values(), ())
    for stored in experts.values():
        found[stored.place] = found[stored.name] = stored.linears
    return found


def _is_quantized(stored: StoredExperts, resolved: ResolvedQuant) -> bool:
    """Whether experts are quantised.

    Raises:
        CheckpointError: some of their linears are, and some are not.
    """
    left = [linear for linear in stored.linears if linear not in resolved.schemes]
    if not left:
        _check_schemes(stored, resolved)
    elif len(left) < len(stored.linears):
        raise CheckpointError(
            f"experts {stored.name}",
            f"are quantised in part: {len(left)} of {len(stored.linears)} linears are not "
            f"({some(left)})",
            _LIST,
        )
    return not left


def _check_schemes(stored: StoredExperts, resolved: ResolvedQuant) -> None:
    """Refuse experts that no one scheme holds.

    Raises:
        CheckpointError: experts of one projection have several.
    """
    for name, projection in stored.projections.items():
        subject = f"{stored.name}.{name}"
        firsts = []
        for half in projection.halves:
            schemes = {linear: resolved.schemes[linear] for linear in half}
            first = schemes[half[0]]
            others = [linear for linear, scheme in schemes.items() if scheme != first]
            if others:
                reason = f"{half[0]} is {first}, but {some(others)} {schemes[others[0]]}"
                raise CheckpointError(subject, f"has experts of several schemes: {reason}", _ONE)
            firsts.append(first)
        if len({scheme.input for scheme in firsts}) > 1:
            told = " and ".join(map(str, firsts))
            raise CheckpointError(subject, f"its gates and ups are {told}", _ONE)
        halves_scheme([scheme.weight for scheme in firsts], projection.shape[0], subject)


def _check_stacked(
    experts: Mapping[str, StoredExperts], headers: Mapping[str, TensorHeader]
) -> None:
    for stored in experts.values():
        for name, projection in stored.projections.items():
            if not projection.stacked:
                continue
            ((linear,),) = projection.halves
            found, wanted = headers[f"{linear}.weight"].shape, stored.form.shape(name)
            if found != wanted:
                reason = f"its weight has shape {found}, the model's takes {wanted}"
                raise CheckpointError(linear, reason, "use the checkpoint of this model")


def _shape(model: PreTrainedModel, name: str) -> tuple[int, int]:
    module = model.get_submodule(name)
    assert isinstance(module, LinearModule)
    return linear_shape(module)


def _refuse_strays(
    names: CheckpointNames, experts: Mapping[str, StoredExperts], prefix: str
) -> None:
    """Refuse what lies among quantised experts and belongs to none of them.

    Raises:
        CheckpointError: there is such a module in the checkpoint.
    """
    known = {stored.place for stored in experts.values()}
    for name in experts:
        starts = (f"{name}.", f"{name.removeprefix(f'{prefix}.')}.")
        stray = [
            module
            for module, renamed in names.unplaced.items()
            if renamed.startswith(starts) and module not in known
        ]
        if stray:
            reason = f"holds tensors of {some(stray)}, which the model's experts do not have"
            raise CheckpointError(f"experts {name}", reason, "remove them, or use another model")


def _refuse_biases(
    experts: Mapping[str, StoredExperts], headers: Mapping[str, TensorHeader]
) -> None:
    biased = [
        linear
        for stored in experts.values()
        for linear in stored.linears
        if f"{linear}.bias" in headers
    ]
    if biased:
        raise CheckpointError(
            some(biased),
            "has a bias of its own, which experts of this model do not take from there",
            "use the checkpoint of this model",
        )


def refuse_tied(model: PreTrainedModel, name: str) -> None:
    """Refuse a quantised linear of the model that shares its weight.

    Raises:
        CheckpointError: the config ties it.
    """
    other = tied_weight(model, name)
    if other is not None:
        raise CheckpointError(
            name,
            f"is quantised, but the config ties its weight to {other}",
            "set tie_word_embeddings to false if the checkpoint has both",
        )


def refuse_leftovers(
    headers: Mapping[str, TensorHeader],
    resolved: ResolvedQuant,
    experts: Mapping[str, str],
) -> None:
    """Refuse codes that no linear takes: transformers would cast them to the model's dtype.

    Args:
        headers: of all tensors.
        resolved: what each linear is.
        experts: why those of the model are not understood, by name.

    Raises:
        CheckpointError: there are such tensors.
    """
    used = {full for stored in resolved.schemes for full in resolved.tensor_names(stored)}
    left = [n for n, header in headers.items() if is_codes(n, header) and n not in used]
    if left:
        why = "; ".join(f"{name}: {reason}" for name, reason in list(experts.items())[:1])
        raise CheckpointError(
            some(left),
            "holds codes, but belongs to no linear of the model that is read as quantised"
            + (f" ({why})" if why else ""),
            "pass a checkpoint whose linears alone are quantised, one by one",
        )


def is_codes(name: str, header: TensorHeader) -> bool:
    """Whether a tensor holds, or must be taken to hold, quantised values."""
    if header.dtype.is_floating_point:
        return header.dtype.itemsize < 2
    return header.dtype in (torch.int8, torch.uint8) and name.endswith(".weight")


def with_notes(resolved: ResolvedQuant, notes: Sequence[str]) -> ResolvedQuant:
    """`resolved` with more decisions."""
    return replace(resolved, decisions=tuple(dict.fromkeys((*resolved.decisions, *notes))))

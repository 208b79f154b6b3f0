"""Where a checkpoint keeps experts: a linear for each, or one tensor for all of a projection."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel
from transformers.core_model_loading import Concatenate, MergeModulelist

from ..core.errors import CheckpointError
from ..linear.checkpoint import TensorHeader
from ..linear.checkpoint.layer import is_float
from ..linear.experts.find import find_experts
from ..linear.experts.form import ExpertsForm
from .checkpoint_names import CheckpointNames, MergedWeight
from .folder import some

_RESTORE = "restore the checkpoint's files"
#: Of a tensor that holds all experts: what may follow the projection's name, and what a linear's
#: tensor of that meaning is called.
_STACKED_PARTS = {
    "": "weight",
    "_scale_inv": "weight_scale_inv",
    "_scale": "weight_scale",
    "_activation_scale": "activation_scale",
    "_input_scale": "input_scale",
}


@dataclass(frozen=True)
class StoredProjection:
    """Where one projection of all experts lies.

    Attributes:
        halves: names of linears, those of gates before those of ups; each half has the linear of
            every expert, or, `stacked`, one name for all experts.
        shape: (N, K) of each of these linears.
        stacked: the tensors have a first dimension, of experts.
        gated: of a stacked one, its channels are gates and then ups.
    """

    halves: tuple[tuple[str, ...], ...]
    shape: tuple[int, int]
    stacked: bool = False
    gated: bool = False


@dataclass(frozen=True)
class StoredExperts:
    """Where a checkpoint keeps the experts of one module.

    Attributes:
        name: of the module in the model.
        place: of the module in the checkpoint.
        form: how they compute.
        projections: by name.
    """

    name: str
    place: str
    form: ExpertsForm
    projections: Mapping[str, StoredProjection]

    @property
    def linears(self) -> tuple[str, ...]:
        """All names of linears, as metadata knows them."""
        return tuple(
            linear
            for projection in self.projections.values()
            for half in projection.halves
            for linear in half
        )

    def shapes(self) -> dict[str, tuple[int, int]]:
        """(N, K) of the linears that are an expert's own."""
        return {
            linear: projection.shape
            for projection in self.projections.values()
            if not projection.stacked
            for half in projection.halves
            for linear in half
        }


def find_stored_experts(
    model: PreTrainedModel, names: CheckpointNames, headers: Mapping[str, TensorHeader]
) -> tuple[dict[str, StoredExperts], dict[str, str]]:
    """The experts of a checkpoint that a list of linears can speak of, by name in the model.

    Args:
        model: on the meta device, not quantised.
        names: of the same checkpoint.
        headers: of all tensors.

    Returns:
        the experts, and for others the reason why their layout is not understood.

    Raises:
        CheckpointError: experts that are missing, too many, or stored in several ways.
    """
    found, reasons = find_experts(model)
    known: dict[str, StoredExperts] = {}
    parts: dict[str, dict[str, TensorHeader]] = {}
    for full, header in headers.items() if found else ():
        module, _, part = full.rpartition(".")
        parts.setdefault(module, {})[part] = header
    for name, experts in found.items():
        layout = _layout(name, experts.form, names, headers)
        if isinstance(layout, str):
            reasons[name] = layout
        elif layout is not None:
            for projection in layout.projections.values():
                for half in projection.halves:
                    _check_alike(name, {linear: parts.get(linear, {}) for linear in half})
            known[name] = layout
    return known, reasons


def as_linears(
    experts: Iterable[StoredExperts], headers: Mapping[str, TensorHeader]
) -> tuple[dict[str, TensorHeader], dict[str, str]]:
    """The headers as if tensors that hold all experts were linears' tensors.

    Returns:
        headers by full name, and the full name in the files of each that has another there.
    """
    seen, renamed = dict(headers), {}
    for stored in experts:
        for projection in stored.projections.values():
            for linear in (half[0] for half in projection.halves if projection.stacked):
                for suffix, part in _STACKED_PARTS.items():
                    if linear + suffix in headers:
                        seen[f"{linear}.{part}"] = seen.pop(linear + suffix)
                        renamed[f"{linear}.{part}"] = linear + suffix
    return seen, renamed


def _layout(
    name: str, form: ExpertsForm, names: CheckpointNames, headers: Mapping[str, TensorHeader]
) -> StoredExperts | str | None:
    """None where the checkpoint has no such experts, or all of a module's as floats."""
    projections: dict[str, StoredProjection] = {}
    places = set()
    for projection in (form.up_name, form.down_name):
        full = f"{name}.{projection}"
        if full in names.whole:
            key = names.whole[full]
            if is_float(headers[key].dtype):
                return None
            if form.interleaved or form.transposed:
                return "its experts lie in one tensor, in an order of the model's own"
            _, rows, columns = form.shape(projection)
            gated = form.gated and projection == form.up_name
            stacked = StoredProjection(((key,),), (rows, columns), stacked=True, gated=gated)
            projections[projection] = stacked
            places.add(key.rpartition(".")[0])
        elif full in names.merged:
            merged = _merged(full, form, names.merged[full])
            if isinstance(merged, str):
                return merged
            projections[projection], place = merged
            places.add(place)
        else:
            return None
    if len(places) > 1:
        return f"its experts lie in {some(places)}"
    return StoredExperts(name, places.pop(), form, projections)


def _merged(
    full: str, form: ExpertsForm, merged: MergedWeight
) -> tuple[StoredProjection, str] | str:
    """Where the linears lie that transformers stacks, and below which module."""
    projection = full.rpartition(".")[2]
    kinds = [type(operation) for operation in merged.operations]
    dims = [getattr(operation, "dim", None) for operation in merged.operations]
    two = len(merged.sources) == 2
    wanted = ([MergeModulelist, Concatenate], [0, 1]) if two else ([MergeModulelist], [0])
    fits = (kinds, dims) == wanted and len(merged.sources) <= 1 + form.gated
    if not fits or form.interleaved or form.transposed:
        made = ", ".join(kind.__name__ for kind in kinds)
        return f"transformers makes its {projection} of {len(merged.sources)} lists by {made}"
    experts, rows, columns = form.shape(projection)
    halves = []
    places = set()
    for linears in merged.sources.values():
        half, place = _numbered(full, linears, experts)
        halves.append(half)
        places.add(place)
    if len(places) > 1:
        return f"its experts lie in {some(places)}"
    shape = (rows // len(halves), columns)
    return StoredProjection(tuple(halves), shape), places.pop()


def _numbered(full: str, linears: Sequence[str], experts: int) -> tuple[tuple[str, ...], str]:
    """The linears of one half by number of their expert, and the module that they lie in.

    Raises:
        CheckpointError: they are not those of experts 0, 1, ... and no others.
    """
    paths = [linear.split(".") for linear in linears]
    places = [
        place
        for place in range(min(map(len, paths), default=0))
        if all(path[place].isdecimal() for path in paths)
    ]
    varying = [place for place in places if len({path[place] for path in paths}) == len(paths)]
    # Of a single expert every number might be its own: the last one is.
    at = varying[-1] if varying else None
    by_number = {} if at is None else {int(path[at]): ".".join(path) for path in paths}
    missing = sorted(set(range(experts)) - by_number.keys())
    beyond = sorted(by_number.keys() - set(range(experts)))
    if at is None or missing or beyond:
        what = [f"lacks experts {_numbers(missing)}"] if missing else []
        what += [f"has experts {_numbers(beyond)}"] if beyond else []
        reason = f"{' and '.join(what) or 'has linears that carry no number'} of {experts}"
        kind = f" ({linears[0].rpartition('.')[2]})" if linears else ""
        raise CheckpointError(full, f"the checkpoint {reason}{kind}", _RESTORE)
    place = ".".join(paths[0][:at])
    return tuple(by_number[number] for number in range(experts)), place


def _numbers(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return f"{shown} and {len(numbers) - 8} more" if len(numbers) > 8 else shown


def _check_alike(name: str, half: Mapping[str, Mapping[str, TensorHeader]]) -> None:
    """Refuse experts of one half that differ in tensors, dtypes or shapes, by name.

    Raises:
        CheckpointError: some of them do.
    """
    kinds = {linear: _kind(parts) for linear, parts in half.items()}
    (usual, count), *_ = Counter(kinds.values()).most_common()
    others = [linear for linear, kind in kinds.items() if kind != usual]
    if others:
        raise CheckpointError(
            f"experts {name}",
            f"are not stored alike: {count} have {usual}, but {some(others)} "
            f"{'has' if len(others) == 1 else 'have'} {kinds[others[0]]}",
            "quantise all experts of a layer alike, or restore the checkpoint's files",
        )


def _kind(parts: Mapping[str, TensorHeader]) -> str:
    texts = []
    for part, (dtype, shape) in sorted(parts.items()):
        size = "x".join(map(str, shape))
        texts.append(f"{part} {str(dtype).removeprefix('torch.')}{f' {size}' if size else ''}")
    return " and ".join(texts) or "no tensors"

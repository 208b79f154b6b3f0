"""Experts while a checkpoint is loaded: transformers fills the rest of the module, we the codes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from ..core.errors import CheckpointError
from ..core.scheme import LinearScheme
from ..linear.checkpoint import ResolvedQuant
from ..linear.checkpoint.experts import common_contract, halves_scheme, stack_halves
from ..linear.contract import InputContract
from ..linear.experts.find import stored_bias
from ..linear.experts.quantized import QuantizedExperts
from ..linear.experts.weight import ExpertsWeight
from ..linear.quantized_weight import QuantizedWeight
from .stored_experts import StoredExperts, StoredProjection

_Half = tuple[QuantizedWeight, InputContract]


class PendingExperts(nn.Module):
    """Quantised experts while transformers loads: all that the model's module has but weights.

    Args:
        original: the model's own module, on the meta device.
        stored: where its experts lie.
    """

    def __init__(self, original: nn.Module, stored: StoredExperts) -> None:
        super().__init__()
        # In a tuple, so that its parameters do not become this one's.
        self._original = (original,)
        weights = {stored.form.up_name, stored.form.down_name}
        own = (name for name, _ in original.named_parameters(recurse=False))
        self._kept = tuple(name for name in own if name not in weights)
        for name in self._kept:
            self.register_parameter(name, getattr(original, name))
        for name, child in original.named_children():
            self.add_module(name, child)

    def original(self) -> nn.Module:
        """The model's own module, with what was loaded; its weights stay on the meta device."""
        (original,) = self._original
        for name in self._kept:
            setattr(original, name, getattr(self, name))
        return original


class ExpertsReader:
    """Reads quantised experts from files: one module at a time, each tensor once.

    Args:
        files: of the checkpoint.
        resolved: what each linear is.
        in_files: full names in the files, of tensors that `resolved` knows by others.

    Attributes:
        notes: what was decided, and of how many modules.
    """

    def __init__(
        self, files: Iterable[Path], resolved: ResolvedQuant, in_files: Mapping[str, str]
    ) -> None:
        self._resolved = resolved
        self._in_files = in_files
        self._where: dict[str, Path] = {}
        for file in files:
            with safe_open(file, "pt") as opened:
                self._where |= dict.fromkeys(opened.keys(), file)
        self.notes: Counter[str] = Counter()

    def read(
        self,
        stored: StoredExperts,
        pending: PendingExperts,
        dtype: torch.dtype,
        device: torch.device,
    ) -> QuantizedExperts:
        """The experts of one module.

        Args:
            stored: where they lie.
            pending: with all that is no weight loaded.
            dtype: of the activations.
            device: where codes and scales shall lie.

        Raises:
            CheckpointError: codes or scales that do not fit each other.
            ScaleError: a scale that cannot be used.
        """
        form, original = stored.form, pending.original()
        weights, contracts, schemes, biases = {}, {}, {}, {}
        notes = set()
        with ExitStack() as opened:
            tensors = _Tensors(self._where, self._in_files, device, opened)
            for name, projection in stored.projections.items():
                made = _Projection(f"{stored.name}.{name}", projection, self._resolved, tensors)
                weights[name], contracts[name] = made.assemble(form.experts)
                schemes[name] = LinearScheme(weights[name].scheme, contracts[name].key)
                biases[name] = stored_bias(original, form, name)
                notes |= made.notes
        self.notes.update(notes)
        args = (weights, biases, schemes, contracts)
        experts = QuantizedExperts(stored.name, form, original, *args, dtype)
        return experts.train(pending.training)


class _Tensors:
    """Tensors of a checkpoint by the names that `ResolvedQuant` knows."""

    def __init__(
        self,
        where: Mapping[str, Path],
        in_files: Mapping[str, str],
        device: torch.device,
        opened: ExitStack,
    ) -> None:
        self._where, self._in_files = where, in_files
        self._device, self._opened = device, opened
        self._files: dict[Path, Any] = {}

    def named(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Copies: all tensors of a file share its mapping."""
        return {name: self._read(self._in_files.get(name, name)).clone() for name in names}

    def _read(self, name: str) -> torch.Tensor:
        file = self._where[name]
        if file not in self._files:
            opened = safe_open(file, "pt", device=str(self._device))
            self._files[file] = self._opened.enter_context(opened)
        return self._files[file].get_tensor(name)


class _Projection:
    """One projection on its way from linears of single experts to a weight of all."""

    def __init__(
        self, subject: str, stored: StoredProjection, resolved: ResolvedQuant, tensors: _Tensors
    ) -> None:
        self._subject, self._stored = subject, stored
        self._resolved, self._tensors = resolved, tensors
        self.notes: set[str] = set()

    def assemble(self, experts: int) -> tuple[ExpertsWeight, InputContract]:
        """Weight and contract of all experts."""
        made, contracts = [], []
        for halves in self._stacked(experts) if self._stored.stacked else self._singles(experts):
            weights = [weight for weight, _ in halves]
            contracts += [contract for _, contract in halves]
            schemes = [weight.scheme for weight in weights]
            scheme = halves_scheme(schemes, weights[0].out_features, self._subject)
            made.append(stack_halves(weights, scheme, self._subject))
            if any(before != scheme for before in schemes):
                before = " and ".join(dict.fromkeys(map(str, schemes)))
                self.notes.add(f"gates and ups of {before} are kept as {scheme}, to the bit")
        contract = common_contract(contracts, self._subject)
        if any(not contract.same_input(other) for other in contracts):
            self.notes.add("experts share the largest of their static input scales")
        return ExpertsWeight.of(made, self._subject), contract

    def _singles(self, experts: int) -> Iterator[list[_Half]]:
        """Gates and ups, or the whole, of one expert after the other."""
        for number in range(experts):
            halves = []
            for half in self._stored.halves:
                own = self._tensors.named(self._resolved.tensor_names(half[number]))
                halves.append(self._resolved.assemble(half[number], own, self._stored.shape))
            yield halves

    def _stacked(self, experts: int) -> Iterator[list[_Half]]:
        """The same where one tensor holds all experts."""
        ((linear,),) = self._stored.halves
        whole = self._tensors.named(self._resolved.tensor_names(linear))
        for name, tensor in whole.items():
            if tensor.dim() == 0 or tensor.shape[0] != experts:
                reason = f"{name} has shape {tuple(tensor.shape)}, expected {experts} experts first"
                raise CheckpointError(self._subject, reason, "use the checkpoint of this model")
        rows, columns = self._stored.shape
        count = self._grids(linear, whole)
        for number in range(experts):
            own = {name: tensor[number] for name, tensor in whole.items()}
            pieces = [
                {n: t if t.numel() == 1 else t.chunk(count)[half] for n, t in own.items()}
                for half in range(count)
            ]
            shape = (rows // count, columns)
            yield [self._resolved.assemble(linear, piece, shape) for piece in pieces]

    def _grids(self, linear: str, whole: Mapping[str, torch.Tensor]) -> int:
        """Whether the scales of gates and ups are two grids, one below the other, or one.

        Raises:
            CheckpointError: their shape fits both, which are not the same.
        """
        layer = self._resolved.layers[linear]
        scheme, (channels, columns) = layer.scheme.weight, self._stored.shape
        if not self._stored.gated or scheme.rows == 1:
            return 1
        scale = whole[f"{linear}.{layer.stored.scale[0]}"]
        found = scale.shape[1] if scale.dim() > 1 else 1
        one = scheme.scale_shape(channels, columns)[0]
        two = 2 * scheme.scale_shape(channels // 2, columns)[0]
        if one != two:
            return 2 if found == two else 1
        if channels // 2 % scheme.rows:
            reason = (
                f"its scales have {found} rows: blocks of {scheme.rows} channels may begin anew "
                f"with the ups or not, which differs for {channels // 2} gates"
            )
            raise CheckpointError(self._subject, reason, "store linears of single experts")
        return 1

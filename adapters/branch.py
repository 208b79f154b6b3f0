"""What all adapters in slots do to one linear: each part's stack, and how the parts add up."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from ..core.errors import AdapterUnsupportedError
from ..core.magnitude import magnitudes
from ..linear.branching import BranchInput, BranchRows
from ..linear.outputs import Shrink
from ..linear.parts import Part
from ..linear.registry import Holder
from ..linear.shrink import shrink
from .by_slot import dense_product, rotated
from .low_rank import LowRankSlots
from .slots import SlotClasses
from .together import JointProduct
from .weights import (
    AdapterWeights,
    AnyWeights,
    ExpertsWeights,
    LayerWeights,
    LowRank,
    NormWeights,
    RotationFactor,
)


class LayerBranch:
    """The branch of one linear; the stacks of a part exist from the first adapter on that has it.

    Low-rank matrices, gains, shifts and input scales lie in stacks, one row a slot, at addresses
    that never change once they exist.  Rotations and dense weights are kept slot by slot and
    multiplied request by request, so that a row's bytes depend on its own request alone.

    A branch reads raw rows in place (`compact_raw`): those it has no slot for cost it nothing.

    Args:
        name: of the linear, for messages.
        slots: of the model.
        in_features: K.
        out_features: N.
        dtype: of the matrices; gain, shift and scales of the input are float32.
        device: of the stacks.
    """

    compact_raw = False

    def __init__(
        self,
        name: str,
        slots: SlotClasses,
        in_features: int,
        out_features: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.name = name
        self._slots = slots
        self._sizes = (in_features, out_features)
        self._dtype = dtype
        self._device = device
        # Slots may be written by several threads: each part's stack is made once.
        self._making = threading.Lock()
        self._low_rank: LowRankSlots | None = None
        self._vectors: dict[Part, torch.Tensor] = {}
        # By slot: a product alone, and a product with or without other parts.
        self._plain = torch.zeros(len(slots), dtype=torch.bool, device=device)
        self._shrinks = torch.zeros(len(slots), dtype=torch.bool, device=device)
        self._marks: dict[int, tuple[bool, bool]] = {}
        self._rotations: dict[int, tuple[RotationFactor, ...]] = {}
        self._output_rotations: dict[int, tuple[RotationFactor, ...]] = {}
        self._deltas: dict[int, torch.Tensor] = {}
        self._weights: dict[int, torch.Tensor] = {}

    # --- slots ----------------------------------------------------------------------------------

    @property
    def low_rank(self) -> LowRankSlots:
        """The stacks of the low-rank matrices, made when they are first asked for."""
        with self._making:
            if self._low_rank is None:
                self._low_rank = LowRankSlots(
                    self.name, self._slots, *self._sizes, self._dtype, self._device
                )
            return self._low_rank

    @property
    def product(self) -> LowRankSlots | None:
        """The stacks of the low-rank matrices, if an adapter has needed them."""
        return self._low_rank

    @property
    def nbytes(self) -> int:
        """Device memory of all parts."""
        tensors = [*self._vectors.values(), *self._deltas.values(), *self._weights.values()]
        rotations = (*self._rotations.values(), *self._output_rotations.values())
        tensors += [factor.blocks for factors in rotations for factor in factors]
        stacks = 0 if self._low_rank is None else self._low_rank.nbytes
        return stacks + sum(tensor.nbytes for tensor in tensors)

    def write(self, slot: int, weights: LayerWeights) -> None:
        """Fill a slot; nothing of what was there before is left."""
        if weights.low_rank is None:
            self.clear(slot)
            self._mark(slot, plain=False, shrinks=False)
        else:
            # Writing matrices overwrites what was there.
            self._clear_others(slot)
            self.low_rank.write(slot, weights.low_rank)
            self._mark(slot, plain=weights.parts == Part.PLAIN, shrinks=True)
        for part, vector in (
            (Part.GAIN, weights.gain),
            (Part.SHIFT, weights.shift),
            (Part.IN_SCALE, weights.in_scale),
        ):
            if vector is not None:
                self._stack(part)[slot].copy_(vector)
        for rotations, factors in (
            (self._rotations, weights.rotation),
            (self._output_rotations, weights.output_rotation),
        ):
            if factors:
                rotations[slot] = tuple(self._placed(factor) for factor in factors)
        for kept, matrix in ((self._deltas, weights.delta), (self._weights, weights.weight)):
            if matrix is not None:
                kept[slot] = matrix.to(self._device, self._dtype, copy=True)

    def clear(self, slot: int) -> None:
        """Empty a slot."""
        if self._low_rank is not None:
            self._low_rank.clear(slot)
        self._clear_others(slot)

    def _mark(self, slot: int, *, plain: bool, shrinks: bool) -> None:
        marks = plain, shrinks
        # Asked of a device, this would wait for it.
        if self._marks.get(slot) != marks:
            self._plain[slot], self._shrinks[slot] = marks
            self._marks[slot] = marks

    def _clear_others(self, slot: int) -> None:
        for part, stack in tuple(self._vectors.items()):
            stack[slot] = _NEUTRAL[part]
        for kept in (self._rotations, self._output_rotations, self._deltas, self._weights):
            kept.pop(slot, None)

    def _stack(self, part: Part) -> torch.Tensor:
        with self._making:
            if part not in self._vectors:
                columns = self._sizes[0 if part == Part.IN_SCALE else 1]
                shape, neutral = (len(self._slots), columns), _NEUTRAL[part]
                self._vectors[part] = torch.full(shape, neutral, device=self._device)
            return self._vectors[part]

    def _placed(self, factor: RotationFactor) -> RotationFactor:
        order = None if factor.order is None else factor.order.to(self._device, copy=True)
        return RotationFactor(factor.blocks.to(self._device, torch.float32, copy=True), order)

    # --- forward --------------------------------------------------------------------------------

    def shrink_request(self, slots: torch.Tensor, rank: int) -> Shrink:
        """What shrinks the raw activation for rows of `slots` (int32 (R,), -1 for none)."""
        return self.low_rank.shrink_request(slots, rank)

    @staticmethod
    def join(branches: Sequence[LayerBranch], rows: Sequence[BranchRows]) -> JointProduct:
        """What adds the plain products of several linears that read one tensor."""
        return JointProduct([branch.low_rank for branch in branches], [own.slots for own in rows])

    def change_input(self, x: BranchInput, rows: BranchRows) -> torch.Tensor:
        """What the base is fed: each row times its slot's scale, then rotated; rounded once.

        Args:
            x: the layer's input, (..., K), raw.
            rows: the batch's.

        Returns:
            (..., K) in the dtype of the input; rows whose adapter changes nothing keep their bytes.

        Raises:
            RawConsumerError: there are only codes, or only some raw rows.
        """
        raw = x.every_row()
        by_request = raw.reshape(rows.slots.shape[0], -1, raw.shape[-1])
        changed = by_request.to(torch.float32, copy=True)
        if rows.parts & Part.IN_SCALE:
            index = rows.slots.clamp(min=0)
            changed *= self._vectors[Part.IN_SCALE][index].unsqueeze(1)
        if rows.parts & Part.ROTATION:
            # Autocast would round products to half precision.
            with torch.autocast(raw.device.type, enabled=False):
                for row, slot in rows.of(self._rotations):
                    given = changed[row]
                    turned = rotated(given.flatten(0, -2), self._rotations[slot])
                    changed[row] = turned.view(given.shape)
        taken = (rows.slots >= 0).view(-1, 1, 1)
        return torch.where(taken, changed.to(raw.dtype), by_request).view(raw.shape)

    def add(self, out: torch.Tensor, x: BranchInput, rows: BranchRows) -> torch.Tensor:
        """The branch of each row that has one.

        Args:
            out: (M, N), the base output.
            x: the layer's input, (M, K): raw, or shrunk by its producer.
            rows: the batch's; the M rows belong to its R requests in turn.

        Returns:
            (M, N) in the dtype of `out`: float32 accumulation, one rounding.

        Raises:
            RawConsumerError: a part reads the raw activation, and there are only codes.
        """
        out = self._add_alone(out, x, rows)
        return self._mix(out, x, rows) if rows.batch.mixed else out

    def _add_alone(self, out: torch.Tensor, x: BranchInput, rows: BranchRows) -> torch.Tensor:
        if rows.parts == Part.PLAIN:
            return self.low_rank.add(out, x, rows.slots)
        # Autocast would round products to half precision.
        with torch.autocast(out.device.type, enabled=False):
            if not rows.parts & Part.PLAIN:
                return self._combine(out, x, rows, rows.slots)
            # A product alone is added by the same code whoever its neighbours are.
            plain = self._plain[rows.slots.clamp(min=0)]
            out = self.low_rank.add(out, x, torch.where(plain, rows.slots, -1))
            return self._combine(out, x, rows, torch.where(plain, -1, rows.slots))

    def _mix(self, out: torch.Tensor, x: BranchInput, rows: BranchRows) -> torch.Tensor:
        """Rows that take several adapters: their products' weighted sum, rounded once."""
        total = out.float()
        taken = torch.zeros_like(rows.slots, dtype=torch.bool)
        each = out.shape[0] // rows.slots.shape[0]
        with torch.autocast(out.device.type, enabled=False):
            for mixed in rows.batch.mixed:
                slots = mixed.slots[rows.index]
                product = self._product(x, slots)
                total = total + product * mixed.weights.repeat_interleave(each).unsqueeze(1)
                taken |= slots >= 0
        wide = taken.repeat_interleave(each).unsqueeze(1)
        return torch.where(wide, total.to(out.dtype), out)

    def _combine(
        self, out: torch.Tensor, x: BranchInput, rows: BranchRows, slots: torch.Tensor
    ) -> torch.Tensor:
        """All parts of the rows of `slots`, added up in float32; the others keep their bytes."""
        requests = slots.shape[0]
        base = out.view(requests, -1, out.shape[-1])
        total, index = base.float(), slots.clamp(min=0)
        if rows.parts & Part.WEIGHT:
            fed = x.values() if x.changed is None else x.changed
            total = self._replaced(total, fed, rows)
        if rows.parts & Part.GAIN:
            total = total * self._vectors[Part.GAIN][index].unsqueeze(1)
        if rows.parts & Part.OUTPUT_ROTATION:
            total = total.clone()
            for row, slot in rows.of(self._output_rotations):
                given = total[row]
                turned = rotated(given.flatten(0, -2), self._output_rotations[slot])
                total[row] = turned.view(given.shape)
        if rows.parts & Part.LOW_RANK:
            # Selected, not added as zeros: a zero would turn -0.0 into 0.0.
            wide = self._shrinks[index].view(-1, 1, 1)
            total = torch.where(wide, total + self._product(x, slots).view(total.shape), total)
        if rows.parts & Part.DELTA:
            total = self._with_deltas(total, x.values(), rows)
        if rows.parts & Part.SHIFT:
            total = total + self._vectors[Part.SHIFT][index].unsqueeze(1)
        taken = (slots >= 0).view(-1, 1, 1)
        return torch.where(taken, total.to(out.dtype), base).view(out.shape)

    def _product(self, x: BranchInput, slots: torch.Tensor) -> torch.Tensor:
        shrunk = x.shrunk()
        if shrunk is None:
            request = self.low_rank.shrink_request(slots, self._slots.width)
            shrunk = shrink(x.values(), request)
        return self.low_rank.expand(shrunk, slots)

    def _replaced(self, total: torch.Tensor, fed: torch.Tensor, rows: BranchRows) -> torch.Tensor:
        by_request = fed.reshape(total.shape[0], -1, fed.shape[-1])
        total = total.clone()
        for row, slot in rows.of(self._weights):
            product = dense_product(by_request[row].flatten(0, -2), self._weights[slot])
            total[row] = product.view(total[row].shape)
        return total

    def _with_deltas(
        self, total: torch.Tensor, raw: torch.Tensor, rows: BranchRows
    ) -> torch.Tensor:
        by_request = raw.reshape(total.shape[0], -1, raw.shape[-1])
        total = total.clone()
        for row, slot in rows.of(self._deltas):
            product = dense_product(by_request[row].flatten(0, -2), self._deltas[slot])
            total[row] += product.view(total[row].shape)
        return total


# What leaves a number as it is, to the sign of a zero.
_NEUTRAL = {Part.GAIN: 1.0, Part.IN_SCALE: 1.0, Part.SHIFT: -0.0}


def holder_of(weights: AnyWeights) -> Holder:
    """What the registry has to know of one adapter's parts in one place."""
    if isinstance(weights, LayerWeights | ExpertsWeights):
        return Holder(weights.parts, weights.shrink_rank)
    return Holder(Part.OWN)


def _product_of(parts: AnyWeights) -> LowRank | ExpertsWeights | None:
    if isinstance(parts, ExpertsWeights):
        return parts
    return None if isinstance(parts, NormWeights) else parts.low_rank


def check_range(name: str, weights: AdapterWeights, dtype: torch.dtype) -> None:
    """Refuse an adapter whose values the slots cannot hold.

    Args:
        name: of the adapter, for messages.
        weights: as read.
        dtype: of the slots.

    Raises:
        AdapterUnsupportedError: a scaling beyond float32, or a weight beyond `dtype`.
    """
    most = torch.finfo(dtype).max
    wide = [t for t in weights.tensors if t.is_floating_point() and torch.finfo(t.dtype).max > most]
    fits = all(torch.tensor(x).to(dtype).isfinite() for x in magnitudes(wide) if x > most)
    for place, parts in weights.modules.items():
        low_rank = _product_of(parts)
        if low_rank is not None and abs(low_rank.scaling) > torch.finfo(torch.float32).max:
            raise AdapterUnsupportedError(
                f"adapter '{name}'",
                f"the scaling {low_rank.scaling:g} of {place} is beyond float32",
                "correct lora_alpha in its config",
            )
        if fits:
            continue
        matrices = {"lora_A": low_rank.a, "lora_B": low_rank.b} if low_rank is not None else {}
        if isinstance(parts, LayerWeights):
            matrices |= {"delta": parts.delta, "weight": parts.weight}
        for what, matrix in matrices.items():
            if matrix is None or bool(matrix.to(dtype).isfinite().all()):
                continue
            raise AdapterUnsupportedError(
                f"adapter '{name}'",
                f"{what} of {place} holds values beyond the {dtype} of the slots",
                "wrap with lora_dtype='float32' (command line: --lora-dtype float32)",
            )

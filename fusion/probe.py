"""A site's planned route against its unfused one, on rows that are made up for it.

Nothing is counted, and no batch but the caller's own is touched: probes run beside a server.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from ..core.errors import BranchlineError
from ..core.oracle import ActivationSemantics
from ..core.quantized_activation import QuantizedActivation, RawOutput
from ..core.route import Route
from ..linear.batch import Batch
from ..linear.branching import BranchInput, BranchRows, RowLayout
from ..linear.experts.layer import ExpertsLinear
from ..linear.experts.pairs import Pairs
from ..linear.experts.rows import PairRows
from ..linear.outputs import RawRequest, Shrink
from ..linear.parts import READS_RAW
from ..linear.probing import probing
from ..linear.quantizers import quantize_input
from ..linear.routed import RoutedLayer, RoutedLinear
from ..linear.shrink import shrink
from .experts import ExpertsSite
from .producers.base import Emission
from .site import Site
from .verify.compare import Found, same_bits, within_rounding

#: What rows are in turn.  Zero rows meet the floor of dynamic scales, outliers their ceiling.
ROW_KINDS = ("usual", "outliers", "zero", "small")
_OUTLIER, _SMALL = 32.0, 2.0**-12
#: Every so many columns one is an outlier.
_OUTLIER_COLUMNS = 61
#: Powers of two that inputs of an activation are tried with.
_EXPONENTS = range(-8, 11)
#: The code of +-448 without its sign.
_LARGEST_E4M3 = 0x7E
#: How many experts each made-up token chooses, where there are as many.
_CHOICES = 2


@dataclass(frozen=True)
class Differing:
    """One output of a site that its routes do not agree on.

    Attributes:
        consumer: name of the linear that reads it.
        what: "codes", "scale", "raw rows", "shrunk rows", "output", or "error".
        found: how many elements, and the first.
    """

    consumer: str
    what: str
    found: Found


@dataclass(frozen=True)
class Probed:
    """The outcome of one probe.

    Attributes:
        differing: what the routes do not agree on; empty where they do.
        elements: compared.
        usual: FP8 codes of usual rows, of a batch of base rows alone.
        saturated: of them, those at the end of the range.
    """

    differing: tuple[Differing, ...]
    elements: int
    usual: int
    saturated: int


class ProbeRows:
    """Inputs for sites, the same for the same seed.

    Args:
        rows: of every request; their kinds are `ROW_KINDS` in turn.
        seed: of the random numbers.
    """

    def __init__(self, rows: int, seed: int) -> None:
        self.rows = rows
        self._seed = seed
        # Sites of one width share what is drawn: drawing takes longer than a kernel.
        self._drawn: dict[tuple[object, ...], torch.Tensor] = {}
        self._magnitudes: dict[int, float] = {}

    def inputs(self, site: Site, shape: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
        """What `site`, whose semantics are known, is handed.

        Args:
            site: of one activation, a pair (gate, up), or a norm.
            shape: of the activation without its last dimension; its rows are whole requests.

        Returns:
            as for `Producer.produce`, in the site's dtype on its device; all finite.
        """
        number = torch.Size(shape).numel()
        semantics = site.facts.semantics
        size = self._magnitude(site) if isinstance(semantics, ActivationSemantics) else 1.0
        drawn = (self._draw(site, number, place, size) for place in range(_activations(site)))
        return (*(x.view(*shape, -1) for x in drawn), *site.vectors())

    def _draw(self, site: Site, number: int, place: int, size: float) -> torch.Tensor:
        facts, device = site.facts, site.layers[0].device
        key = (number, facts.columns, place, size, facts.dtype, device)
        found = self._drawn.get(key)
        if found is None:
            rows = _with_kinds(self._normal(number, facts.columns, place), self.rows)
            found = self._drawn[key] = (rows * size).to(facts.dtype).to(device)
        return found

    def _normal(self, number: int, columns: int, place: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self._seed + place)
        return torch.randn(number, columns, generator=generator)

    def _magnitude(self, site: Site) -> float:
        """The largest power of two by which inputs stay in the calibrated range; 1 without one."""
        scale, key = site.contract.scale, site.contract.key
        if scale is None or key is None:
            return 1.0
        if site.index not in self._magnitudes:
            powers = torch.tensor([2.0**exponent for exponent in _EXPONENTS])
            tried = (
                self._normal(1, site.facts.columns, place) * powers[:, None]
                for place in range(_activations(site))
            )
            device = site.layers[0].device
            out = site.compute_raw(*(x.to(site.facts.dtype).to(device) for x in tried))
            largest = out.float().abs().amax(-1).cpu()
            fits = largest <= scale.number * torch.finfo(key.code_dtype).max
            self._magnitudes[site.index] = float(powers[fits].max()) if fits.any() else 1.0
        return self._magnitudes[site.index]


def _activations(site: Site) -> int:
    """How many of a site's inputs are activations: (gate, up), or one."""
    semantics = site.facts.semantics
    return 2 if isinstance(semantics, ActivationSemantics) and semantics.gated else 1


def _with_kinds(x: torch.Tensor, rows: int) -> torch.Tensor:
    kinds = torch.arange(x.shape[0]) % rows % len(ROW_KINDS)
    x[kinds == 1, ::_OUTLIER_COLUMNS] *= _OUTLIER
    x[kinds == 2] = 0.0
    x[kinds == 3] *= _SMALL
    return x


def probe_shape(site: Site, batch: Batch, rows: int) -> tuple[int, ...]:
    """Leading dimensions of an activation that holds `rows` rows of each request of `batch`.

    Args:
        site: whose linears say where a batch's rows lie.
        batch: of rows, of packed tokens (of which `rows` are a request's), or of base rows alone.
        rows: of each request.
    """
    if batch.rows is None:
        return (1, rows)
    if batch.packed:
        return (1, batch.rows)
    if site.layers[0].row_layout == RowLayout.FLAT:
        return (batch.rows * rows,)
    return (batch.rows, rows)


def probe_pairs(site: ExpertsSite, batch: Batch, rows: int) -> PairRows:
    """Pairs of tokens of `batch`, `rows` of each of its requests, and of all experts in turn."""
    (down,) = site.layers
    assert isinstance(down, ExpertsLinear)
    tokens = rows * (1 if batch.rows is None else batch.rows)
    if batch.packed:
        tokens = batch.rows or 0
    choices = torch.arange(min(_CHOICES, down.experts), device=down.device)
    token = torch.arange(tokens, device=down.device).unsqueeze(1)
    return PairRows(batch, Pairs.of((token + choices) % down.experts, down.experts))


def probe_site(site: Site, batch: Batch, rows: ProbeRows) -> Probed:
    """Run one site's planned route and its unfused one, and compare what each linear gets of them.

    Codes, scales, raw rows of adapters, and outputs: by their bits.  Absorbed shrunk rows too on a
    CPU; on a GPU, they and the outputs that they are added to agree to float32 rounding.  Outputs
    are the base linears' where `batch` is of base rows alone; else what branches make of one
    made-up base output, since codes that are equal have equal products.

    Args:
        site: its route in `batch` is not unfused.
        batch: entered by nobody.
        rows: what it is fed.
    """
    with torch.inference_mode(False), torch.no_grad(), probing():
        if isinstance(site, ExpertsSite):
            pairs = probe_pairs(site, batch, rows.rows)
            inputs = rows.inputs(site, (len(pairs.pairs),))
            # Parts of one tensor, as the first projection writes them.
            parts = torch.cat(inputs, -1).chunk(len(inputs), -1)
            return _Probe(site, batch, parts, pairs).run(rows.rows)
        inputs = rows.inputs(site, probe_shape(site, batch, rows.rows))
        return _Probe(site, batch, inputs).run(rows.rows)


@dataclass
class _Probe:
    site: Site
    batch: Batch
    inputs: tuple[torch.Tensor, ...]
    #: Of experts, whose rows are pairs.
    pairs: PairRows | None = None
    differing: list[Differing] = field(default_factory=list)
    elements: int = 0

    def run(self, rows: int) -> Probed:
        raw = self.site.compute_raw(*self.inputs)
        try:
            emission = self._emission()
            made, _ = self.site.make(self.batch, emission, self.inputs)
            for layer in self.site.layers:
                self._codes(layer, made, raw)
            self._raw_rows(emission, made.raw, raw)
            for request in emission.shrinks:
                self._shrunk(request, made, raw)
            if self.batch.rows is None:
                self._outputs(made, raw)
            else:
                self._branches(made, raw)
        except BranchlineError as error:
            # A request would have failed by it.
            found = Found(1, 1, (), f"{type(error).__name__}: {error}", "outputs")
            self._add(self.site.layers[0].name, "error", found)
            return Probed(tuple(self.differing), self.elements, 0, 0)
        # In other batches there are the same kinds of rows again.
        usual, saturated = _saturation(made, rows) if self.batch.rows is None else (0, 0)
        return Probed(tuple(self.differing), self.elements, usual, saturated)

    def _emission(self) -> Emission:
        if self.pairs is None:
            return self.site.emission(self.batch)
        assert isinstance(self.site, ExpertsSite)
        return self.site.emission_of(self.pairs)

    def _add(self, consumer: str, what: str, found: Found) -> None:
        self.elements += found.elements
        if found.differences:
            self.differing.append(Differing(consumer, what, found))

    def _codes(self, layer: RoutedLayer, made: QuantizedActivation, raw: torch.Tensor) -> None:
        own = quantize_input(raw, layer.kernel.contract, layer.name)
        self._add(layer.name, "codes", same_bits(made.codes, own.codes))
        self._add(layer.name, "scale", same_bits(made.scale, own.scale))

    def _raw_rows(self, emission: Emission, made: RawOutput | None, raw: torch.Tensor) -> None:
        request = emission.raw
        if request is None:
            return
        wanted = _asked_for(raw, request)
        if made is None:
            found = Found(wanted.numel(), wanted.numel(), (), "nothing", "raw rows")
        else:
            written = made.values if made.compact else _asked_for(made.values, request)
            found = same_bits(written.reshape(-1, raw.shape[-1]), wanted)
        for layer in self._reading():
            self._add(layer.name, "raw rows", found)

    def _reading(self) -> Iterator[RoutedLayer]:
        parts = self.batch.plan.parts
        return (layer for layer in self.site.layers if parts[layer.index] & READS_RAW)

    def _shrunk(self, request: Shrink, made: QuantizedActivation, raw: torch.Tensor) -> None:
        got, wanted = made.shrunk_for(request.consumer), shrink(raw, request)
        if got is None:
            found = Found(wanted.numel(), wanted.numel(), (), "nothing", "shrunk rows")
        elif raw.device.type == "cpu":
            found = same_bits(got, wanted)
        else:
            found = within_rounding(got, *_exact_shrink(raw, request), raw.shape[-1])
        self._add(request.consumer, "shrunk rows", found)

    def _outputs(self, made: QuantizedActivation, raw: torch.Tensor) -> None:
        # The kernels alone: of a linear that is split over ranks, no other rank has to take part.
        for layer in self.site.layers:
            got, wanted = (self._multiplied(layer, x) for x in (made, raw))
            self._add(layer.name, "output", same_bits(got, wanted))

    def _branches(self, made: QuantizedActivation, raw: torch.Tensor) -> None:
        """What branches make of one base output: multiplying costs far more than all else."""
        route, plan = self.batch.plan.routes[self.site.index], self.batch.plan
        exact = raw.device.type == "cpu" or route != Route.ABSORBED
        for layer in self.site.layers:
            if not plan.branched[layer.index]:
                continue
            got, wanted = (self._with_branch(layer, x, raw) for x in (made, raw))
            found = same_bits(got, wanted)
            if found.differences and not exact and _near(got, wanted):
                found = Found(found.elements)
            self._add(layer.name, "output", found)

    def _multiplied(
        self, layer: RoutedLayer, x: torch.Tensor | QuantizedActivation
    ) -> torch.Tensor:
        if isinstance(layer, ExpertsLinear):
            assert self.pairs is not None
            return layer.kernel.apply(x, self.pairs.pairs, layer.name, by_token=layer.by_token)
        assert isinstance(layer, RoutedLinear)
        return layer.kernel.apply(x, layer.name)

    def _with_branch(
        self, layer: RoutedLayer, x: torch.Tensor | QuantizedActivation, raw: torch.Tensor
    ) -> torch.Tensor:
        assert layer.branch is not None
        # Each its own: a branch may write in place.
        out, source = _some_output(layer, raw), BranchInput(x, layer.name)
        if self.pairs is not None:
            return layer.branch.add(out, source, self.pairs, layer.index)
        return layer.branch.add(out, source, BranchRows.at(layer, self.batch))


def _some_output(layer: RoutedLayer, raw: torch.Tensor) -> torch.Tensor:
    """(M, N) in the place of a base output; small, so that rounding hides little of a branch."""
    return raw.new_full((raw.shape[:-1].numel(), layer.out_features), 0.0625)


def _asked_for(x: torch.Tensor, request: RawRequest) -> torch.Tensor:
    """(n, K): the rows of `x` (..., K) that a request asks for."""
    if request.rows is None:
        return x.reshape(-1, x.shape[-1])
    by_request = x.reshape(request.rows.shape[0], -1, x.shape[-1])
    return by_request[request.rows].flatten(0, 1)


def _exact_shrink(raw: torch.Tensor, request: Shrink) -> tuple[torch.Tensor, torch.Tensor]:
    """(M, width) in float64: the products, and the sums of their terms' magnitudes."""
    x = raw.reshape(request.slots.shape[0], -1, raw.shape[-1]).double()
    a = request.gathered().double().mT
    return (x @ a).flatten(0, 1), (x.abs() @ a.abs()).flatten(0, 1)


def _near(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether outputs differ by no more than float32 rounding of a branch may move them.

    One rounding of the element, and what cancels in a row keeps the noise of its largest.
    """
    step = torch.finfo(wanted.dtype).eps
    difference = (got.double() - wanted.double()).abs()
    row = wanted.double().abs().amax(-1, keepdim=True)
    return bool((difference <= step * wanted.double().abs() + 2.0**-12 * row).all())


def _saturation(made: QuantizedActivation, rows: int) -> tuple[int, int]:
    """How many FP8 codes of usual rows there are, and how many of them are +-448."""
    if made.codes.dtype != torch.float8_e4m3fn:
        return 0, 0
    number = made.orig_shape[:-1].numel()
    codes = made.codes.view(torch.uint8).reshape(-1, made.codes.shape[-1])[:number]
    usual = codes[torch.arange(number, device=codes.device) % rows % len(ROW_KINDS) == 0]
    return usual.numel(), int(((usual & 0x7F) == _LARGEST_E4M3).sum())

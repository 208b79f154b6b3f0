"""Embeddings, norms and routers of a model that take adapters, found and put in place by `wrap`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from torch import nn

from ..adapters.base import BaseFacts
from ..adapters.embedding import EmbeddingPlace, lookup_factor
from ..adapters.norm import NormPlace
from ..fusion.discover import Discovery
from ..fusion.site import Site
from ..linear.branching import RowLayout
from ..linear.registry import LayerRegistry
from ..linear.router import RouterPlace

AnyPlace = EmbeddingPlace | NormPlace | RouterPlace

_NO_ROWS = "it is not called with one tensor in which the batch's rows lie apart"


@dataclass(frozen=True, eq=False)
class FoundPlaces:
    """What takes adapters beside the linears.

    Attributes:
        places: in the order of their index.
        refusals: why the others take none, by name of the target.
    """

    places: tuple[AnyPlace, ...]
    refusals: dict[str, str]

    def install(self, registry: LayerRegistry) -> None:
        """Put all in place; the sites are in place already."""
        for place in self.places:
            place.install()
            registry.add_place(place)

    def uninstall(self) -> None:
        """Undo `install`."""
        for place in self.places:
            place.uninstall()


def find_places(
    model: nn.Module,
    base: BaseFacts,
    registry: LayerRegistry,
    found: Discovery,
    split: Collection[str] = (),
) -> FoundPlaces:
    """The embeddings and norms of `model` that adapters can have parts of.

    Args:
        model: in eval mode, its sites in place.
        base: names the candidates.
        registry: of its linears.
        found: its sites, and where modules keep the batch's rows.
        split: embeddings that are split over ranks, and whose forward gives whole rows.
    """
    places: list[AnyPlace] = []
    refusals: dict[str, str] = {}
    norms = _NormMaker(registry, found.sites)

    def take(name: str, make: Callable[..., AnyPlace | str], target: str = "") -> None:
        layout = found.row_layouts.get(name, RowLayout.UNKNOWN)
        module = model.get_submodule(name)
        made = _NO_ROWS
        if layout != RowLayout.UNKNOWN:
            made = make(name, len(registry) + len(places), module, layout)
        if isinstance(made, str):
            refusals[target or name] = made
        else:
            places.append(made)

    def embedding(name: str, index: int, module: nn.Embedding, layout: RowLayout):
        if name in split and type(module).forward is not nn.Embedding.forward:
            return "it is split over ranks and has a forward of its own"
        factor = lookup_factor(module)
        if "forward" in vars(module) and name not in split:
            return "its forward was patched onto the object"
        if isinstance(factor, str):
            return factor
        return EmbeddingPlace(name, index, module, registry, layout, factor)

    def router(name: str, index: int, module: nn.Module, layout: RowLayout):
        if name not in found.routers:
            return "it does not multiply with its weight once a forward, as routers do"
        if "forward" in vars(module):
            return "its forward was patched onto the object"
        return RouterPlace(name, index, module, registry, layout)

    for name in base.embeddings:
        take(name, embedding)
    for name in base.norms:
        take(name, norms.make)
    for target in base.experts.values():
        if target.is_router:
            take(target.module, router, target.name)
    return FoundPlaces(tuple(places), refusals)


class _NormMaker:
    def __init__(self, registry: LayerRegistry, sites: Iterable[Site]) -> None:
        self._registry = registry
        self._sites: dict[str, Site] = {}
        self._inside: dict[int, str] = {}
        for site in sites:
            if site.facts.semantics is None:
                continue
            if site.facts.kind == "norm":
                self._sites[site.facts.name] = site
            else:
                self._inside |= {id(m): site.facts.name for m in site.observed.values()}

    def make(self, name: str, index: int, module: nn.Module, layout: RowLayout) -> NormPlace | str:
        site = self._sites.get(name)
        if site is None and "forward" in vars(module):
            return "its forward was patched onto the object"
        if id(module) in self._inside:
            return f"it is a part of {self._inside[id(module)]}"
        return NormPlace(name, index, module, self._registry, layout, site)

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from branchline.core import FP8_DYNAMIC_GROUP128, FP8_STATIC_TENSOR, NVFP4
from branchline.core.route import Route
from branchline.fusion.traffic import SiteTraffic, traffic_of
from branchline.linear.parts import Part


@pytest.mark.parametrize(
    ("route", "expected"),
    [(Route.UNFUSED, 7.0), (Route.DUAL, 5.0), (Route.ABSORBED, 1.0), (Route.FUSED, 1.0)],
)
def test_static_fp8_with_an_adapter_on_every_row(route, expected):
    site = SiteTraffic(512, 11264, torch.bfloat16, FP8_STATIC_TENSOR, 512, 16)
    assert site.per_element(route) == pytest.approx(expected, abs=0.01)


def test_rows_without_adapters_cost_dual_nothing():
    all_rows = SiteTraffic(16, 4096, torch.bfloat16, FP8_STATIC_TENSOR, 16, 16)
    one_row = SiteTraffic(16, 4096, torch.bfloat16, FP8_STATIC_TENSOR, 1, 16)
    none = SiteTraffic(16, 4096, torch.bfloat16, FP8_STATIC_TENSOR)
    assert none.bytes_moved(Route.DUAL) == none.bytes_moved(Route.FUSED) == 16 * 4096
    more = one_row.bytes_moved(Route.DUAL) - none.bytes_moved(Route.DUAL)
    assert more == 2 * 2 * 4096 + 16 * 4
    assert all_rows.bytes_moved(Route.DUAL) - none.bytes_moved(Route.DUAL) == 16 * more


def test_scales_count_where_they_are_measured():
    group = SiteTraffic(4, 1024, torch.bfloat16, FP8_DYNAMIC_GROUP128)
    assert group.bytes_moved(Route.FUSED) == 4 * 1024 + 4 * 8 * 4
    assert SiteTraffic(4, 1024, torch.bfloat16, NVFP4).bytes_moved(Route.FUSED) == 4 * (512 + 64)


def test_nothing_at_all():
    assert SiteTraffic(0, 64, torch.bfloat16, FP8_STATIC_TENSOR).per_element(Route.DUAL) == 0


@pytest.mark.parametrize(
    ("adapter_tokens", "rows_per_token", "expected"), [(9, 1, 6), (10, 1, 7), (9, 2, 12), (0, 1, 0)]
)
def test_adapters_have_as_many_tokens_each_and_only_those_that_read_the_site_count(
    adapter_tokens, rows_per_token, expected
):
    plain, silent = SimpleNamespace(parts=Part.PLAIN), SimpleNamespace(parts=0)
    # Three adapters: one on both linears, one on the second, one that reads nothing here.
    held = [{1: plain, 3: silent}, {1: plain, 2: plain}]
    registry: Any = SimpleNamespace(branches=lambda layer, live: held[layer])
    facts = SimpleNamespace(columns=64, dtype=torch.bfloat16, rows_per_token=rows_per_token)
    site: Any = SimpleNamespace(layers=(0, 1), facts=facts)
    traffic = traffic_of(
        site, FP8_STATIC_TENSOR, registry, {1: "a", 2: "b", 3: "c"},
        tokens=16, adapter_tokens=adapter_tokens, shrink_width=8,
    )  # fmt: skip
    assert traffic == SiteTraffic(
        16 * rows_per_token, 64, torch.bfloat16, FP8_STATIC_TENSOR, expected, 8
    )

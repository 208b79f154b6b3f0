from __future__ import annotations

import pytest
import torch

from branchline.core import FP8_DYNAMIC_GROUP128, FP8_STATIC_TENSOR, NVFP4
from branchline.core.route import Route
from branchline.fusion.traffic import SiteTraffic


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

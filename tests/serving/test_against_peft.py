"""FP8 with adapters against PEFT on the same fake-quantised weights."""

from __future__ import annotations

import pytest
import torch

from tests.models import save_adapter, token_ids
from tests.reference import fake_quantized, with_adapters

IDS = token_ids(4, 9)


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    # A value at a rounding boundary of the FP8 grid may fall on either side (one step of one input
    # element), for float32 sums differ in their last bits: rare, and far below what a wrong
    # scaling or a wrong adapter would show.
    error = (ours.float() - theirs.float()).abs()
    spread = theirs.float().std()
    assert error.median() < 1e-3 * spread
    assert error.mean() < 1e-2 * spread
    assert error.max() < 1e-1 * spread


@pytest.mark.parametrize("quant", ["fp8-static", "fp8-dynamic"])
def test_each_adapter_and_a_mixed_batch(family, quant):
    served = family.served(torch.float32, quant=quant)
    reference = with_adapters(fake_quantized(family.plain(torch.float32), served), family.folders)
    mixed = ["attn", None, "mlp", "all"]
    expected = {}
    for name in family.folders:
        reference.set_adapter(name)
        expected[name] = reference(IDS).logits
        with served.adapters.rows([name] * 4):
            assert_close(served(IDS).logits, expected[name])
    with reference.disable_adapter():
        expected[None] = reference(IDS).logits
    assert_close(served(IDS).logits, expected[None])
    with served.adapters.rows(mixed):
        logits = served(IDS).logits
    for row, name in enumerate(mixed):
        assert_close(logits[row], expected[name][row])
        # The test can tell adapters apart: another adapter's answer is far away.
        other = expected["attn" if name != "attn" else None]
        assert (logits[row] - other[row]).abs().max() > 0.2 * other.std()


def test_after_swap_unload_and_unload_of_all(family, tmp_path):
    plain = family.plain(torch.float32)
    served = family.wrap(torch.float32)
    base = served(IDS).logits
    for name, folder in family.folders.items():
        served.adapters.load(name, folder)
    second = save_adapter(plain, tmp_path / "second", "all-linear", rank=4, seed=11)
    reference = with_adapters(fake_quantized(plain, served), {"second": second})
    served.adapters.swap("attn", second)
    with served.adapters.rows(["attn"] * 4):
        assert_close(served(IDS).logits, reference(IDS).logits)
    served.adapters.unload("mlp")
    with served.adapters.rows(["attn", None, None, "all"]):
        logits = served(IDS).logits
    assert_close(logits[0], reference(IDS).logits[0])
    for name in ("attn", "all"):
        served.adapters.unload(name)
    assert torch.equal(served(IDS).logits, base)
    assert served.adapters.list() == ()


def test_unquantised_base_equals_peft_tightly(llama):
    served = llama.served(torch.float32, quant="none")
    reference = with_adapters(llama.plain(torch.float32), llama.folders)
    for name in llama.folders:
        reference.set_adapter(name)
        with served.adapters.rows([name] * 4):
            torch.testing.assert_close(served(IDS).logits, reference(IDS).logits, atol=1e-5, rtol=0)

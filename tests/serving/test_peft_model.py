"""Wrapping a `PeftModel`: its adapters are taken over, or the model is left as it was."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import branchline
from branchline.core import errors
from tests.models import build, token_ids
from tests.reference import with_adapters

IDS = token_ids(3, 7)


def test_adapters_are_taken_over(family):
    reference = with_adapters(family.plain(torch.float32), family.folders)
    expected = {}
    for name in family.folders:
        reference.set_adapter(name)
        expected[name] = reference(IDS).logits
    served = branchline.wrap(reference, quant="none")
    assert [info.name for info in served.adapters.list()] == list(family.folders)
    for row, name in enumerate(family.folders):
        names: list[str | None] = [None] * 3
        names[row] = name
        with served.adapters.rows(names):
            torch.testing.assert_close(
                served(IDS).logits[row], expected[name][row], atol=2e-5, rtol=0
            )


def test_a_merged_adapter_is_refused_and_the_model_kept(llama):
    peft_model = with_adapters(llama.plain(torch.float32), {"attn": llama.folders["attn"]})
    peft_model.merge_adapter()
    before = peft_model(IDS).logits
    with pytest.raises(errors.WrapError, match="merged"):
        branchline.wrap(peft_model)
    assert torch.equal(peft_model(IDS).logits, before)


def test_a_wrap_that_fails_late_gives_the_peft_model_back(llama):
    peft_model = with_adapters(llama.plain(torch.float32), llama.folders)
    before = peft_model(IDS).logits
    with pytest.raises(errors.KernelUnavailableError):
        branchline.wrap(peft_model, producer="triton")
    assert torch.equal(peft_model(IDS).logits, before)
    served = branchline.wrap(peft_model, quant="none")
    served.unwrap()
    assert torch.equal(peft_model(IDS).logits, before)


def test_unwrap_frees_what_was_made(llama):
    plain = llama.plain()
    served = branchline.wrap(plain, quant="fp8-dynamic")
    served.adapters.load("attn", llama.folders["attn"])
    served(IDS)
    kept = [weakref.ref(served.registry), weakref.ref(next(iter(served.registry)).kernel)]
    served.unwrap()
    del served
    gc.collect()
    assert [ref() for ref in kept] == [None, None]


def test_a_failing_listener_does_not_half_load(llama, caplog):
    served = llama.wrap()

    def fails(epoch, reason):
        raise RuntimeError("a listener of somebody's")

    served.registry.listen(fails)
    served.adapters.load("attn", llama.folders["attn"])
    assert "a listener of somebody's" in caplog.text
    with served.adapters.rows(["attn", None, None]):
        served(IDS)
    served.adapters.unload("attn")
    assert served.adapters.list() == ()


def test_a_tied_head_is_named_and_its_embedding_kept():
    model = build("gemma3")
    model.lm_head.weight = model.get_input_embeddings().weight
    embedding = model.get_input_embeddings().weight.clone()
    for settings in ({}, {"quantize_lm_head": True}):
        served = branchline.wrap(model, quant="fp8-dynamic", **settings)
        notes = {entry.name: entry.reason for entry in served.audit().unwrapped}
        assert "tied to model.embed_tokens" in notes["lm_head"]
        served(IDS)
        assert torch.equal(served.get_input_embeddings().weight, embedding)
        served.unwrap()

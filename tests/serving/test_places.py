"""Embeddings and norms with adapters, heads, and the base's own weights."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import branchline
from branchline.adapters.weights import (
    NormWeights,
)
from branchline.core.errors import BatchError
from branchline.linear.base_weights import BaseWeightsOf
from tests.helpers import same_bytes
from tests.models import build, token_ids
from tests.parts import (
    ADAPTERS,
    DOWN,
    HEAD,
    NORMS,
    QUERY,
    ROW_LENGTH,
    Random,
    adapter,
    defined,
    embedding_parts,
    norm_parts,
    on_linears,
    served,
)

# --- embeddings, norms, heads ------------------------------------------------------------------


def test_a_tied_head_keeps_the_weight_of_the_base():
    plain = build("llama", torch.float32)
    plain.config.tie_word_embeddings = True
    plain.tie_weights()
    assert plain.lm_head.weight is plain.model.embed_tokens.weight
    weights = ADAPTERS["embedding"]
    reference = copy.deepcopy(plain)
    reference.lm_head.weight = nn.Parameter(plain.lm_head.weight.data.clone())
    reference = defined(reference, weights)
    model = branchline.wrap(plain, quant="none", max_loras=2, max_lora_rank=8)
    model.adapters.install("rows", weights)
    model.adapters.install("head", adapter(HEAD, weights.embeddings))
    ids = token_ids(2, ROW_LENGTH)
    got = model(ids, adapter_names=["rows", "head"]).logits
    torch.testing.assert_close(got[0], reference(ids).logits[0], rtol=1e-4, atol=1e-4)
    reference.lm_head.weight = nn.Parameter(HEAD["lm_head"].weight)
    torch.testing.assert_close(got[1], reference(ids).logits[1], rtol=1e-4, atol=1e-4)


def test_scaled_embeddings_and_norms_without_a_site():
    plain = build("gemma3", torch.float32)
    layer = "model.layers.1"
    norms = {
        f"{layer}.self_attn.q_norm": NormWeights(Random(1).normal(16)),
        f"{layer}.post_feedforward_layernorm": NormWeights(Random(2).normal(64)),
        f"{layer}.input_layernorm": NormWeights(Random(3).normal(64)),
    }
    weights = adapter(None, embedding_parts(4, "low_rank", "tokens"), norms)
    reference = defined(plain, weights)
    base = copy.deepcopy(plain)
    model = branchline.wrap(plain, quant="none", max_loras=1, max_lora_rank=8)
    model.adapters.install("own", weights)
    ids = token_ids(3, ROW_LENGTH)
    got = model(ids, adapter_names=["own", None, "own"]).logits
    for row, one in enumerate((reference, base, reference)):
        torch.testing.assert_close(got[row], one(ids).logits[row], rtol=1e-4, atol=1e-4)


def test_norms_and_embeddings_with_a_bias_and_positions():
    plain = build("gpt2", torch.float32)
    norm = NormWeights(Random(1).near_one(64), Random(2).normal(64))
    weights = adapter(None, None, {"transformer.h.1.ln_1": norm, "transformer.ln_f": norm})
    reference = copy.deepcopy(plain)
    for name in weights.norms:
        module = reference.get_submodule(name)
        module.weight, module.bias = (nn.Parameter(v.clone()) for v in (norm.weight, norm.bias))
    model = branchline.wrap(plain, quant="none", max_loras=1, max_lora_rank=8)
    model.adapters.install("own", weights)
    ids = token_ids(2, ROW_LENGTH)
    got = model(ids, adapter_names=["own", None]).logits
    torch.testing.assert_close(got[0], reference(ids).logits[0], rtol=1e-4, atol=1e-4)
    assert "transformer.wte" in model.registry.places
    # Its rows are positions, the same for all rows of the batch.
    assert "transformer.wpe" not in model.registry.places


def test_a_batch_of_another_size_is_refused():
    model = served("none")
    embed = model.model.model.embed_tokens
    with model.adapters.rows(["table", None]), pytest.raises(BatchError, match="embed_tokens"):
        embed(token_ids(3, ROW_LENGTH))


def test_unwrapping_gives_the_modules_their_forwards_back():
    plain = build("gemma3", torch.float32)
    ids = token_ids(1, ROW_LENGTH)
    before = plain(ids).logits
    model = branchline.wrap(plain, quant="none", max_loras=1, max_lora_rank=8)
    model.adapters.install("own", adapter(None, embedding_parts(4, "weight")))
    assert not torch.equal(model(ids, adapter_names=["own"]).logits, before)
    unwrapped = model.unwrap()
    assert torch.equal(unwrapped(ids).logits, before)
    assert not any("forward" in vars(module) for module in unwrapped.modules())


def test_a_slot_that_is_used_again_keeps_nothing():
    model = branchline.wrap(build("llama", torch.float32), quant="none", max_loras=1)
    ids = token_ids(1, ROW_LENGTH)
    everything = adapter(
        on_linears(1, (QUERY, DOWN), "low_rank", "gain", "shift", "in_scale", "delta", "rotation"),
        embedding_parts(2, "low_rank", "tokens", "weight"),
        norm_parts(3, *NORMS),
    )
    shift = adapter(on_linears(4, (QUERY, DOWN), "shift"))
    model.adapters.install("a", shift)
    wanted = model(ids, adapter_names=["a"]).logits
    for _ in range(3):
        model.adapters.unload("a")
        model.adapters.install("a", everything)
        assert not torch.equal(model(ids, adapter_names=["a"]).logits, wanted)
        model.adapters.unload("a")
        model.adapters.install("a", shift)
        assert same_bytes(model(ids, adapter_names=["a"]).logits, wanted)


# --- base weights ------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("quant", ["none", "fp8-dynamic"])
def test_base_weights_are_what_linears_multiply_with(family, quant):
    model = branchline.wrap(build(family, torch.float32), quant=quant, max_loras=1)
    given = BaseWeightsOf(model.model, model.registry)
    for name, layer in model.registry.layers.items():
        weight, bias = given.weight(name), given.bias(name)
        assert weight.dtype == torch.float32
        assert weight.shape == (layer.out_features, layer.in_features)
        # One column: what it is multiplied with can be told exactly up to the input's own grid.
        x = torch.zeros(1, layer.in_features)
        x[0, 3] = 1.0
        out = layer.kernel.apply(x, name)[0]
        wanted = weight[:, 3] + (0 if bias is None else bias)
        torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-6)
    table = model.get_input_embeddings().weight
    name = "model.embed_tokens" if family == "llama" else "transformer.wte"
    assert torch.equal(given.weight(name), table)


def test_modules_that_take_adapters_pass_opcheck():
    model = branchline.wrap(build("gemma3", torch.float32), quant="none", max_loras=1)
    x, ids = torch.randn(2, 5, 4, 16), token_ids(2, 5)
    for name, given in (("layers.0.self_attn.q_norm", x), ("embed_tokens", ids)):
        place = model.registry.places[f"model.{name}"]
        torch.library.opcheck(torch.ops.branchline.routed_module.default, (given, place.handle))

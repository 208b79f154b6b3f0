"""Models that hand experts a selection of their tokens: no token takes another row's adapter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import branchline
from branchline.core.errors import BatchError
from tests.moe.adapters import BOTH, save
from tests.moe.models import MODELS, token_ids

IDS = token_ids(2, 8)


def selecting(seen: dict):
    """A Mixtral whose experts are fed the tokens that `seen["keep"]` marks, where that is set."""
    model = MODELS["mixtral"]()
    block = type(model.model.layers[0].mlp)

    class Selecting(block):
        def forward(self, x):
            keep = seen.get("keep")
            flat = x.view(-1, x.shape[-1])
            if keep is None:
                return super().forward(x)
            some = flat[keep]
            _, weights, index = self.gate(some)
            out = torch.zeros_like(flat)
            out[keep] = self.experts(some, index, weights)
            return out.view(x.shape)

    for layer in model.model.layers:
        layer.mlp.__class__ = Selecting
    return model


def kept(*rows: int) -> torch.Tensor:
    """So many first tokens of each of the two rows, flat."""
    mask = torch.zeros(2, 8, dtype=torch.bool)
    for row, tokens in enumerate(rows):
        mask[row, :tokens] = True
    return mask.flatten()


@pytest.fixture(params=[(BOTH, []), (("mlp.gate.weight",), ["q_proj"])], ids=["experts", "router"])
def served(request, tmp_path: Path):
    parameters, modules = request.param
    folder = save(tmp_path, "mixtral", parameters, modules)
    seen: dict = {}
    served = branchline.wrap(selecting(seen), quant="fp8-block", max_loras=2)
    served.adapters.load("one", folder)
    return served, seen


@pytest.mark.parametrize("tokens", [(2, 6), (4, 4), (1, 8), (0, 0)])
def test_a_selection_is_refused_whatever_its_size(served, tokens):
    """(2, 6) and (4, 4) are as many for each of two rows as (4, 4): only the first is wrong."""
    served, seen = served
    whole = served(IDS, adapter_names=["one", None]).logits
    seen["keep"] = kept(*tokens)
    with pytest.raises(BatchError, match=r"2 rows of 8 tokens.*which row's adapter is not known"):
        served(IDS, adapter_names=["one", None])
    # Rows without an adapter need no such knowledge.
    base = served(IDS).logits
    assert torch.equal(served(IDS, adapter_names=[None, None]).logits, base)
    # All tokens, in order, are no selection.
    seen["keep"] = kept(8, 8)
    assert torch.equal(served(IDS, adapter_names=["one", None]).logits, whole)


def test_another_row_count_or_length_is_seen_at_every_step(served):
    served, seen = served
    out = served.generate(
        IDS, adapter_names=["one", None], max_new_tokens=3, do_sample=False, eos_token_id=None
    )
    assert out.shape == (2, 11)
    seen["keep"] = kept(4, 4)
    with pytest.raises(BatchError, match="2 rows of 8 tokens"):
        served.generate(IDS, adapter_names=["one", None], max_new_tokens=3)


def test_a_compiled_graph_refuses_it_too(served):
    served, seen = served
    torch._dynamo.reset()
    seen["keep"] = kept(2, 6)
    compiled = torch.compile(served.model, backend="aot_eager", dynamic=True)
    refused = pytest.raises(BatchError, match="2 rows of 8 tokens")
    with torch.no_grad(), served.adapters.rows(["one", None]), refused:
        compiled(IDS, use_cache=False)
    torch._dynamo.reset()


def test_the_base_model_by_itself_knows_its_tokens_and_a_block_does_not(served):
    served, _ = served
    inner = served.model.model
    with torch.no_grad(), served.adapters.rows(["one", None]):
        hidden = inner(IDS).last_hidden_state
        assert torch.equal(served.model.lm_head(hidden), served.model(IDS).logits)
    refused = pytest.raises(BatchError, match="call the served model itself")
    with served.adapters.rows(["one", None]), refused:
        inner.layers[0].mlp(torch.randn(2, 8, 128).bfloat16())

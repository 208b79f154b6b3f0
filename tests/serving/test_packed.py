"""Packed batches: every token of one sequence takes its own row's adapter."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from branchline.core.errors import AdapterUnsupportedError, BatchError
from tests.helpers import same_bytes
from tests.models import token_ids
from tests.parts import ADAPTERS, served

LENGTHS = (5, 1, 3, 0, 4)


class Packed:
    """Sequences of these lengths, one after the other, that do not see one another.

    Args:
        model: the served one.
        lengths: of the sequences.
    """

    def __init__(self, model, lengths: Sequence[int] = LENGTHS) -> None:
        self.model = model
        self.lengths = lengths
        self.rows = [token_ids(1, max(n, 1), seed=i)[:, :n] for i, n in enumerate(lengths)]
        self.ids = torch.cat(self.rows, 1)
        owner = torch.repeat_interleave(torch.tensor(lengths))
        place = torch.cat([torch.arange(n) for n in lengths])
        total = self.ids.shape[1]
        self.places = place.unsqueeze(0)
        full = (owner[:, None] == owner) & (place[:, None] >= place)
        self.mask = full.view(1, 1, total, total)
        near = full & (place[:, None] - place < 8)
        if model.config.model_type == "gemma3_text":
            self.mask = {
                "full_attention": self.mask,
                "sliding_attention": near.view(1, 1, total, total),
            }

    def run(self, names: Sequence, logits: Sequence[int] | None = None, **kwargs) -> torch.Tensor:
        """Logits (tokens, V), or of the places in `logits`."""
        if logits is not None:
            kwargs["logits_to_keep"] = torch.tensor(logits, dtype=torch.int64)
        with self.model.adapters.rows(names, tokens=self.lengths, logits=logits):
            out = self.model(
                input_ids=self.ids, attention_mask=self.mask, position_ids=self.places, **kwargs
            )
        return out.logits[0]

    def alone(self, names: Sequence) -> torch.Tensor:
        """The same of each sequence by itself."""
        outs = [
            self.model(ids, adapter_names=[name]).logits[0]
            for ids, name in zip(self.rows, names, strict=True)
            if ids.shape[1]
        ]
        return torch.cat(outs)


def close(found: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> None:
    for row in range(wanted.shape[0]):
        error = (found[row].float() - wanted[row].float()).norm() / wanted[row].float().norm()
        assert error <= tolerance, (row, float(error))


@pytest.fixture(scope="module", params=[("none", "dynamic"), ("fp8-dynamic", "dual")], ids=str)
def of_every_part(request):
    quant, policy = request.param
    return served(quant, policy=policy), 1e-5 if quant == "none" else 3e-2


NAMES = sorted(ADAPTERS)
BATCHES = [
    [None] * 5,
    ["head", None, "head", "head", "head"],
    *([NAMES[(i + shift) % len(NAMES)] for i in range(5)] for shift in range(0, len(NAMES), 2)),
]


def test_every_token_takes_its_row_s_adapter(of_every_part):
    model, tolerance = of_every_part
    packed = Packed(model)
    for names in BATCHES:
        close(packed.run(names), packed.alone(names), tolerance)


def test_the_head_is_fed_chosen_tokens(of_every_part):
    """Saved heads, tokens and all else, for the last token of each sequence, or any others."""
    model, tolerance = of_every_part
    packed = Packed(model)
    for places in ([4, 5, 8, 12], [12, 0, 7], [3], list(range(13)), []):
        for names in BATCHES[1::2]:
            whole = packed.run(names)
            close(packed.run(names, places), whole[places], tolerance)


@pytest.mark.parametrize(
    "settings", [{"quant": "none"}, {"policy": "dual"}, {"policy": "absorbed"}]
)
def test_families(family, settings):
    dtype = torch.float32 if settings.get("quant") == "none" else torch.bfloat16
    model = family.served(dtype, **settings)
    packed = Packed(model, (6, 2, 9, 1))
    for names in (["all", "attn", None, "mlp"], ["attn"] * 4, [None, "all", "all", "attn"]):
        tolerance = 1e-4 if dtype == torch.float32 else 8e-2
        close(packed.run(names), packed.alone(names), tolerance)


def test_a_row_without_an_adapter_has_the_base_s_bytes(llama):
    model = llama.served(torch.float32, quant="none")
    packed = Packed(model)
    base = packed.run([None] * 5)
    out = packed.run(["all", None, "attn", None, None])
    assert same_bytes(out[5], base[5])
    assert same_bytes(out[9:], base[9:])
    assert not torch.equal(out[:5], base[:5])


def test_neighbours_adapters_do_not_show(llama):
    model = llama.served(torch.float32, quant="none")
    packed = Packed(model)
    one = packed.run(["all", None, "attn", None, "mlp"])
    other = packed.run(["mlp", "all", "attn", None, "all"])
    assert same_bytes(one[6:9], other[6:9])


def test_mixtures(llama):
    model = llama.served(torch.float32, quant="none")
    packed = Packed(model)
    names = [{"all": 0.5, "attn": -1.0}, None, {"mlp": 2.0}, None, "all"]
    close(packed.run(names), packed.alone(names), 1e-4)
    close(packed.run(names, [4, 12]), packed.run(names)[[4, 12]], 1e-4)


def test_what_follows_from_a_packing_is_worked_out_once(llama):
    model = llama.served(quant="none")
    memos = []
    for tokens in ((2, 1), (2, 1), (1, 2)):
        with model.adapters.rows(["all", "attn"], tokens=tokens) as batch:
            memos.append(batch.memo)
    assert memos[0] is memos[1]
    assert memos[2] is not memos[0]
    for count in range(40):
        with model.adapters.rows(["all", "attn"], tokens=(count, 1)):
            pass
    (ready,) = model.adapters._batches._kept.values()
    assert len(ready.packed) <= 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokens": [1]}, "a count, 0 or more, for each of 2 rows"),
        ({"tokens": [1, -1]}, "a count, 0 or more"),
        ({"tokens": [1, 1.0]}, "whole numbers"),
        ({"tokens": [1, True]}, "whole numbers"),
        ({"tokens": [1, 2], "logits": [3]}, "place 3 of logits lies outside of 3 tokens"),
        ({"tokens": [1, 2], "logits": [-1]}, "outside"),
        ({"tokens": [1, 2], "logits": ["0"]}, "whole numbers"),
        ({"logits": [0]}, "pass tokens= too"),
    ],
)
def test_bad_packings(llama, arguments, message):
    model = llama.served(quant="none")
    with pytest.raises(BatchError, match=message):
        model.adapters.rows(["all", None], **arguments)
    assert all(info.batches == 0 for info in model.adapters.list())


def test_inputs_of_another_length_are_refused(llama):
    model = llama.served(quant="none")
    with (
        model.adapters.rows(["all", None], tokens=[3, 1]),
        pytest.raises(BatchError, match="the batch names 4 tokens"),
    ):
        model(input_ids=token_ids(1, 5))
    with (
        model.adapters.rows(["all", None], tokens=[3, 1], logits=[2]),
        pytest.raises(BatchError, match="the batch names 4 tokens"),
    ):
        model(input_ids=token_ids(1, 2))


def test_activated_adapters_are_refused(llama, tmp_path):
    from tests.models import save_adapter

    folder = save_adapter(
        llama.plain(),
        tmp_path / "activated",
        ["q_proj"],
        rank=4,
        seed=1,
        alora_invocation_tokens=[5, 6],
    )
    model = llama.wrap(quant="none")
    model.adapters.load("activated", folder)
    rows = model.adapters.rows(["activated"], tokens=[3])
    with pytest.raises(AdapterUnsupportedError, match="acts from its invocation tokens on"), rows:
        pass
    assert model.adapters.info("activated").batches == 0
    model.adapters.unload("activated")

"""A replica of two ranks on the CPU: transformers' own tensor-parallel plan, wrapped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import IA3Config, OFTConfig, get_peft_model

from branchline.core.errors import (
    AdapterNotFoundError,
    AdapterUnsupportedError,
    RankError,
    WrapError,
)
from tests.models import TARGETS, VOCABULARY, build, save_adapter, token_ids
from tests.parts import ADAPTERS
from tests.serving import two_ranks
from tests.serving.two_ranks import Setup, TwoRanks

# float32, no quantisation: sums in another order.
EXACT = {"rtol": 0.0, "atol": 2e-5}
IDS = token_ids(4, 7)
NAMES = ["attn", None, "mlp", "all"]


class Saved:
    """Models and adapters in folders."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.model = build("llama", torch.float32)
        # The small Llama has no biases of its own.
        self.biased = build("llama", torch.float32)
        config = self.biased.config
        config.attention_bias = config.mlp_bias = True
        torch.manual_seed(5)
        self.biased = type(self.biased)(config).eval()
        for name, parameter in self.biased.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.5)
        self.qwen = build("qwen3", torch.float32)
        for name in ("model", "biased", "qwen"):
            getattr(self, name).save_pretrained(root / name)
        attention, mlp = TARGETS["llama"]
        self.adapters = {
            "attn": self._lora("attn", attention, 8, 1),
            "mlp": self._lora("mlp", mlp, 4, 2, use_rslora=True),
            "all": self._lora("all", "all-linear", 16, 3),
            "column": self._lora("column", ["q_proj", "k_proj", "up_proj"], 4, 4),
            "row": self._lora("row", ["o_proj", "down_proj"], 4, 5),
            "head": self._lora("head", ["lm_head"], 4, 6),
            "dora": self._lora("dora", ["q_proj", "o_proj", "down_proj"], 4, 7, use_dora=True),
            "table": self._lora("table", ["embed_tokens", "o_proj"], 4, 8),
        }

    def _lora(self, name: str, targets, rank: int, seed: int, **settings) -> Path:
        folder = self.root / "adapters" / name
        return save_adapter(self.model, folder, targets, rank=rank, seed=seed, **settings)

    def peft(self, name: str, config) -> Path:
        torch.manual_seed(9)
        peft_model = get_peft_model(build("llama", torch.float32), config)
        for key, parameter in peft_model.named_parameters():
            if parameter.requires_grad and "base_layer" not in key:
                parameter.data.add_(torch.randn_like(parameter) * 0.1)
        folder = self.root / "adapters" / name
        peft_model.save_pretrained(folder)
        return folder

    def setup(self, *names: str, model: str = "model", dtype=torch.float32, **settings) -> Setup:
        settings = {"quant": "none", "policy": "dynamic", "max_lora_rank": 16} | settings
        adapters = {name: self.adapters[name] for name in names}
        return Setup(self.root / model, dtype, settings=settings, adapters=adapters)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Saved:
    return Saved(tmp_path_factory.mktemp("parallel"))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    pair = TwoRanks(tmp_path_factory.mktemp("ranks"))
    yield pair
    pair.close()


def serve(ranks: TwoRanks, setup: Setup) -> None:
    for reply in ranks.run(two_ranks.serve, setup):
        if isinstance(reply, Exception):
            raise reply


def alike(replies: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """What both ranks have to the bit."""
    first, second = replies
    assert torch.equal(first, second)
    return first


@pytest.mark.parametrize("model", ["model", "biased", "qwen"])
def test_base_rows_equal_one_rank(saved, ranks, model):
    setup = saved.setup(model=model)
    serve(ranks, setup)
    found = alike(ranks.run(two_ranks.logits, IDS, None))
    torch.testing.assert_close(
        found, two_ranks.logits_of(two_ranks.wrapped(setup), IDS, None), **EXACT
    )
    # The forward that transformers makes of its own plan, and the one after unwrapping.
    own = alike(ranks.run(two_ranks.own_logits, setup, IDS))
    torch.testing.assert_close(found, own, **EXACT)
    assert torch.equal(alike(ranks.run(two_ranks.unwrapped_logits, IDS)), own)


def test_rows_with_adapters_equal_one_rank(saved, ranks):
    names = tuple(saved.adapters)
    setup = saved.setup(*names, max_loras=len(names))
    serve(ranks, setup)
    one = two_ranks.wrapped(setup)
    digests = {info.name: info.digest for info in one.adapters.list()}
    for reply in ranks.run(two_ranks.listed):
        assert {name: digest for name, (digest, _) in reply.items()} == digests
    base = two_ranks.logits_of(one, IDS[:1], None)
    for rows in ([name] for name in names):
        wanted = two_ranks.logits_of(one, IDS[:1], rows)
        assert (wanted - base).abs().max() > 1e-2, "the adapter does nothing"
        found = alike(ranks.run(two_ranks.logits, IDS[:1], rows))
        torch.testing.assert_close(found, wanted, **EXACT, msg=str(rows))
    mixed = alike(ranks.run(two_ranks.logits, IDS, NAMES))
    torch.testing.assert_close(mixed, two_ranks.logits_of(one, IDS, NAMES), **EXACT)
    rows = [row[: 3 + i] for i, row in enumerate(IDS)]
    packed = alike(ranks.run(two_ranks.packed_logits, rows, NAMES))
    torch.testing.assert_close(packed, two_ranks.packed_logits_of(one, rows, NAMES), **EXACT)
    wanted = one.generate(
        IDS, adapter_names=NAMES, max_new_tokens=6, do_sample=False, pad_token_id=0
    )
    assert torch.equal(alike(ranks.run(two_ranks.generated, IDS, NAMES)), wanted)


def test_a_biased_model_with_adapters(saved, ranks):
    config = IA3Config(
        target_modules=["k_proj", "o_proj", "down_proj"], feedforward_modules=["down_proj"]
    )
    saved.adapters["ia3"] = saved.peft("ia3", config)
    setup = saved.setup("dora", "all", "ia3", model="biased", allow_base_mismatch=True)
    serve(ranks, setup)
    rows = ["dora", "all", None, "ia3"]
    wanted = two_ranks.logits_of(two_ranks.wrapped(setup), IDS, rows)
    torch.testing.assert_close(alike(ranks.run(two_ranks.logits, IDS, rows)), wanted, **EXACT)


def test_every_part(saved, ranks):
    names = sorted(ADAPTERS.keys() - {"boft"})
    setup = saved.setup(max_loras=len(names))
    serve(ranks, setup)
    one = two_ranks.wrapped(setup)
    for name in names:
        one.adapters.install(name, ADAPTERS[name])
        ranks.run(two_ranks.install, name)
        rows = [name, None, name, None]
        found = alike(ranks.run(two_ranks.logits, IDS, rows))
        torch.testing.assert_close(found, two_ranks.logits_of(one, IDS, rows), **EXACT)


@pytest.mark.parametrize(
    ("quant", "policy"),
    [
        ("fp8-dynamic", "dynamic"),
        ("fp8-dynamic", "dual"),
        ("fp8-dynamic", "absorbed"),
        ("fp8-static", "absorbed"),
    ],
)
def test_quantised(saved, ranks, quant, policy):
    """Each rank has scales of its own, so the error is another one, and no larger than one rank's
    by more than a quarter."""
    settings = {"quant": quant, "policy": policy}
    calibration = token_ids(4, 12, seed=9) if quant == "fp8-static" else None
    setup = saved.setup("attn", "mlp", "all", dtype=torch.bfloat16, **settings)
    setup = two_ranks.calibrated(setup, calibration)
    serve(ranks, setup)
    exact = two_ranks.logits_of(two_ranks.wrapped(saved.setup("attn", "mlp", "all")), IDS, NAMES)
    one = two_ranks.logits_of(two_ranks.wrapped(setup), IDS, NAMES).float()
    found = alike(ranks.run(two_ranks.logits, IDS, NAMES)).float()
    assert (found - exact).norm() <= 1.25 * (one - exact).norm()
    (routes, others) = ranks.run(two_ranks.routes)
    assert routes == others
    assert {"dynamic": "unfused"}.get(policy, policy) in routes
    base = alike(ranks.run(two_ranks.logits, IDS, [None] * 4))
    assert torch.equal(base[1], alike(ranks.run(two_ranks.logits, IDS, NAMES))[1])


def test_quantised_numbers_are_those_of_the_halves(saved, ranks):
    """One rank that holds both halves of each split linear, quantised apart, has the same bytes."""
    setup = saved.setup(quant="fp8-dynamic")
    serve(ranks, setup)
    wanted = two_ranks.halved_logits(setup, IDS)
    assert torch.equal(alike(ranks.run(two_ranks.logits, IDS, None)), wanted)


def test_swap_and_unload_on_both_ranks(saved, ranks):
    setup = saved.setup("attn")
    serve(ranks, setup)
    one = two_ranks.wrapped(setup)
    first, second = ranks.run(two_ranks.change, "swap", "attn", saved.adapters["row"])
    assert first == second == one.adapters.swap("attn", saved.adapters["row"]).digest
    rows = ["attn", None, "attn", None]
    found = alike(ranks.run(two_ranks.logits, IDS, rows))
    torch.testing.assert_close(found, two_ranks.logits_of(one, IDS, rows), **EXACT)
    assert ranks.run(two_ranks.change, "unload", "attn") == ("", "")
    for error in ranks.run(two_ranks.logits, IDS, rows):
        assert isinstance(error, AdapterNotFoundError)
    assert ranks.run(two_ranks.listed) == ({}, {})
    # They still go together.
    alike(ranks.run(two_ranks.logits, IDS, None))


def test_compiled(saved, ranks):
    """A rank's linears exchange inside of their ops."""
    serve(ranks, saved.setup("all", quant="fp8-dynamic"))
    rows = ["all", None, "all", None]
    eager = alike(ranks.run(two_ranks.logits, IDS, rows))
    compiled = alike(ranks.run(two_ranks.compiled_logits, IDS, rows))
    torch.testing.assert_close(compiled, eager, **EXACT)


def test_a_forward_of_no_tokens_for_the_head(saved, ranks):
    serve(ranks, saved.setup("head"))
    for logits in ranks.run(two_ranks.headless_logits, IDS[0], "head"):
        assert logits.shape == (1, 0, VOCABULARY)


def test_each_rank_keeps_its_share(saved, ranks):
    serve(ranks, saved.setup("row"))
    whole = two_ranks.wrapped(saved.setup("row")).adapters.info("row").nbytes
    for reply in ranks.run(two_ranks.listed):
        assert reply["row"][1] < 0.8 * whole


@pytest.mark.parametrize(
    ("kind", "adapter", "left"),
    [
        ("load", "row", {"attn"}),
        # Rank 0 waits for the other's part of a weight when that one fails.
        ("load", "dora", {"attn"}),
        ("swap", "row", set()),
        ("swap", "dora", {"attn"}),
    ],
)
def test_a_failure_of_one_rank_is_one_of_both(saved, ranks, kind, adapter, left):
    serve(ranks, saved.setup("attn"))
    name = "new" if kind == "load" else "attn"
    good = saved.adapters[adapter]
    own, other = ranks.run(two_ranks.change, kind, name, good, saved.root / "gone")
    assert isinstance(own, RankError)
    assert "rank 1 failed" in str(own)
    assert isinstance(other, AdapterNotFoundError)
    assert [set(reply) for reply in ranks.run(two_ranks.listed)] == [left, left]
    digests = ranks.run(two_ranks.change, "load", "later", good)
    assert digests[0] == digests[1]


def test_other_files_on_another_rank_are_refused(saved, ranks):
    serve(ranks, saved.setup())
    sources = saved.adapters["attn"], saved.adapters["row"]
    for error in ranks.run(two_ranks.change, "load", "a", *sources):
        assert isinstance(error, RankError)
        assert "another content on each rank" in str(error)
    assert ranks.run(two_ranks.listed) == ({}, {})


def test_a_swap_that_fails_on_all_ranks_changes_nothing(saved, ranks):
    serve(ranks, saved.setup("attn"))
    before = ranks.run(two_ranks.listed)
    for error in ranks.run(two_ranks.change, "swap", "attn", saved.root / "gone"):
        assert isinstance(error, AdapterNotFoundError)
    assert ranks.run(two_ranks.listed) == before


def test_rotations(saved, ranks):
    settings = {"target_modules": ["q_proj", "down_proj"], "use_cayley_neumann": False}
    fits = saved.peft("oft", OFTConfig(oft_block_size=32, **settings))
    wide = saved.peft("oft-wide", OFTConfig(oft_block_size=128, target_modules=["down_proj"]))
    setup = saved.setup()
    serve(ranks, setup)
    ranks.run(two_ranks.change, "load", "oft", fits)
    one = two_ranks.wrapped(setup)
    one.adapters.load("oft", fits)
    rows = ["oft", None, "oft", "oft"]
    found = alike(ranks.run(two_ranks.logits, IDS, rows))
    torch.testing.assert_close(found, two_ranks.logits_of(one, IDS, rows), **EXACT)
    for error in ranks.run(two_ranks.change, "load", "wide", wide):
        assert isinstance(error, AdapterUnsupportedError)
        assert "of model.layers.0.mlp.down_proj mixes inputs" in str(error)
    assert [set(reply) for reply in ranks.run(two_ranks.listed)] == [{"oft"}, {"oft"}]


@pytest.mark.parametrize(
    ("plan", "named"),
    [
        ({"model.layers.*.self_attn.o_proj": "rowwise_split_input"}, "self_attn.o_proj"),
        ({"model.layers.*.mlp.gate_proj": "packed_colwise"}, "mlp.gate_proj"),
        ({"model.layers.*.mlp": "all_reduce"}, "layers.0.mlp"),
    ],
)
def test_other_styles_are_refused_by_name(saved, ranks, plan, named):
    setup = Setup(saved.root / "model", plan=plan, settings={"quant": "none"})
    for error in ranks.run(two_ranks.serve, setup):
        assert isinstance(error, WrapError)
        assert named in str(error)
        assert next(iter(plan.values())) in str(error)


def test_a_whole_embedding_and_an_uneven_head(saved, ranks):
    config = build("llama", torch.float32).config
    config.vocab_size = VOCABULARY + 1
    torch.manual_seed(0)
    type(saved.model)(config).save_pretrained(saved.root / "odd")
    setup = Setup(
        saved.root / "odd",
        plan={"model.embed_tokens": "replicate"},
        settings={"quant": "fp8-dynamic", "quantize_lm_head": True},
    )
    serve(ranks, setup)
    found = alike(ranks.run(two_ranks.logits, IDS, None))
    assert found.shape[-1] == VOCABULARY + 1
    assert torch.equal(found, two_ranks.halved_logits(setup, IDS))

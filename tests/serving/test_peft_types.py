"""Every PEFT type, on every family that PEFT can make it for, against PEFT itself."""

from __future__ import annotations

import copy
import itertools
import math
import random
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForSequenceClassification

import branchline
from branchline.adapters.tuners import TUNERS
from tests.helpers import same_bytes
from tests.models import CONFIGS, build, token_ids
from tests.peft_types import CASES, FAMILIES, NAMES, UNMADE, made_for, make
from tests.reference import fake_quantized, with_adapters

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")

QUANTS = ("none", "fp8-dynamic")
ROWS, TOKENS = 16, 7
#: Rows with an adapter, and rows without one.
SIZES = ((14, 2), (6, 1), (1, 1), (1, 0))
IDS = token_ids(ROWS, TOKENS)
PAIRS = [(family, case) for family in FAMILIES for case in made_for(family)]


class Bench:
    """One family: its plain model, and served and reference models of it, made once each."""

    def __init__(self, family: str, root: Path) -> None:
        self.family = family
        self.plain = build(family, torch.float32)
        self._root = root
        self._live: dict[str, torch.Tensor] = {}
        self.folder = cache(self._folder)
        self.served = cache(self._served)
        self.base = cache(self._base)
        self.expected = cache(self._expected)
        self.serve = cache(self._serve)

    def _folder(self, case: str) -> Path:
        made = make(case, self.family, self.plain)
        made.save_pretrained(self._root / case)
        self._live[case] = made(IDS).logits
        return self._root / case

    def _served(self, quant: str) -> branchline.ServedModel:
        # Fewer slots than cases: they move in and out, as they do in service.
        return branchline.wrap(
            build(self.family, torch.float32), quant=quant, max_loras=ROWS, max_lora_rank=16,
            lora_dtype="float32",
        )  # fmt: skip

    def _serve(self, quant: str, case: str) -> branchline.ServedModel:
        """The served model, with the case loaded."""
        model = self.served(quant)
        model.adapters.load(case, self.folder(case))
        return model

    def _base(self, quant: str) -> nn.Module:
        return self.plain if quant == "none" else fake_quantized(self.plain, self.served(quant))

    def _expected(self, quant: str, case: str | None) -> torch.Tensor:
        """PEFT's logits of `IDS`; on the plain base those of the very model that was saved."""
        if case is None:
            return self.base(quant)(IDS).logits
        folder = self.folder(case)
        return self._live[case] if quant == "none" else self._on_codes(case, folder)(IDS).logits

    def _on_codes(self, case: str, folder: Path) -> nn.Module:
        """PEFT on the fake-quantised base; modules that were saved whole are not quantised."""
        base = copy.deepcopy(self.base("fp8-dynamic"))
        for ending in getattr(CASES[case](NAMES[self.family]), "modules_to_save", None) or ():
            for name, module in self.plain.named_modules():
                if name.rpartition(".")[2] == ending:
                    parent, _, child = name.rpartition(".")
                    setattr(base.get_submodule(parent), child, copy.deepcopy(module))
        return with_adapters(base, {case: folder})


@pytest.fixture(scope="session")
def bench(tmp_path_factory) -> Callable[[str], Bench]:
    """The bench of a family."""
    return cache(lambda family: Bench(family, tmp_path_factory.mktemp(family)))


def assert_equal_peft(quant: str, got: torch.Tensor, wanted: torch.Tensor) -> None:
    if quant == "none":
        # Where an adapter makes the logits larger, the last bits of their sums grow with them.
        error = (got - wanted).abs().max()
        assert error <= 1e-5 * max(1.0, float(wanted.abs().max())), float(error)
    else:
        # A value at the boundary of two codes may fall on either side, and all tokens behind it
        # differ by that one step.
        error = (got - wanted).norm() / wanted.norm()
        assert error <= 3e-2, float(error)


# --- alone -------------------------------------------------------------------------------------


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize(("family", "case"), PAIRS)
def test_an_adapter_computes_what_peft_computes(bench, family, case, quant):
    it = bench(family)
    model = it.serve(quant, case)
    wanted, base = it.expected(quant, case), it.expected(quant, None)
    got = model(IDS, adapter_names=[case] * ROWS).logits
    assert_equal_peft(quant, got, wanted)
    # What is compared is the adapter, not the base that it sits on.
    assert (wanted - base).norm() > 0.1 * base.norm()
    assert (got - wanted).norm() < 0.1 * (wanted - base).norm()


@pytest.mark.parametrize(("case", "family"), UNMADE)
def test_what_peft_cannot_make(bench, case, family):
    with pytest.raises((TypeError, ValueError, AttributeError), match=UNMADE[case, family]):
        make(case, family, bench(family).plain)


def test_every_type_is_in_the_table():
    types = {maker(NAMES["llama"]).peft_type for maker in CASES.values()}
    assert types == TUNERS.keys()


# --- mixed batches -----------------------------------------------------------------------------


def batches(family: str) -> list[list[str | None]]:
    """Batches of 16, 7, 2 and 1 rows, some of them of no adapter; every case is in one of them."""
    cases: list[str | None] = list(made_for(family))
    random.Random(family).shuffle(cases)
    made, taken = [], itertools.cycle(cases)
    for _ in range(math.ceil(len(cases) / sum(adapters for adapters, _ in SIZES))):
        for adapters, bare in SIZES:
            rows = [next(taken) for _ in range(adapters)] + [None] * bare
            random.Random(len(made)).shuffle(rows)
            made.append(rows)
    assert {name for rows in made for name in rows} == {*cases, None}
    return made


def assert_rows_alone(model: branchline.ServedModel, rows: Sequence[str | None]) -> torch.Tensor:
    """No row hangs on its neighbours, and rows of none are the base's; gives the logits."""
    ids = IDS[: len(rows)]
    together = model(ids, adapter_names=list(rows)).logits
    base = model(ids).logits
    for row, name in enumerate(rows):
        lone = [name if other == row else None for other in range(len(rows))]
        alone = model(ids, adapter_names=lone).logits
        assert same_bytes(together[row], alone[row]), (rows, name)
        for other in range(len(rows)):
            if other != row or name is None:
                assert same_bytes(alone[other], base[other]), (rows, name)
    return together


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_batches_of_all_types(bench, family, quant):
    it = bench(family)
    for rows in batches(family):
        for name in filter(None, rows):
            it.serve(quant, name)
        got = assert_rows_alone(it.served(quant), rows)
        for row, name in enumerate(rows):
            assert_equal_peft(quant, got[row], it.expected(quant, name)[row])


@pytest.mark.parametrize("policy", ["dynamic", "absorbed"])
def test_batches_in_the_dtypes_of_service(bench, policy):
    model = branchline.wrap(
        build("llama"), quant="fp8-static", calibration=[token_ids(4, 12, seed=9)], policy=policy,
        max_loras=ROWS, max_lora_rank=16,
    )  # fmt: skip
    for rows in batches("llama")[:2]:
        for name in filter(None, rows):
            model.adapters.load(name, bench("llama").folder(name))
        assert_rows_alone(model, rows)


# --- what takes more than a table --------------------------------------------------------------


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_heads_of_classifiers(family, quant, tmp_path):
    config = copy.deepcopy(CONFIGS[family])
    config.num_labels, config.pad_token_id = 3, 0
    torch.manual_seed(2)
    plain = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).eval()
    model = branchline.wrap(
        copy.deepcopy(plain), quant=quant, max_lora_rank=16, lora_dtype="float32",
        ignore=["score"],
    )  # fmt: skip
    base = plain
    if quant != "none":
        base = fake_quantized(plain, model)
        base.score = copy.deepcopy(plain.score)
    own = base(IDS[:2]).logits
    for case in ("lora", "ia3", "vera"):
        folder = tmp_path / case
        # PEFT saves a classifier's head whole, unasked.
        make(case, family, plain, "SEQ_CLS").save_pretrained(folder)
        model.adapters.load(case, folder)
        wanted = with_adapters(copy.deepcopy(base), {case: folder})(IDS[:2]).logits
        got = assert_rows_alone(model, [case, None])
        assert_equal_peft(quant, got[0], wanted[0])
        assert_equal_peft(quant, got[1], own[1])
        assert (wanted - own).norm() > 0.1 * own.norm()


@pytest.mark.parametrize("quant", QUANTS)
def test_a_vera_of_a_rank_above_all_slots(bench, quant):
    it = bench("llama")
    model = it.serve(quant, "vera-wide")
    assert any("rank 256" in note for note in model.adapters.info("vera-wide").notes)
    assert not any("rank" in note for note in it.serve(quant, "vera").adapters.info("vera").notes)

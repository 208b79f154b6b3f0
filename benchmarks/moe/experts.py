"""A layer of experts against the best of transformers' own implementations on this machine.

``python -m benchmarks.moe.experts [--short]``: eight random experts, of which two see each token,
with FP8 weights and inputs in blocks on our side, and the same weights in float32 and in bfloat16
on theirs.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from transformers import MixtralConfig, MixtralForCausalLM
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

import branchline
from benchmarks.harness import (
    Comparison,
    ResultsDifferError,
    alternate_all,
    begin,
    contract_for,
    eager_codes,
    random_bf16,
    report_speedup,
    say,
    timed,
)
from benchmarks.results import Result
from branchline.core import KEYS, QuantKey
from branchline.core.oracle import ActivationSemantics
from branchline.fusion.experts import RoutedExperts
from branchline.fusion.producers.activation import NativeActivation
from branchline.fusion.producers.base import Emission

EXPERTS, TOP_K = 8, 2
HIDDEN, INTERMEDIATE = 1024, 2048
TOKENS = (1, 16, 512)
TARGETS = {1: 2.0, 16: 2.0, 512: 0.9}
FUSED_TARGET = 5.0
ADAPTERS, RANK, ADAPTER_TOKENS = 4, 16, 16
ADAPTERS_TARGET = 1.4
#: Copies the weights of each pair's expert: beyond so many tokens that is gigabytes.
BATCHED_TOKENS = 16
#: What eight-bit inputs of both projections may make of the output, as a part of it.
INPUT_ERROR = 0.06


class Contest:
    """One layer's experts: ours, and theirs with the weights that ours stand for.

    Args:
        hidden: columns of the activation.
        intermediate: columns between the projections.
    """

    def __init__(self, hidden: int, intermediate: int) -> None:
        torch.manual_seed(0)
        self.config = MixtralConfig(
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=4,
            num_local_experts=EXPERTS,
            num_experts_per_tok=TOP_K,
            vocab_size=64,
        )
        self.hidden = hidden
        model = MixtralForCausalLM(self.config).bfloat16().eval()
        self.served = branchline.wrap(
            model, quant="fp8-block", max_loras=ADAPTERS, max_lora_rank=RANK
        )
        (ours,) = (m for m in model.modules() if isinstance(m, RoutedExperts))
        self.ours: RoutedExperts = ours
        self._theirs: dict[torch.dtype, Any] = {
            dtype: _dequantized(ours, self.config, dtype)
            for dtype in (torch.float32, torch.bfloat16)
        }

    def load_adapters(self) -> list[str]:
        """Give the served model `ADAPTERS` adapters on both projections; their names."""
        names = [f"adapter{index}" for index in range(ADAPTERS)]
        settings = LoraConfig(
            r=RANK,
            lora_alpha=RANK,
            target_modules=[],
            target_parameters=["gate_up_proj", "down_proj"],
            init_lora_weights=False,
        )
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            # Of what PEFT's parameters on experts do not do, which nobody asks for here.
            warnings.simplefilter("ignore")
            tuned = get_peft_model(MixtralForCausalLM(self.config), settings)
            for name in names:
                for key, parameter in tuned.named_parameters():
                    if "lora_" in key:
                        torch.nn.init.normal_(parameter, std=0.02)
                tuned.save_pretrained(f"{folder}/{name}")
                self.served.adapters.load(name, f"{folder}/{name}")
        return names

    def theirs(
        self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
    ) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
        """Each of their implementations, by name, on this input."""
        for dtype, module in self._theirs.items():
            inputs = x.to(dtype), index, weights.to(dtype)
            for name in ("eager", "batched_mm", "grouped_mm"):
                if name == "batched_mm" and x.shape[0] > BATCHED_TOKENS:
                    continue

                def forward(module=module, name=name, inputs=inputs) -> torch.Tensor:
                    module.config._experts_implementation = name
                    return module(*inputs)

                yield f"{name} in {str(dtype).removeprefix('torch.')}", forward


def _dequantized(ours: RoutedExperts, config: MixtralConfig, dtype: torch.dtype) -> MixtralExperts:
    made = MixtralExperts(config)
    made.gate_up_proj.data = ours.up.kernel.dequantized().to(dtype)
    made.down_proj.data = ours.down.kernel.dequantized().to(dtype)
    return made.eval()


def run(short: bool = False) -> list[Result]:
    """Print and return the ratios, with what is aimed at beside them."""
    hidden, intermediate = (256, 512) if short else (HIDDEN, INTERMEDIATE)
    begin(f"{EXPERTS} experts, {TOP_K} a token, {hidden}x{intermediate}, fp8-block")
    with torch.no_grad():
        contest = Contest(hidden, intermediate)
        say(f"up: {contest.ours.up.kernel.name}, down: {contest.ours.down.kernel.name}")
        results = [_compare(contest, tokens, short) for tokens in TOKENS]
        results.append(_adapters(contest, short))
        results += [_between(tokens * TOP_K, intermediate, short) for tokens in TOKENS]
    return results


def _input(tokens: int, hidden: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, hidden, generator=generator).bfloat16()
    scores = torch.randn(tokens, EXPERTS, generator=generator).softmax(1)
    weights, index = scores.topk(TOP_K, dim=1)
    return x, index, weights


def _compare(contest: Contest, tokens: int, short: bool) -> Result:
    x, index, weights = _input(tokens, contest.hidden)

    def ours() -> torch.Tensor:
        return contest.ours(x, index, weights)

    candidates = dict(contest.theirs(x, index, weights))
    for name, forward in candidates.items():
        _check(f"{tokens} tokens, {name}", ours(), forward())
    few = alternate_all(list(candidates.values()), 3 if tokens > 100 else 15)
    best = min(zip(few, candidates, strict=True), key=lambda found: min(found[0]))[1]
    rounds = 3 if short else 9 if tokens > 100 else 101
    wall, process = _both(ours, candidates[best], rounds)
    say(
        f"{tokens:>3} tokens: {statistics.median(wall.ours) * 1e3:8.2f} ms, {wall.ratio():.2f} "
        f"times as fast as {best} (aim {TARGETS[tokens]}; best runs {wall.ratio(min):.2f}, by "
        f"processor time {process.ratio():.2f})"
    )
    ours_seconds, theirs_seconds = map(statistics.median, (wall.ours, wall.theirs))
    against = ("transformers' fastest", theirs_seconds)
    return timed("experts", f"{tokens} tokens", ours_seconds, against, TARGETS[tokens])


def _check(label: str, ours: torch.Tensor, theirs: torch.Tensor) -> None:
    error = float((ours.double() - theirs.double()).norm() / theirs.double().norm())
    if not error < INPUT_ERROR:
        raise ResultsDifferError(f"{label}: ours is off by {error:.3f} of the output")


def _both(
    ours: Callable[[], object], theirs: Callable[[], object], rounds: int
) -> tuple[Comparison, Comparison]:
    """Both in turn: time on the wall, and the process's own, which a busy machine disturbs less."""
    wall: list[list[float]] = [[], []]
    process: list[list[float]] = [[], []]
    for measured in range(-2, rounds):
        for function, seconds, spent in zip((ours, theirs), wall, process, strict=True):
            started, used = time.perf_counter(), time.process_time()
            function()
            if measured >= 0:
                spent.append(time.process_time() - used)
                seconds.append(time.perf_counter() - started)
    return Comparison(*wall), Comparison(*process)


def _adapters(contest: Contest, short: bool) -> Result:
    """A batch of which every row has one of the adapters, against the same batch without any."""
    names = contest.load_adapters()
    inputs = _input(ADAPTER_TOKENS, contest.hidden)
    rows = [names[row % ADAPTERS] for row in range(ADAPTER_TOKENS)]

    def forward(names: list[str | None]) -> torch.Tensor:
        # A layer alone is handed tokens, not rows: one each.
        with contest.served.adapters.rows(names, tokens=[1] * ADAPTER_TOKENS):
            return contest.ours(*inputs)

    base: list[str | None] = [None] * ADAPTER_TOKENS
    if torch.equal(forward([*rows]), forward(base)):
        raise ResultsDifferError("the adapters change nothing")
    wall, process = _both(lambda: forward([*rows]), lambda: forward(base), 5 if short else 101)
    say(
        f"{ADAPTERS} adapters of rank {RANK} on experts, {ADAPTER_TOKENS} tokens: "
        f"{1 / wall.ratio():.2f} times the base (aim {ADAPTERS_TARGET}; best runs "
        f"{1 / wall.ratio(min):.2f}, by processor time {1 / process.ratio():.2f})"
    )
    ours, base_seconds = map(statistics.median, (wall.ours, wall.theirs))
    case = f"{ADAPTER_TOKENS} tokens, {ADAPTERS} adapters of rank {RANK}"
    return timed("experts", case, ours, ("our base", base_seconds), 1 / ADAPTERS_TARGET)


def _between(pairs: int, columns: int, short: bool) -> Result:
    """What lies between the two matmuls: SiLU(gate) * up and its codes, fused and in torch."""
    semantics = ActivationSemantics("silu", gated=True)
    key, producer = _block_key(), NativeActivation()
    gate, up = random_bf16(pairs, 2 * columns).chunk(2, -1)
    emission = Emission(contract_for(key))
    return report_speedup(
        "experts",
        f"between, {pairs}x{columns} against eager",
        lambda: producer.produce(semantics, (gate, up), emission).activation.codes,
        lambda: eager_codes(F.silu(gate) * up, key),
        5 if short else 41 if pairs > 100 else 301,
        FUSED_TARGET,
    )


def _block_key() -> QuantKey:
    return next(key for key in KEYS if key.granularity.size == 128)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.moe.experts", description=__doc__)
    parser.add_argument("--short", action="store_true", help="few repetitions and small experts")
    run(parser.parse_args().short)

"""Policy `auto` against every route: how much longer its choice takes than the best one.

At sites, on sizes that were not calibrated; and in a whole model, under each policy in turn.

    python -m benchmarks.policies.auto [--short] [--out FILE]
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import branchline
from benchmarks.harness import alternate_all, begin, say
from benchmarks.results import Result
from branchline.core.quant_key import FP8_DYNAMIC_TOKEN, FP8_STATIC_TENSOR
from branchline.core.report import ReportPart
from branchline.core.route import Route
from branchline.linear.batch_class import BatchClass
from branchline.linear.registry import RawReader
from branchline.policies.auto import CheapestPolicy
from branchline.policies.base import Policy, SiteState
from branchline.policies.cost import DeviceCosts
from branchline.policies.cost.measure import Bench, Case, Extent, calibrate
from branchline.policies.policy import make_policy

FIXED = ("dynamic", "dual", "absorbed")
#: None of these sizes is one that a calibration measures.
SITE_ROWS, SITE_COLUMNS, SITE_RANKS = (2, 16, 128, 1024), (1536, 5632), (16, 32)
TOKENS, ADAPTED = (4, 32, 128, 512), (0, 1, 4)
REQUESTS, RANK = 4, 16
#: What part of the best speed policy `auto` should keep.
SITE_AIM, MODEL_AIM = 0.95, 0.97


class Choice(ReportPart):
    """What one policy chose for one batch.

    Attributes:
        policy: its name.
        route: at a site; empty for a whole model.
        seconds: of what it chose, as in `Line.measured`.
        regret: how much longer than the best, relatively.
    """

    policy: str
    route: str = ""
    seconds: float
    regret: float


class Line(ReportPart):
    """One batch.

    Attributes:
        what: "activation" or "norm" for a site; "model".
        key: text of the `QuantKey`; empty for a model.
        tokens: of the batch.
        columns: of a site.
        adapter_tokens: those with an adapter.
        rank: of the adapters.
        measured: seconds by route, the median; or by policy for a model, the best run.
        choices: `auto` first.
    """

    what: str
    key: str = ""
    tokens: int
    columns: int = 0
    adapter_tokens: int
    rank: int
    measured: dict[str, float]
    choices: tuple[Choice, ...]


class Results(ReportPart):
    """All of it.

    Attributes:
        device: that was measured.
        threads: of torch.
        calibration_error: of the costs against what they were fitted to, relative, the median.
        regret: by policy, the mean over all batches at sites.
        worst: by policy, the highest of them.
        model_regret: of `auto` in the whole model, the mean; None where none was run.
        lines: all batches.
    """

    device: str
    threads: int
    calibration_error: float
    regret: dict[str, float]
    worst: dict[str, float]
    model_regret: float | None
    lines: tuple[Line, ...]


def measure(short: bool = False) -> Results:
    """Calibrate, then measure every route on other sizes."""
    rows, rounds = ((2, 16), 3) if short else (SITE_ROWS, 15)
    found = calibrate("cpu", Extent(rounds=3) if short else None)
    sites = tuple(_sites(found, rows, rounds))
    model = tuple(_model(found, (4, 32) if short else TOKENS, 3 if short else 9))
    by_policy: dict[str, list[float]] = {}
    for line in sites:
        for choice in line.choices:
            by_policy.setdefault(choice.policy, []).append(choice.regret)
    return Results(
        device=found.fingerprint.device,
        threads=torch.get_num_threads(),
        calibration_error=found.median_error,
        regret={name: statistics.mean(all_of) for name, all_of in by_policy.items()},
        worst={name: max(all_of) for name, all_of in by_policy.items()},
        model_regret=statistics.mean(line.choices[0].regret for line in model),
        lines=(*sites, *model),
    )


def run(short: bool = False) -> list[Result]:
    """Print and return what every policy's choices cost beyond the best ones."""
    begin("policy auto")
    found = measure(short)
    _tell(found)
    results = [
        _regret(name, "sites, on average", regret, SITE_AIM if name == "auto" else None)
        for name, regret in found.regret.items()
    ]
    results += [_regret(name, "sites, at worst", regret) for name, regret in found.worst.items()]
    if found.model_regret is not None:
        results.append(_regret("auto", "a whole model, on average", found.model_regret, MODEL_AIM))
    return results


def _regret(policy: str, where: str, regret: float, aim: float | None = None) -> Result:
    return Result(
        benchmark="auto",
        case=f"{policy}, {where}",
        value=100 * regret,
        unit="% longer",
        ratio=1 / (1 + regret),
        against="the best choice",
        aim=aim,
    )


def _tell(found: Results) -> None:
    for line in found.lines:
        times = ", ".join(f"{name} {1e6 * s:.1f}" for name, s in line.measured.items())
        auto = line.choices[0]
        what = f"{line.what} {line.key}".strip()
        size = f"{line.tokens}x{line.columns}" if line.columns else f"{line.tokens} tokens"
        adapted = f", {line.adapter_tokens} with rank {line.rank}" if line.adapter_tokens else ""
        say(
            f"{what}, {size}{adapted}: us {times}; auto {auto.route or 'in all'}, "
            f"{100 * auto.regret:.1f} % over the best"
        )
    for name, regret in found.regret.items():
        say(f"{name} at sites: {100 * regret:.1f} % over the best route on average, "
            f"{100 * found.worst[name]:.0f} % at worst")  # fmt: skip
    if found.model_regret is not None:
        say(f"auto in a model: {100 * found.model_regret:.1f} % over the best policy on average")


# --- sites -------------------------------------------------------------------------------------


def _sites(found: DeviceCosts, rows: tuple[int, ...], rounds: int) -> Iterator[Line]:
    bench = Bench(torch.device("cpu"), rounds)
    policies = {"auto": CheapestPolicy(found.model(bench.platform))}
    policies |= {name: make_policy(name) for name in FIXED}
    kinds, keys = ("activation", "norm"), (FP8_STATIC_TENSOR, FP8_DYNAMIC_TOKEN)
    for kind, key, m, k in itertools.product(kinds, keys, rows, SITE_COLUMNS):
        for adapted, rank in [(0, 0), *itertools.product((max(m // 4, 1), m), SITE_RANKS)]:
            case = Case(kind, key, m, k, adapted, rank)
            seconds = bench.measure(case)
            best = min(seconds.values())
            yield Line(
                what=kind,
                key=str(key),
                tokens=m,
                columns=k,
                adapter_tokens=adapted,
                rank=rank,
                measured={str(route): s for route, s in seconds.items()},
                choices=tuple(
                    Choice(
                        policy=name, route=str(route), seconds=seconds[route],
                        regret=seconds[route] / best - 1,
                    )
                    for name, policy in policies.items()
                    for route in (_chosen(policy, case),)
                ),
            )  # fmt: skip


def _chosen(policy: Policy, case: Case) -> Route:
    traffic = case.traffic
    readers = (RawReader("branch", "a", "x", case.rank),) if case.adapter_rows else ()
    batch = BatchClass.of(traffic.rows, traffic.adapter_rows)
    state = SiteState(
        readers, True, case.kind, case.columns, traffic.dtype, case.key, batch, traffic
    )
    return policy.choose(state)[0].route


# --- a whole model -----------------------------------------------------------------------------


def _model(found: DeviceCosts, tokens: tuple[int, ...], rounds: int) -> Iterator[Line]:
    with TemporaryDirectory() as folder:
        served = _served(Path(folder))
        auto = CheapestPolicy(found.model(served.planner.platform))
        policies = (auto, *map(make_policy, FIXED))
        for count, adapted in itertools.product(tokens, ADAPTED):
            seconds = _under_each(served, policies, count, adapted, rounds)
            best = min(seconds.values())
            yield Line(
                what="model",
                tokens=count,
                adapter_tokens=count * adapted // REQUESTS,
                rank=RANK,
                measured=seconds,
                choices=tuple(
                    Choice(policy=name, seconds=s, regret=s / best - 1)
                    for name, s in seconds.items()
                ),
            )


def _under_each(served, policies, tokens: int, adapted: int, rounds: int) -> dict[str, float]:
    names = [f"a{row}" if row < adapted else None for row in range(REQUESTS)]
    ids = torch.randint(3, 256, (1, tokens), generator=torch.Generator().manual_seed(tokens))
    each = [tokens // REQUESTS] * REQUESTS
    kept = {policy.name: {} for policy in policies}

    def forward(policy: Policy):
        served.planner.policy = policy
        # What is kept ready was planned by one policy.
        served.adapters._batches._kept = kept[policy.name]
        with served.adapters.rows(names, tokens=each):
            return served(input_ids=ids, use_cache=False)

    timed = alternate_all([lambda p=policy: forward(p) for policy in policies], rounds)
    # A whole forward is long enough to be disturbed in most rounds of a busy machine.
    return {p.name: min(s) for p, s in zip(policies, timed, strict=True)}


def _served(folder: Path):
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=512, intermediate_size=1536, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, vocab_size=256,
    )  # fmt: skip
    model = LlamaForCausalLM(config).bfloat16().eval()
    for number in range(REQUESTS):
        lora = LoraConfig(
            r=RANK, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM"
        )
        tuned = get_peft_model(LlamaForCausalLM(config), lora)
        tuned.save_pretrained(folder / f"a{number}")
    served = branchline.wrap(model, quant="fp8-dynamic", max_lora_rank=RANK)
    for number in range(REQUESTS):
        served.adapters.load(f"a{number}", folder / f"a{number}")
    return served


def main() -> None:
    """Measure, print, and write what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.policies.auto", description=__doc__)
    parser.add_argument("--short", action="store_true", help="few sizes and repetitions")
    parser.add_argument("--out", type=Path, help="write the results to this file, as JSON")
    given = parser.parse_args()
    begin("policy auto")
    found = measure(given.short)
    _tell(found)
    if given.out:
        given.out.write_text(found.model_dump_json(indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()

"""Grouped matmuls on a GPU: checked against the emulated kernel, then timed beside bfloat16.

Every kernel that the device has for a scheme is measured, not only the one that would be chosen.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from benchmarks.gpu.timing import alternate
from benchmarks.harness import SCALE, ResultsDifferError, random_bf16, say
from branchline.core.platform import detect_platform
from branchline.core.scheme import SCHEMES
from branchline.linear.contract import InputContract, InputScale
from branchline.linear.experts.kernels.base import GroupedConfig, QuantizedGroupedKernel
from branchline.linear.experts.kernels.each import EmulatedExperts
from branchline.linear.experts.kernels.selection import GROUPED_KERNELS
from branchline.linear.experts.pairs import Pairs, combine_defined
from branchline.linear.experts.weight import ExpertsWeight
from branchline.linear.kernels.base import LinearConfig
from branchline.linear.quantizers import quantize_input

NAMES = ("fp8-dynamic", "fp8-block")
#: The two projections of many small experts, and one of few large ones.
LAYERS = ("128x8x1536x2048", "128x8x2048x768", "8x2x14336x4096")
TOKENS = (1, 16, 512, 4096)
#: Hopper adds FP8 products with 14 bits or so: a part of the sum of all magnitudes gets lost.
_ACCUMULATION = 2.0**-10
_NAME = "benchmark"


class Layer(NamedTuple):
    """Sizes of one projection.

    Attributes:
        experts: E.
        top_k: experts of a token.
        channels: N.
        columns: K.
    """

    experts: int
    top_k: int
    channels: int
    columns: int

    @classmethod
    def parse(cls, text: str) -> Layer:
        """Of "ExkxNxK"."""
        return cls(*map(int, text.split("x")))


def run(
    device: str, tokens: tuple[int, ...], layers: tuple[str, ...], rounds: int
) -> Iterator[dict[str, Any]]:
    """Every layer, scheme and kernel at every number of tokens; prints and yields one line each.

    Args:
        device: where.
        tokens: numbers of tokens, T.
        layers: "ExkxNxK" each.
        rounds: of every time.

    Raises:
        ResultsDifferError: a kernel computes something else than the emulated one, or a token's
            bytes hang on how many others there are.
    """
    for text in layers:
        layer = Layer.parse(text)
        experts, _, n, k = layer
        flat = random_bf16(experts * n, k).float() / k**0.5
        plain = flat.bfloat16().view(experts, n, k).to(device)
        for name in NAMES:
            weight = ExpertsWeight.from_float(plain, name, SCHEMES[name].weight)
            emulated = EmulatedExperts(
                weight, None, _contract(EmulatedExperts, layer, name, device)
            )
            for kernel in _kernels(weight, layer, name, device):
                for number in tokens:
                    line = _measure(kernel, emulated, plain, layer, number, rounds)
                    line = {"scheme": name, **line}
                    say(_row(line))
                    yield line


def _contract(
    kernel: type[QuantizedGroupedKernel], layer: Layer, name: str, device: str
) -> InputContract:
    key = kernel.consumes(_config(layer, name))
    assert key is not None
    scale = torch.tensor([SCALE], device=device)
    return InputContract(key, InputScale.checked(scale, _NAME) if key.static else None)


def _config(layer: Layer, name: str) -> GroupedConfig:
    return GroupedConfig(layer.experts, LinearConfig(layer.columns, layer.channels, SCHEMES[name]))


def _kernels(
    weight: ExpertsWeight, layer: Layer, name: str, device: str
) -> list[QuantizedGroupedKernel]:
    platform, config = detect_platform(device), _config(layer, name)
    made = []
    for kernel in GROUPED_KERNELS:
        verdict = kernel.serves(config, platform)
        if not verdict.ok:
            say(f"{name}: no {kernel.name}: {verdict.reason}")
        elif not kernel.emulated and kernel.consumes(config) is not None:
            made.append(kernel(weight, None, _contract(kernel, layer, name, device)))
    return made


def _measure(
    kernel: QuantizedGroupedKernel,
    emulated: EmulatedExperts,
    plain: torch.Tensor,
    layer: Layer,
    tokens: int,
    rounds: int,
) -> dict[str, Any]:
    device = plain.device
    x = random_bf16(tokens, layer.columns, seed=tokens).to(device)
    scores = random_bf16(tokens, layer.experts, seed=tokens + 1).float().to(device)
    weights, index = scores.topk(layer.top_k, dim=1)
    pairs = Pairs.of(index, layer.experts)
    codes = quantize_input(x, kernel.contract, _NAME)
    out = kernel.multiply(codes, pairs, by_token=True)
    wanted = emulated.apply(x, pairs, _NAME, by_token=True).float()
    _refuse_other_results(kernel, x, plain, pairs, out, wanted)
    if kernel.name.startswith("triton"):
        _refuse_other_bytes(kernel, x, index, out, pairs)
    rows, across = x[pairs.token], plain.transpose(1, 2)
    times = alternate(
        (
            lambda: kernel.multiply(codes, pairs, by_token=True),
            lambda: F.grouped_mm(rows, across, offs=pairs.offsets[1:]),
            lambda: kernel.combine(out, weights, pairs),
            lambda: combine_defined(out, weights, pairs),
        ),
        device.type,
        rounds,
    )
    return {
        "kernel": kernel.name,
        "tokens": tokens,
        **layer._asdict(),
        "microseconds": times[0] * 1e6,
        "bfloat16_microseconds": times[1] * 1e6,
        "combine_microseconds": times[2] * 1e6,
        "eager_combine_microseconds": times[3] * 1e6,
        "teraflops": 2e-12 * len(pairs) * layer.channels * layer.columns / times[0],
        "weight_bytes": kernel.weight_bytes,
    }


def _refuse_other_results(
    kernel: QuantizedGroupedKernel,
    x: torch.Tensor,
    plain: torch.Tensor,
    pairs: Pairs,
    out: torch.Tensor,
    wanted: torch.Tensor,
) -> None:
    norms = torch.stack([own.float().norm(dim=1) for own in plain])
    lengths = x.float().norm(dim=1, keepdim=True)[pairs.token] * norms[pairs.expert]
    excess = (out.float() - wanted).abs() - wanted.abs() * 2.0**-7 - lengths * _ACCUMULATION
    # Written so that a NaN is refused as well.
    if not bool((excess <= 0).all()):
        worst = excess.max().item()
        raise ResultsDifferError(
            f"{kernel.name} {tuple(plain.shape)}: off by {worst} more than allowed"
        )


def _refuse_other_bytes(
    kernel: QuantizedGroupedKernel,
    x: torch.Tensor,
    index: torch.Tensor,
    out: torch.Tensor,
    pairs: Pairs,
) -> None:
    """The last token alone, and the last few, have the bytes that they have among all."""
    for few in (1, 9, 65):
        some = Pairs.of(index[-few:], pairs.experts)
        alone = kernel.apply(x[-few:], some, _NAME, by_token=True)
        among = out[pairs.position[-few * pairs.top_k :]]
        if not torch.equal(alone[some.position], among):
            raise ResultsDifferError(f"{kernel.name}: {few} tokens alone have other bytes")


def _row(line: dict[str, Any]) -> str:
    ours, theirs = line["microseconds"], line["bfloat16_microseconds"]
    shape = f"{line['tokens']} x {line['experts']}x{line['channels']}x{line['columns']}"
    label = f"{shape} {line['scheme']} {line['kernel']}"
    return (
        f"{label:<56}{ours:9.1f} us {line['teraflops']:8.1f} TFLOPS  "
        f"{theirs / ours:6.2f} times as fast as bfloat16; choices added in "
        f"{line['combine_microseconds']:.1f} us, by torch in "
        f"{line['eager_combine_microseconds']:.1f} us"
    )

"""Which norm a module computes is proved by running it; near-misses must not pass (I4)."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P
from transformers.models.phi3.modeling_phi3 import Phi3RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from branchline.core.oracle import NormSemantics
from branchline.fusion.identify import identify_norm

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = [BF16, FP16, FP32]


COLUMNS = 96
NORMS = {
    "llama": (LlamaRMSNorm, "llama"),
    "qwen3": (Qwen3RMSNorm, "llama"),
    "phi3": (Phi3RMSNorm, "llama"),
    "gemma3": (Gemma3RMSNorm, "gemma"),
}


def weighted(module: nn.Module, dtype: torch.dtype = BF16) -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    module.weight.data = torch.rand(module.weight.shape, generator=generator) + 0.25
    if getattr(module, "bias", None) is not None:
        module.bias.data = torch.randn(module.bias.shape, generator=generator)
    return module.to(dtype).eval()


def norm_of(module: nn.Module, columns: int = COLUMNS, dtype: torch.dtype = BF16):
    finding = identify_norm(module, columns, dtype)
    assert (finding.semantics is None) == bool(finding.reason)
    return finding.semantics


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("eps", [1e-6, 1e-5])
@pytest.mark.parametrize("name", NORMS)
def test_norms_of_transformers(name, eps, dtype):
    cls, order = NORMS[name]
    assert norm_of(weighted(cls(COLUMNS, eps), dtype), dtype=dtype) == NormSemantics(order, eps)


@pytest.mark.parametrize("columns", [3, 7, 576])
@pytest.mark.parametrize("name", NORMS)
def test_norms_of_any_width(name, columns):
    cls, order = NORMS[name]
    assert norm_of(weighted(cls(columns, 1e-6)), columns) == NormSemantics(order, 1e-6)


@pytest.mark.parametrize("name", NORMS)
def test_freshly_initialised_norms(name):
    cls, order = NORMS[name]
    assert norm_of(cls(COLUMNS, 1e-6).to(BF16)) == NormSemantics(order, 1e-6)


class Norm(nn.Module):
    """RMSNorm in Llama's order, with places to go wrong."""

    def __init__(self, columns: int = COLUMNS, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(columns))
        self.eps = eps

    def before(self, x):
        return x

    def normed(self, x):
        x32 = x.float()
        return x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps)

    def scaled(self, x, dtype):
        return self.weight * x.to(dtype)

    def after(self, x):
        return x

    def forward(self, x):
        return self.after(self.scaled(self.normed(self.before(x)), x.dtype))


def variant(**methods) -> type[Norm]:
    return type("Variant", (Norm,), methods)


def test_the_unchanged_variant_is_found():
    assert norm_of(weighted(Norm())) == NormSemantics("llama", 1e-6)


def mean_subtracted(self, x):
    x32 = x.float()
    x32 = x32 - x32.mean(-1, keepdim=True)
    return x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps)


def eps_outside(self, x):
    x32 = x.float()
    return x32 / (x32.pow(2).mean(-1, keepdim=True).sqrt() + self.eps)


def eps_elsewhere(self, x):
    x32 = x.float()
    return x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + 1e-5)


def l2(self, x):
    return F.normalize(x.float(), dim=-1)


NORM_NEAR_MISSES = {
    "one rounding": {"scaled": lambda self, x, dtype: (self.weight.float() * x).to(dtype)},
    "1 + w in two roundings": {"scaled": lambda self, x, dtype: (1 + self.weight) * x.to(dtype)},
    "mean subtraction": {"normed": mean_subtracted},
    "another eps than it says": {"normed": eps_elsewhere},
    "eps outside of the root": {"normed": eps_outside},
    "no mean": {"normed": l2},
    "doubled": {"after": lambda self, x: x * 2},
    "scaled a little": {"after": lambda self, x: x * 1.01},
    "shifted": {"after": lambda self, x: x + 0.01},
    "output clamped": {"after": lambda self, x: x.clamp(-2, 2)},
    "input clamped": {"before": lambda self, x: x.clamp(-100, 100)},
    "squared in bfloat16": {
        "normed": lambda self, x: (
            x.float() * torch.rsqrt(x.pow(2).float().mean(-1, keepdim=True) + self.eps)
        )
    },
}


@pytest.mark.parametrize("name", NORM_NEAR_MISSES)
def test_norm_near_misses_are_refused(name):
    assert norm_of(weighted(variant(**NORM_NEAR_MISSES[name])())) is None


NORM_LIMITS = {
    "output clamped at 10": {"after": lambda self, x: x.clamp(-10, 10)},
    "input clamped at 65504": {"before": lambda self, x: x.clamp(-65504, 65504)},
    "nan removed before": {"before": lambda self, x: torch.nan_to_num(x)},
    "nan removed after": {"after": lambda self, x: torch.nan_to_num(x)},
}


@pytest.mark.parametrize("name", NORM_LIMITS)
def test_norm_limits_count(name):
    # A row with one huge element reaches sqrt(columns), far beyond a Gaussian's largest.
    columns = 1024
    assert norm_of(weighted(variant(**NORM_LIMITS[name])(columns)), columns) is None


def over_dimension_one(self, x):
    x32 = x.float()
    return x32 * torch.rsqrt(x32.pow(2).mean(1, keepdim=True) + self.eps)


NORM_SHAPES = {
    "dimension 1": {"normed": over_dimension_one},
    "flattened": {"after": lambda self, x: x.flatten(0, -2)},
}


@pytest.mark.parametrize("name", NORM_SHAPES)
def test_a_norm_that_is_one_on_matrices_only_is_refused(name):
    assert norm_of(weighted(variant(**NORM_SHAPES[name])())) is None


# --- LayerNorm ----------------------------------------------------------------------------------

LAYER_NORMS = {
    "torch": (nn.LayerNorm, "layer_norm", True),
    "torch without bias": (lambda k, eps: nn.LayerNorm(k, eps, bias=False), "layer_norm", False),
    "nemotron": (NemotronLayerNorm1P, "layer_norm_1p", True),
    "cohere": (CohereLayerNorm, "layer_norm", False),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("eps", [1e-6, 1e-5])
@pytest.mark.parametrize("name", LAYER_NORMS)
def test_layer_norms(name, eps, dtype):
    make, order, bias = LAYER_NORMS[name]
    expected = NormSemantics(order, eps, bias=bias)
    assert norm_of(weighted(make(COLUMNS, eps=eps), dtype), dtype=dtype) == expected
    assert norm_of(make(COLUMNS, eps=eps).to(dtype), dtype=dtype) == expected


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("columns", [3, 7, 576, 4096])
@pytest.mark.parametrize("name", LAYER_NORMS)
def test_layer_norms_of_any_width(name, columns, dtype):
    make, order, bias = LAYER_NORMS[name]
    module = weighted(make(columns, eps=1e-5), dtype)
    assert norm_of(module, columns, dtype) == NormSemantics(order, 1e-5, bias=bias)


class Centred(nn.Module):
    """LayerNorm as CUDA computes it, with places to go wrong."""

    def __init__(self, columns: int = COLUMNS, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(columns))
        self.bias = nn.Parameter(torch.zeros(columns))
        self.eps = eps

    def before(self, x):
        return x

    def normed(self, x):
        x = x.float()
        mean = x.mean(-1, keepdim=True)
        variance = (x - mean).square().mean(-1, keepdim=True)
        return (x - mean) * torch.rsqrt(variance + self.eps)

    def scaled(self, x, dtype):
        return (x * self.weight.float() + self.bias.float()).to(dtype)

    def after(self, x):
        return x

    def forward(self, x):
        return self.after(self.scaled(self.normed(self.before(x)), x.dtype))


def centred(**methods) -> nn.Module:
    return weighted(type("Variant", (Centred,), methods)())


@pytest.mark.parametrize("columns", [7, 96, 1024])
def test_the_order_of_the_float32_sums_is_no_part_of_a_layer_norm(columns):
    expected = NormSemantics("layer_norm", 1e-5, bias=True)
    assert norm_of(weighted(Centred(columns)), columns) == expected

    def as_on_the_cpu(self, x):
        x = x.float()
        mean = x.mean(-1, keepdim=True)
        inverse = torch.rsqrt(x.var(-1, unbiased=False, keepdim=True) + self.eps)
        return x * inverse + (-mean * inverse)

    def backwards(self, x):
        return Centred.normed(self, x.flip(-1)).flip(-1)

    for normed in (as_on_the_cpu, backwards):
        module = type("Variant", (Centred,), {"normed": normed})(columns)
        assert norm_of(weighted(module), columns) == expected


def unbiased(self, x):
    x = x.float()
    inverse = torch.rsqrt(x.var(-1, keepdim=True) + self.eps)
    return (x - x.mean(-1, keepdim=True)) * inverse


def outside(self, x):
    x = x.float()
    spread = x.var(-1, unbiased=False, keepdim=True).sqrt() + self.eps
    return (x - x.mean(-1, keepdim=True)) / spread


def another_eps(self, x):
    return F.layer_norm(x.float(), x.shape[-1:], eps=2 * self.eps)


LAYER_NORM_NEAR_MISSES = {
    "rounded before the weight": {
        "scaled": lambda self, x, dtype: (
            self.weight.float() * x.to(dtype).float() + self.bias.float()
        ).to(dtype)
    },
    "rounded before the bias": {
        "scaled": lambda self, x, dtype: (self.weight.float() * x).to(dtype) + self.bias
    },
    "no mean": {
        "normed": lambda self, x: (
            x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps)
        )
    },
    "1 + w unrounded": {
        "scaled": lambda self, x, dtype: ((1 + self.weight.float()) * x + self.bias.float()).to(
            dtype
        )
    },
    "bias subtracted": {
        "scaled": lambda self, x, dtype: (x * self.weight.float() - self.bias.float()).to(dtype)
    },
    "bias left out": {"scaled": lambda self, x, dtype: (x * self.weight.float()).to(dtype)},
    "unbiased variance": {"normed": unbiased},
    "eps outside of the root": {"normed": outside},
    "another eps than it says": {"normed": another_eps},
    "scaled a little": {"after": lambda self, x: x * 1.01},
    "shifted": {"after": lambda self, x: x + 0.01},
    "output clamped": {"after": lambda self, x: x.clamp(-4, 4)},
    "input clamped": {"before": lambda self, x: x.clamp(-100, 100)},
    "input clamped far out": {"before": lambda self, x: x.clamp(-65504, 65504)},
    "nan removed before": {"before": lambda self, x: torch.nan_to_num(x)},
    "nan removed after": {"after": lambda self, x: torch.nan_to_num(x)},
}


@pytest.mark.parametrize("name", LAYER_NORM_NEAR_MISSES)
def test_layer_norm_near_misses_are_refused(name):
    assert norm_of(centred(**LAYER_NORM_NEAR_MISSES[name])) is None


def test_layer_norm_1p_is_told_by_the_rounding_of_its_weight():
    module = weighted(NemotronLayerNorm1P(COLUMNS))
    plain = nn.LayerNorm(COLUMNS, eps=module.eps).to(BF16)
    plain.weight.data, plain.bias.data = module.weight.data + 1, module.bias.data
    assert norm_of(module).order == "layer_norm_1p"
    assert norm_of(plain).order == "layer_norm"


REFUSALS = {
    "no weight": (nn.LayerNorm(COLUMNS, elementwise_affine=False), "has no weight"),
    "two dimensions": (nn.LayerNorm((2, COLUMNS)), "one per column"),
    "float32": (nn.LayerNorm(COLUMNS, dtype=FP32), "torch.float32"),
    "groups": (nn.GroupNorm(2, COLUMNS // 2), "one per column"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_layer_norms_are_refused_by_what_they_lack(name):
    module, reason = REFUSALS[name]
    if name != "float32":
        module = module.to(BF16)
    assert reason in identify_norm(module, COLUMNS, BF16).reason


def test_a_bias_of_another_dtype_is_refused_by_name():
    module = nn.LayerNorm(COLUMNS).to(BF16)
    module.bias.data = module.bias.data.float()
    assert "bias" in identify_norm(module, COLUMNS, BF16).reason


# --- other norms --------------------------------------------------------------------------------


def test_torch_rms_norm_is_refused_only_where_its_weight_tells():
    plain = nn.RMSNorm(COLUMNS, eps=1e-6).to(BF16)
    assert norm_of(plain) == NormSemantics("llama", 1e-6)
    assert norm_of(weighted(nn.RMSNorm(COLUMNS, eps=1e-6))) is None


def test_a_float32_weight_under_a_bfloat16_activation_is_refused_by_name():
    finding = identify_norm(weighted(LlamaRMSNorm(COLUMNS), FP32), COLUMNS, BF16)
    assert finding.semantics is None
    assert "float32" in finding.reason
    assert "bfloat16" in finding.reason


@pytest.mark.parametrize(
    "module",
    [
        nn.Embedding(COLUMNS, COLUMNS),
        nn.PReLU(COLUMNS),
        nn.PReLU(),
        nn.BatchNorm1d(COLUMNS),
        nn.Linear(COLUMNS, 1),
        nn.Identity(),
    ],
    ids=lambda m: type(m).__name__,
)
def test_other_modules_are_refused(module):
    assert norm_of(module.to(BF16).eval()) is None


def test_another_width_is_refused():
    assert norm_of(weighted(LlamaRMSNorm(64)), 96) is None


class Residual(Norm):
    def forward(self, x, residual):
        return super().forward(x + residual)


class Pair(Norm):
    def forward(self, x):
        return super().forward(x), x


@pytest.mark.parametrize("cls", [Residual, Pair])
def test_norms_of_another_signature_are_refused_not_fatal(cls):
    assert norm_of(weighted(cls())) is None

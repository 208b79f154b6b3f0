"""Models with experts, wrapped: outputs, layouts, calibration, audit, compiled, in the engine."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import branchline
from branchline.core.errors import ConfigError
from branchline.core.route import Route
from branchline.fusion.experts import RoutedExperts
from branchline.linear.experts.find import find_experts
from branchline.linear.experts.layer import ExpertsLinear
from branchline.serving.engine.engine import Engine
from branchline.serving.inspect import inspect_source
from branchline.serving.self_check import check_numerics
from branchline.serving.serve_config import EngineConfig
from tests.helpers import same_bytes
from tests.moe.models import MODELS, build, token_ids
from tests.serving.engine.conftest import Client

IDS = token_ids(2, 9)


@pytest.fixture(scope="module", params=MODELS)
def pair(request):
    """The float model's logits, those of it wrapped as it is, and the model wrapped in blocks."""
    model = MODELS[request.param]()
    with torch.no_grad():
        wanted = model(IDS).logits
        unquantised = branchline.wrap(model, quant="none")
        got = unquantised(IDS).logits
        unquantised.unwrap()
    return request.param, (got, wanted), branchline.wrap(model, quant="fp8-block")


def experts_of(model: nn.Module) -> list[RoutedExperts]:
    return [module for module in model.modules() if isinstance(module, RoutedExperts)]


def near(got: torch.Tensor, wanted: torch.Tensor, share: float) -> bool:
    error = (got.float() - wanted.float()).norm() / wanted.float().norm()
    return bool(error <= share)


# --- what every model does ---------------------------------------------------------------------


def test_unquantised_logits_are_the_models(pair):
    """Of quantised ones a router makes other choices: experts themselves are compared elsewhere."""
    _, (got, wanted), _ = pair
    assert near(got, wanted, 0.02)


def test_every_layer_takes_adapters(pair):
    """Experts compute each row by itself, so that what lies behind them keeps its rows apart."""
    _, _, served = pair
    assert [layer.name for layer in served.registry if not layer.takes_branches] == []
    assert any(isinstance(layer, ExpertsLinear) for layer in served.registry)


def test_the_audit_names_experts_sites_and_reasons(pair):
    _, _, served = pair
    served(IDS)
    report = served.audit()
    experts = experts_of(served.model)
    sites = {site.site: site for site in report.sites}
    for routed in experts:
        site = sites[routed.site.facts.name]
        assert site.consumers == (routed.down.name,)
        assert site.semantics is not None
        assert site.routes[0].route == "fused"
        assert site.ran.get("fused", 0) >= 1
        assert not site.fallbacks
    kernels = [kernel for kernel in report.kernels if kernel.experts]
    assert sum(kernel.linears for kernel in kernels) == 2 * len(experts)
    assert {kernel.experts for kernel in kernels} == {experts[0].form.experts}
    assert sum(k.linears for k in report.kernels) == len(served.registry)
    fed_raw = {entry.name: entry.reason for entry in report.unsited}
    assert all("router" in fed_raw[routed.up.name] for routed in experts)
    assert report.unwrapped == ()
    text = str(report)
    assert f"{2 * len(experts)} projections of {experts[0].form.experts} experts each" in text


def test_the_self_check_compares_experts(pair):
    _, _, served = pair
    readiness = check_numerics(served)
    assert readiness.ok, readiness.differences
    fused = served.planner.plan({}).count(Route.FUSED)
    assert readiness.sites == fused > 0


def test_parameters_are_counted_as_before(pair):
    kind, _, served = pair
    before = sum(parameter.numel() for parameter in MODELS[kind]().parameters())
    assert served.get_model_status().total_params == before


def test_a_compiled_block_gives_the_same_bytes(pair):
    _, _, served = pair
    (first, *_) = experts_of(served.model)
    x = torch.randn(7, first.form.hidden, dtype=torch.bfloat16)
    index = torch.tensor([[t % 4, (t + 1) % 4] for t in range(7)])
    weights = torch.rand(7, 2)
    torch._dynamo.reset()
    compiled = torch.compile(first, fullgraph=True, dynamic=True, backend="aot_eager")
    assert same_bytes(compiled(x, index, weights), first(x, index, weights))
    assert compiled(x[:0], index[:0], weights[:0]).shape == (0, first.form.hidden)


# --- wrapping and unwrapping -------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_unwrap_gives_the_model_back_byte_for_byte(kind):
    model = MODELS[kind]()
    modules = {name: type(module) for name, module in model.named_modules()}
    state = copy.deepcopy(model.state_dict())
    wanted = model(IDS).logits
    seen = []
    hooked = model.model.layers[0].mlp.experts
    hooked.register_forward_hook(lambda *given: seen.append(given[0]))
    served = branchline.wrap(model, quant="fp8-dynamic")
    served(IDS)
    assert [type(module) for module in seen] == [RoutedExperts]
    assert {name for name, _ in served.model.named_modules()} > set(modules)
    assert served.unwrap() is model
    assert {name: type(module) for name, module in model.named_modules()} == modules
    assert all(same_bytes(value, state[name]) for name, value in model.state_dict().items())
    assert same_bytes(model(IDS).logits, wanted)
    assert seen[-1] is hooked


def test_ignored_experts_and_requantising_them():
    served = branchline.wrap(MODELS["mixtral"](), ignore=["*.experts.down_proj"])
    up, down = experts_of(served.model)[0].up, experts_of(served.model)[0].down
    assert up.kernel.contract.key is not None
    assert down.kernel.contract.key is None
    plan = served.planner.plan({}).sites[experts_of(served.model)[0].site.index]
    assert plan.route == Route.UNFUSED
    assert plan.reason == f"takes no quantised input: {down.name} (kernel float)"
    with pytest.raises(ConfigError, match="projection of experts"):
        served.requantize(up.name, "fp8-block")


# --- calibration -------------------------------------------------------------------------------


def ranges(prompts, **settings) -> dict[str, float]:
    model = build("mixtral", num_hidden_layers=1, **settings)
    served = branchline.wrap(model, quant="fp8-static", calibration=prompts)
    return dict(served.calibration.input_amax)


@pytest.mark.parametrize("top_k", [1, 2])
def test_padding_counts_in_no_projections_range(top_k):
    """Of one choice a token, the second projection's rows are as many as the mask's, and sorted."""
    ids = token_ids(2, 6)
    padded = {
        "input_ids": torch.cat([torch.zeros(2, 2, dtype=ids.dtype), ids], 1),
        "attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1]] * 2),
        "position_ids": torch.tensor([[0, 0, 0, 1, 2, 3, 4, 5]] * 2),
    }
    settings = {"num_experts_per_tok": top_k}
    whole, some = ranges([{"input_ids": ids}], **settings), ranges([padded], **settings)
    assert whole.keys() == some.keys()
    experts = [name for name in whole if "experts" in name]
    assert len(experts) == 2
    for name in experts:
        assert some[name] == pytest.approx(whole[name], rel=0.02)


def test_padding_would_have_shown():
    """The rows that are left out above are others than those that count."""
    ids = token_ids(2, 6)
    padded = torch.cat([torch.zeros(2, 2, dtype=ids.dtype), ids], 1)
    whole, all_rows = ranges([{"input_ids": ids}]), ranges([{"input_ids": padded}])
    assert any(all_rows[n] > 1.02 * whole[n] for n in whole if "experts" in n)


# --- what is left alone, and said so -----------------------------------------------------------


def test_experts_that_compute_something_else_are_listed_and_served_as_they_are():
    model = MODELS["mixtral"]()
    kind = type(model.model.layers[0].mlp.experts)

    class Own(kind):
        def forward(self, x, index, weights):
            return super().forward(x, index, weights) * 0.5

    model.model.layers[1].mlp.experts.__class__ = Own
    wanted = model(IDS).logits
    served = branchline.wrap(model, quant="fp8-block")
    assert near(served(IDS).logits, wanted, 0.25)
    assert len(experts_of(served.model)) == 1
    (left,) = served.audit().unwrapped
    assert left.name == "model.layers.1.mlp.experts"
    assert "computes something else" in left.reason
    assert "Own" in str(served.audit())


# --- generation, the engine, inspect -----------------------------------------------------------


def test_generation_is_greedy_over_the_served_logits():
    served = branchline.wrap(MODELS["qwen3_moe"](), quant="fp8-block")
    ids = token_ids(2, 5)
    out = served.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None)
    for step in range(5, 9):
        assert torch.equal(served(out[:, :step]).logits[:, -1].argmax(-1), out[:, step])


@pytest.mark.parametrize("kind", ["mixtral", "minimax_m2"])
def test_the_engine_serves_packed_batches(kind):
    served = branchline.wrap(MODELS[kind](), quant="fp8-block")
    config = EngineConfig(max_num_seqs=4, max_model_len=64, num_gpu_blocks_override=64)
    prompts = [token_ids(1, n, seed=n)[0].tolist() for n in (3, 9, 17)]
    engine = Engine(served, config)
    engine.start()
    try:
        client = Client(engine)
        answers = [client.ask(prompt, max_tokens=6) for prompt in prompts]
        together = [answer.wait().ids for answer in answers]
        alone = [client.ask(prompt, max_tokens=6).wait().ids for prompt in prompts]
    finally:
        engine.stop(0)
    assert together == alone
    # Attention rounds otherwise in the engine, and a router may then choose otherwise: one token.
    for prompt, ids in zip(prompts, together, strict=True):
        assert served(torch.tensor([prompt])).logits[0, -1].argmax() == ids[0]


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss", "nemotron_h"])
def test_inspect_lists_experts(kind, tmp_path):
    model = MODELS[kind]()
    model.save_pretrained(tmp_path)
    report = inspect_source(str(tmp_path))
    assert report.problem is None
    experts = {entry.name: entry for entry in report.linears if entry.experts}
    forms = {name: found.form for name, found in find_experts(model)[0].items()}
    assert experts.keys() == {
        f"{name}.{projection}"
        for name, form in forms.items()
        for projection in (form.up_name, form.down_name)
    }
    for name, form in forms.items():
        entry = experts[f"{name}.down_proj"]
        assert (entry.experts, entry.shape) == (form.experts, form.shape("down_proj")[1:])
        assert entry.left is None

"""`torch.compile`: one frame for all token counts, and no recompile when adapters move."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from tests.models import token_ids


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


SETTINGS = [
    {"quant": quant, "policy": policy}
    for quant in ("fp8-static", "fp8-dynamic")
    for policy in ("dynamic", "dual", "absorbed")
]


@pytest.mark.parametrize(
    ("family_name", "settings"),
    [
        *(("llama", settings) for settings in SETTINGS),
        ("phi3", SETTINGS[0]),
        ("nemotron", SETTINGS[5]),
        ("gemma3", SETTINGS[2]),
    ],
    ids=lambda v: v if isinstance(v, str) else "-".join(v.values()),
)
def test_one_frame_for_an_mlp_whatever_is_live(make_family, family_name, settings):
    family = make_family(family_name)
    served = family.served(**settings)
    mlp = served.model.model.layers[0].mlp
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(mlp, fullgraph=True, dynamic=True, backend=counter)
    for tokens in (17, 31, 63):
        x = torch.randn(3, tokens, 64).to(torch.bfloat16)
        assert torch.equal(compiled(x), mlp(x))
        for names in (["mlp", None, "all"], ["attn", "attn", None], [None, None, None]):
            with served.adapters.rows(names):
                assert torch.equal(compiled(x), mlp(x))
    served.adapters.swap("mlp", family.folders["all"])
    served.adapters.unload("all")
    with served.adapters.rows(["mlp", None, "attn"]):
        assert torch.equal(compiled(x), mlp(x))
    assert counter.frame_count == 1


@pytest.mark.parametrize("settings", SETTINGS[::2], ids=lambda s: "-".join(s.values()))
def test_the_whole_model_compiles_once(llama, settings):
    served = llama.served(**settings)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(served.model, fullgraph=True, dynamic=True, backend=counter)
    ids = token_ids(3, 9)
    frames = None
    for names in ([None] * 3, ["attn", None, "mlp"], ["all", "all", "all"]):
        with served.adapters.rows(names):
            assert torch.equal(compiled(ids).logits, served.model(ids).logits)
        frames = frames or counter.frame_count
    assert counter.frame_count == frames


def test_fifty_swaps_and_evictions_compile_nothing_and_move_nothing(llama):
    served = llama.wrap(quant="fp8-dynamic", max_loras=2)
    folders = list(llama.folders.values())
    for name in ("one", "two", "three"):
        served.adapters.load(name, llama.folders["all"])
    counter = CompileCounterWithBackend("aot_eager")
    mlp = served.model.model.layers[0].mlp
    compiled = torch.compile(mlp, fullgraph=True, dynamic=True, backend=counter)
    x = torch.randn(2, 5, 64).to(torch.bfloat16)
    low_rank = served.registry.layers["model.layers.0.mlp.down_proj"].branch.low_rank
    addresses = (low_rank.a.data_ptr(), low_rank.b.data_ptr())
    for step in range(50):
        name = ("one", "two", "three")[step % 3]
        served.adapters.swap(name, folders[step % len(folders)])
        # Another order of names, names that are not loaded now, and mixtures beside base rows.
        for names in ([name, None], [None, "two"], [{"one": 0.5, "three": 0.5}, None]):
            with served.adapters.rows(names):
                assert torch.equal(compiled(x), mlp(x))
    assert (low_rank.a.data_ptr(), low_rank.b.data_ptr()) == addresses
    assert counter.frame_count == 1


@pytest.mark.parametrize("settings", SETTINGS[::5], ids=lambda s: "-".join(s.values()))
def test_inductor_gives_the_same_bytes(llama, settings):
    served = llama.served(**settings)
    mlp = served.model.model.layers[0].mlp
    compiled = torch.compile(mlp, fullgraph=True, dynamic=True)
    x = torch.randn(3, 17, 64).to(torch.bfloat16)
    with served.adapters.rows(["mlp", None, "all"]):
        assert torch.equal(compiled(x), mlp(x))


def test_custom_ops_pass_opcheck(llama):
    served = llama.served()
    site = served.discovery.sites[0]
    layer = site.layers[0]
    gate, up = (torch.randn(2, 5, 128).to(torch.bfloat16) for _ in range(2))
    # A site writes some of its outputs.  The fourth check compares all, so it is left to the tests
    # above, which compare what is computed from the written ones.
    torch.library.opcheck(
        torch.ops.branchline.site.default,
        ([gate, up], site.handle),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )
    torch.library.opcheck(
        torch.ops.branchline.routed_linear.default,
        (gate, [], layer.handle, 0, layer.out_features),
    )

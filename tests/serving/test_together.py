"""Linears that read one tensor are computed in one go: when, and that it never shows."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from branchline.adapters.kernels.native import NativeLaunch
from tests.helpers import same_bytes
from tests.models import token_ids

IDS = token_ids(3, 5)
NAMES = ["all", None, "attn"]


@pytest.fixture
def launched(monkeypatch) -> list[int]:
    """How many linears each call of the C kernel served."""
    found: list[int] = []
    call = NativeLaunch.__call__

    def counted(self, outs, x):
        found.append(len(outs))
        return call(self, outs, x)

    monkeypatch.setattr(NativeLaunch, "__call__", counted)
    return found


def projections(served, layer: int = 0):
    attention = served.model.model.layers[layer].self_attn
    return [attention.q_proj, attention.k_proj, attention.v_proj]


def apart(served, names, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """What q, k and v make of their inputs, each by itself."""
    layers = projections(served)
    kept = [layer.siblings for layer in layers]
    for layer in layers:
        layer.siblings = ()
    try:
        with served.adapters.rows(names) as batch, torch.no_grad():
            batch.memo.together.clear()
            return [layer(x) for layer, x in zip(layers, inputs, strict=True)]
    finally:
        batch.memo.together.clear()
        for layer, siblings in zip(layers, kept, strict=True):
            layer.siblings = siblings


def an_input(served, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, 5, projections(served)[0].in_features, generator=generator).bfloat16()


@pytest.mark.parametrize("settings", [{"quant": "none"}, {"policy": "dual"}, {"policy": "static"}])
def test_siblings_share_a_launch_and_keep_their_bytes(llama, launched, settings):
    served = llama.served(**settings)
    with torch.no_grad(), served.adapters.rows(NAMES):
        together = served(IDS).logits
    assert set(launched) == {1, 2, 3}, "q/k/v, gate/up, and what is alone"
    launched.clear()
    for layer in served.registry:
        layer.siblings = ()
    served.adapters.load("another", llama.folders["mlp"])
    with torch.no_grad(), served.adapters.rows(NAMES):
        assert same_bytes(served(IDS).logits, together)
    assert set(launched) == {1}


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_any_order_of_calls(llama, launched, order):
    served = llama.served(quant="none")
    x = an_input(served)
    expected = apart(served, ["all"] * 3, x, x, x)
    launched.clear()
    layers = projections(served)
    with served.adapters.rows(["all"] * 3), torch.no_grad():
        for number in order:
            assert same_bytes(layers[number](x), expected[number])
    assert launched == [3]


def test_the_same_input_twice_is_computed_twice(llama, launched):
    """What was ready is handed out once: whoever got it may have written to it."""
    served = llama.served(quant="none")
    x = an_input(served)
    expected = apart(served, ["all"] * 3, x, x, x)
    _, k, _ = projections(served)
    with served.adapters.rows(["all"] * 3), torch.no_grad():
        for _ in range(3):
            out = k(x)
            assert same_bytes(out, expected[1])
            out.zero_()


@pytest.mark.parametrize("change", ["in place", "another", "its storage"])
def test_another_input_is_never_answered_with_what_was_ready(llama, change):
    served = llama.served(quant="none")
    x, other = an_input(served), an_input(served, 1)
    expected = apart(served, ["all"] * 3, x, other, other)
    q, k, v = projections(served)
    with served.adapters.rows(["all"] * 3), torch.no_grad():
        assert same_bytes(q(x), expected[0])
        if change == "another":
            x = other
        elif change == "in place":
            x.copy_(other)
        else:
            x.data.copy_(other)
            x.add_(0)
        assert same_bytes(k(x), expected[1])
        assert same_bytes(v(x), expected[2])


def test_a_hook_that_hands_a_linear_another_input(llama):
    served = llama.served(quant="none")
    x, other = an_input(served), an_input(served, 1)
    expected = apart(served, ["all"] * 3, x, other, x)
    layers = projections(served)
    hook = layers[1].register_forward_pre_hook(lambda module, args: (other,))
    with hook, served.adapters.rows(["all"] * 3), torch.no_grad():
        for layer, wanted in zip(layers, expected, strict=True):
            assert same_bytes(layer(x), wanted)


@pytest.mark.parametrize("settings", [{"quant": "none"}, {"policy": "dual"}])
def test_under_inference_mode(llama, launched, settings):
    """Writes to raw tensors are not counted there, so that each linear reads them itself."""
    served = llama.served(**settings)
    with torch.no_grad(), served.adapters.rows(NAMES):
        expected = served(IDS).logits
    launched.clear()
    with torch.inference_mode(), served.adapters.rows(NAMES):
        assert same_bytes(served(IDS).logits, expected)
    assert (max(launched, default=1) > 1) == ("policy" in settings)
    layers, x = projections(served), an_input(served)
    if "policy" not in settings:
        expected = apart(served, ["all"] * 3, x, 2 * x, 2 * x)
        with torch.inference_mode(), served.adapters.rows(["all"] * 3):
            x = x.clone()
            for number, (layer, wanted) in enumerate(zip(layers, expected, strict=True)):
                assert same_bytes(layer(x), wanted)
                if not number:
                    x.mul_(2)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("kind", ["pre", "post"])
def test_a_hook_that_writes_to_the_input(llama, mode, kind):
    """In the order in which the model calls them, whoever is computed with whom."""
    served = llama.served(quant="none")

    def write(module, args, out=None):
        args[0].mul_(2)

    _, k, _ = projections(served)
    register = k.register_forward_pre_hook if kind == "pre" else k.register_forward_hook
    with register(write), torch.no_grad():
        for layer in served.registry:
            layer.siblings, kept = (), layer.siblings
            layer.kept = kept
        with served.adapters.rows(NAMES):
            expected = served(IDS).logits
        for layer in served.registry:
            layer.siblings = layer.kept
        served.adapters.load("another", llama.folders["mlp"])
        with mode(), served.adapters.rows(NAMES):
            assert same_bytes(served(IDS).logits, expected)


@pytest.mark.parametrize("began", ["no_grad", "inference", "autocast"])
def test_a_mode_that_ends_between_siblings(llama, began):
    served = llama.served(torch.float32, quant="none")
    q, k, _ = projections(served)
    modes = {
        "no_grad": torch.no_grad(),
        "inference": torch.inference_mode(),
        "autocast": torch.autocast("cpu", torch.bfloat16),
    }
    x = an_input(served).float()
    with served.adapters.rows(["all"] * 3):
        expected = apart_now(k, x)
        x.requires_grad_(began == "no_grad")
        with modes[began]:
            q(x)
        with torch.set_grad_enabled(began == "no_grad"):
            out = k(x)
        assert out.dtype == torch.float32
        assert not out.is_inference()
        assert out.requires_grad == (began == "no_grad")
        torch.testing.assert_close(out.detach(), expected, rtol=1e-5, atol=1e-5)


def apart_now(layer, x):
    """What a linear makes of its input by itself, under the batch in flight."""
    with torch.no_grad():
        return layer(x.clone()).clone()


def test_a_kernel_that_is_replaced_between_siblings(llama):
    served = llama.served()
    q, k, _ = projections(served)
    x = an_input(served)
    with served.adapters.rows(["all"] * 3), torch.no_grad():
        q(x)
        served.requantize(k.name, "none")
        assert same_bytes(k(x), apart_now(k, x))


def test_with_gradients_each_adds_its_own(llama):
    served = llama.served(torch.float32, quant="none")
    x = an_input(served).float()
    expected = apart(served, ["all"] * 3, x, x, x)
    layers = projections(served)
    with served.adapters.rows(["all"] * 3), torch.enable_grad():
        tracked = x.clone().requires_grad_()
        for layer, wanted in zip(layers, expected, strict=True):
            out = layer(tracked)
            torch.testing.assert_close(out.detach(), wanted, rtol=1e-5, atol=1e-5)
            (grad,) = torch.autograd.grad(out.sum(), tracked)
            assert grad.abs().sum() > 0


def test_threads_under_one_batch(llama):
    """A context that was copied to another thread is the same batch."""
    import contextvars

    served = llama.served(quant="none")
    inputs = [an_input(served, seed) for seed in range(4)]
    expected = [apart(served, ["all"] * 3, x, x, x) for x in inputs]
    layers, start = projections(served), threading.Barrier(4)

    def work(number: int) -> bool:
        start.wait()
        right = True
        with torch.no_grad():
            for _ in range(50):
                for layer, wanted in zip(layers, expected[number], strict=True):
                    right &= same_bytes(layer(inputs[number]), wanted)
        return right

    with served.adapters.rows(["all"] * 3), ThreadPoolExecutor(4) as pool:
        contexts = [contextvars.copy_context() for _ in inputs]
        futures = [pool.submit(c.run, work, number) for number, c in enumerate(contexts)]
        assert all(future.result() for future in futures)


def test_a_batch_that_ended_keeps_nothing(llama):
    import gc
    import weakref

    served = llama.served(quant="none")
    x = an_input(served)
    with served.adapters.rows(["all"] * 3), torch.no_grad():
        batch = served.registry.current_batch()
        projections(served)[0](x)
        (ready,) = batch.ready.values()
        left = [weakref.ref(out) for _, out in ready._outs.values()]
        assert len(left) == 2
    del batch, ready
    gc.collect()
    assert all(out() is None for out in left)


def test_an_input_that_is_gone_leaves_nothing_ready(llama):
    served = llama.served(quant="none")
    with served.adapters.rows(["all"] * 3) as batch, torch.no_grad():
        x = an_input(served)
        projections(served)[0](x)
        (ready,) = batch.ready.values()
        assert len(ready._outs) == 2
        del x
        assert not ready._outs


def test_rows_that_are_worked_out_once(llama):
    """Blocks of the same names share what follows from them; a change of adapters ends that."""
    served = llama.served(quant="none")
    memos = []
    for _ in range(2):
        with served.adapters.rows(NAMES) as batch, torch.no_grad():
            served(IDS)
            memos.append(batch.memo)
    assert memos[0] is memos[1]
    assert memos[0].together
    served.adapters.swap("attn", llama.folders["mlp"])
    with served.adapters.rows(NAMES) as batch:
        assert batch.memo is not memos[0]

"""What fails is one request: not its neighbours, not those after it, not the engine."""

import shutil
import threading

import pytest
import torch
from safetensors.torch import load_file

from branchline.core.errors import (
    BatchError,
    ConfigError,
    EngineStoppedError,
    NonFiniteError,
    RequestFailedError,
    RequestTooLongError,
)
from branchline.serving.engine.engine import Engine
from branchline.serving.engine.requests import GenerationRequest, Sampling
from branchline.serving.serve_config import EngineConfig
from tests.helpers import edit_tensors
from tests.models import build, save_adapter
from tests.serving.engine.conftest import alone, prompt


@pytest.fixture
def overflowing(served, tmp_path):
    """The name of an adapter whose weights are finite, and whose products are not."""
    folder = save_adapter(build("llama"), tmp_path / "huge", ["v_proj", "k_proj"], rank=4, seed=5)
    file = folder / "adapter_model.safetensors"
    edit_tensors(file, {k: torch.full_like(t, 1e30) for k, t in load_file(file).items()})
    served.adapters.load("huge", folder)
    return "huge"


def test_overflowing_adapter_fails_its_own_request_only(served, serve, overflowing):
    tokens = [prompt(40, seed) for seed in range(4)]
    wanted = [alone(served, p, name) for p, name in zip(tokens, [None, "all"] * 2, strict=True)]
    client = serve(served, num_gpu_blocks_override=24)
    for _ in range(3):
        bad = [client.ask(p, overflowing) for p in tokens]
        good = [client.ask(p, n) for p, n in zip(tokens, [None, "all"] * 2, strict=True)]
        for answer in bad:
            assert isinstance(answer.wait().error, NonFiniteError)
            assert "'huge'" in str(answer.error)
        # They take the blocks that the others left, too: the cache holds few.
        assert [answer.wait().ids for answer in good] == wanted
    assert client.engine.stats().failed_requests == 12


def test_what_a_failed_request_leaves_is_overwritten(served, serve, overflowing):
    client = serve(served)
    client.ask(prompt(40), overflowing).wait()
    assert torch.isfinite(client.engine._cache.cache_tensor.view(torch.float32)).all()
    assert client.ask(prompt(40), overflowing).wait().cached == 0


def test_forward_that_raises_fails_its_batch_and_the_next_succeeds(served, serve, monkeypatch):
    client = serve(served, run=False)
    tokens = prompt(20)
    wanted = alone(served, tokens, "all")
    run, calls = client.engine._runner.run, []

    def fails_once(step):
        calls.append(step)
        if len(calls) == 3:
            raise RuntimeError("injected")
        return run(step)

    monkeypatch.setattr(client.engine._runner, "run", fails_once)
    answers = [client.ask(tokens, "all"), client.ask(prompt(5))]
    client.engine.start()
    for answer in answers:
        assert isinstance(answer.wait().error, RequestFailedError)
        assert "injected" in str(answer.error)
    assert client.ask(tokens, "all").wait().ids == wanted
    assert client.engine.alive
    assert client.engine.stats().used_blocks == 0


def test_choice_that_raises_fails_its_requests_alone(served, serve, monkeypatch):
    from branchline.serving.engine import engine as module

    client = serve(served)
    real = module.choose

    def fails(logits, sequences, stops):
        if any(s.request.sampling.top_k == 77 for s in sequences):
            raise RuntimeError("injected")
        return real(logits, sequences, stops)

    monkeypatch.setattr(module, "choose", fails)
    assert isinstance(client.ask(prompt(5), top_k=77).wait().error, RequestFailedError)
    assert client.ask(prompt(5)).wait().ids == alone(served, prompt(5))


def test_adapter_folder_may_vanish(served, serve, llama, tmp_path):
    folder = tmp_path / "gone"
    shutil.copytree(llama.folders["all"], folder)
    served.adapters.unload("all")
    served.adapters.load("gone", folder)
    tokens = prompt(10)
    wanted = alone(served, tokens, "gone")
    shutil.rmtree(folder)
    client = serve(served)
    assert client.ask(tokens, "gone").wait().ids == wanted


def test_unloaded_and_swapped_adapters_finish_on_their_version(served, serve, llama):
    tokens = prompt(10)
    wanted = alone(served, tokens, "all", 40)
    client = serve(served)
    answers = [client.ask(tokens, "all", max_tokens=40) for _ in range(2)]
    answers[0].take()
    served.adapters.swap("all", llama.folders["mlp"])
    served.adapters.unload("all")
    assert [answer.wait().ids for answer in answers] == [wanted, wanted]


def test_cancelled_requests_give_their_blocks_back(served, serve):
    client = serve(served)
    answers = [client.ask(prompt(30, seed), max_tokens=400) for seed in range(4)]
    for answer in answers:
        answer.take()
        client.engine.cancel(answer.request_id)
    assert [answer.wait().finish for answer in answers] == ["cancelled"] * 4
    client.engine.cancel("nobody")
    stats = client.engine.stats()
    assert (stats.running, stats.waiting, stats.used_blocks) == (0, 0, 0)


def test_sink_that_raises_ends_its_own_request(served, serve, caplog):
    client = serve(served)
    tokens = prompt(10)

    def broken(update):
        raise ValueError("injected")

    client.engine.submit(
        GenerationRequest("broken", tuple(tokens), Sampling(max_tokens=1900), broken)
    )
    assert client.ask(tokens).wait().ids == alone(served, tokens)
    assert "the sink of request 'broken' raised" in caplog.text
    assert client.engine.stats().running == 0


def test_bad_requests_are_refused_at_once(served, serve):
    client = serve(served, max_model_len=64)
    with pytest.raises(BatchError, match="empty prompt"):
        client.ask([])
    with pytest.raises(BatchError, match="has token 256, but the model has tokens 0 to 255"):
        client.ask([4, 256])
    with pytest.raises(BatchError, match="has token -1"):
        client.ask([-1])
    with pytest.raises(BatchError, match="asks for 0 tokens"):
        client.ask([4], max_tokens=0)
    with pytest.raises(RequestTooLongError, match=r"60 prompt tokens and asks for 5.*64 together"):
        client.ask(prompt(60), max_tokens=5)
    assert len(client.ask(prompt(60), max_tokens=4).wait().ids) == 4
    assert client.engine.stats().running == 0


def test_stop_lets_requests_finish_and_then_refuses(served, serve):
    client = serve(served)
    answer = client.ask(prompt(10), max_tokens=30)
    answer.take()
    assert client.engine.stop(30)
    assert len(answer.wait().ids) == 30
    assert not client.engine.alive
    with pytest.raises(EngineStoppedError, match="stopping"):
        client.ask(prompt(10))


def test_stop_fails_what_does_not_end_in_time(served, serve):
    client = serve(served)
    answer = client.ask(prompt(10), max_tokens=1900)
    answer.take()
    assert not client.engine.stop(0)
    assert isinstance(answer.wait().error, EngineStoppedError)


def test_thread_that_dies_tells_everybody(served, serve, monkeypatch):
    client = serve(served)
    answer = client.ask(prompt(10), max_tokens=1900)
    answer.take()
    monkeypatch.setattr(client.engine._scheduler, "next", lambda: 1 / 0)
    assert isinstance(answer.wait().error, EngineStoppedError)
    client.engine._thread.join(10)
    assert isinstance(client.engine.error, ZeroDivisionError)
    with pytest.raises(EngineStoppedError, match="died"):
        client.ask(prompt(3))
    with pytest.raises(EngineStoppedError, match="died"):
        client.engine.between_steps(lambda: None)


def test_blocks_that_cannot_be_freed_keep_nobody_from_being_told(served, serve, monkeypatch):
    client = serve(served)
    answers = [client.ask(prompt(10), max_tokens=1900) for _ in range(3)]
    answers[0].take()

    def fails(*args, **settings):
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(client.engine._cache, "free", fails)
    monkeypatch.setattr(client.engine._runner, "run", fails)
    for answer in answers:
        assert answer.wait().error is not None
    client.engine._thread.join(10)
    assert "the device is lost" in str(client.engine.error)


def test_engine_that_never_ran_tells_who_waits(served, serve):
    client = serve(served, run=False)
    answer = client.ask(prompt(5))
    assert not client.engine.stop(1)
    assert isinstance(answer.wait().error, EngineStoppedError)
    with pytest.raises(EngineStoppedError, match="stopping"):
        client.engine.start()


def test_calls_between_steps_see_no_forward(served, serve, monkeypatch):
    client = serve(served)
    running = threading.Event()
    run = client.engine._runner.run

    def watched(step):
        running.set()
        try:
            return run(step)
        finally:
            running.clear()

    monkeypatch.setattr(client.engine._runner, "run", watched)
    answer = client.ask(prompt(10), max_tokens=60)
    for _ in range(20):
        assert not client.engine.between_steps(running.is_set).result(10)
    assert len(answer.wait().ids) == 60
    with pytest.raises(ZeroDivisionError):
        client.engine.between_steps(lambda: 1 / 0).result(10)


def test_engine_refuses_what_it_cannot_serve(served):
    with pytest.raises(ConfigError, match="fewer than one sequence"):
        Engine(served, EngineConfig(kv_cache_memory_bytes=1000))

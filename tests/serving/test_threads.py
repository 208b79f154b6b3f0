"""The choice belongs to the batch: threads with different adapters never mix."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from branchline.core.errors import AdapterCapacityError, AdapterNotFoundError
from tests.models import save_adapter, token_ids

IDS = token_ids(2, 7)


def answers(served, name: str | None) -> torch.Tensor:
    with served.adapters.rows([name, name]):
        return served(IDS).logits


def test_two_threads_two_adapters_a_hundred_requests_each(llama):
    served = llama.served()
    expected = {name: answers(served, name) for name in ("attn", "mlp")}
    assert not torch.equal(expected["attn"], expected["mlp"])
    start = threading.Barrier(2)

    def work(name: str) -> int:
        start.wait()
        with torch.no_grad():
            return sum(torch.equal(answers(served, name), expected[name]) for _ in range(100))

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(work, expected)) == [100, 100]


def test_an_exception_in_a_batch_leaves_nothing_behind(llama):
    served = llama.served()
    base = served(IDS).logits
    with pytest.raises(RuntimeError, match="boom"), served.adapters.rows(["all", "all"]):
        raise RuntimeError("boom")
    assert torch.equal(served(IDS).logits, base)
    assert all(info.batches == 0 for info in served.adapters.list())


def test_swaps_under_load_never_mix_versions(llama, tmp_path):
    served = llama.served()
    folders = [
        llama.folders["attn"],
        save_adapter(llama.plain(), tmp_path / "v2", ["q_proj", "v_proj"], rank=8, seed=42),
    ]
    known = []
    for folder in folders:
        served.adapters.swap("attn", folder)
        known.append(answers(served, "attn"))
    assert not torch.equal(*known)
    stop = threading.Event()
    wrong: list[torch.Tensor] = []

    def serve() -> None:
        with torch.no_grad():
            while not stop.is_set():
                out = answers(served, "attn")
                if not any(torch.equal(out, k) for k in known):
                    wrong.append(out)

    threads = [threading.Thread(target=serve) for _ in range(2)]
    for thread in threads:
        thread.start()
    swapped = 0
    for i in range(40):
        # Refused, not waited for, while the threads use an older version each.
        with contextlib.suppress(AdapterCapacityError):
            served.adapters.swap("attn", folders[i % 2])
            swapped += 1
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong
    assert swapped > 10


def test_a_batch_finishes_on_the_version_it_started_with(llama):
    served = llama.served()
    before = answers(served, "mlp")
    with served.adapters.rows(["mlp", "mlp"]):
        served.adapters.swap("mlp", llama.folders["attn"])
        assert torch.equal(served(IDS).logits, before)
        served.adapters.unload("mlp")
        assert torch.equal(served(IDS).logits, before)
    with pytest.raises(AdapterNotFoundError, match="mlp"):
        answers(served, "mlp")


def test_unload_empties_the_slot_and_frees_it(llama):
    served = llama.wrap(max_loras=1)
    for _ in range(5):
        served.adapters.load("a", llama.folders["all"])
        served.adapters.swap("a", llama.folders["attn"])
        served.adapters.unload("a")
    for layer in served.registry:
        if layer.branch is not None:
            assert not layer.branch.low_rank.ranks.any()


def test_addresses_stay(llama):
    served = llama.served()
    layer = served.registry.layers["model.layers.0.mlp.down_proj"]
    before = (layer.branch.low_rank.a.data_ptr(), layer.branch.low_rank.b.data_ptr())
    for _ in range(3):
        served.adapters.swap("mlp", llama.folders["all"])
        served.adapters.swap("mlp", llama.folders["mlp"])
    assert (layer.branch.low_rank.a.data_ptr(), layer.branch.low_rank.b.data_ptr()) == before

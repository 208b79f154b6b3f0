"""Repositories of the hub: a hub's cache on the disk, and the network's answers made up."""

import shutil
from types import SimpleNamespace

import pytest
from huggingface_hub import constants
from huggingface_hub.errors import OfflineModeIsEnabled

from branchline.adapters.sources import HubSource, SourceLimits, fetch, hub
from branchline.core.errors import AdapterNotFoundError, AdapterSourceError

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
SOURCE = HubSource("owner/name")


@pytest.fixture
def cache(plain, tmp_path, monkeypatch):
    """The plain adapter in a hub's cache, and no network."""
    repository = tmp_path / "hub" / "models--owner--name"
    for folder in ("", "sql/"):
        shutil.copytree(plain, repository / "snapshots" / COMMIT / folder, dirs_exist_ok=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return repository


@pytest.mark.parametrize("revision", [None, "main", COMMIT])
@pytest.mark.parametrize("folder", ["", "sql"])
def test_offline_the_cache_serves(cache, plain, revision, folder):
    with fetch(HubSource("owner/name", revision, folder)) as found:
        assert (found / TENSORS).read_bytes() == (plain / TENSORS).read_bytes()
    assert found.exists()  # the cache is the hub's


def test_offline_and_not_cached(cache):
    for source in (HubSource("owner/other"), HubSource("owner/name", "v2")):
        with pytest.raises(AdapterSourceError, match=r"not in the hub's cache.*HF_HUB_OFFLINE"):
            fetch(source).__enter__()


def test_what_is_cached_has_limits_too(cache):
    with pytest.raises(AdapterSourceError, match="max_adapter_bytes"):
        fetch(SOURCE, SourceLimits(max_adapter_bytes=3000)).__enter__()


def test_roots(cache):
    with fetch(SOURCE, SourceLimits(allowed_roots=("hf://owner",))):
        pass
    with pytest.raises(AdapterSourceError, match="allowed roots"):
        fetch(SOURCE, SourceLimits(allowed_roots=("hf://other",))).__enter__()


@pytest.fixture
def online(cache, monkeypatch):
    """A hub that lists files with sizes; what is asked for lands in the returned list."""
    asked, sizes = [], {CONFIG: 200, TENSORS: 5000, "pytorch_model.bin": 10**12}

    class Api:
        def model_info(self, repository, *, revision, files_metadata):
            files = [SimpleNamespace(rfilename=name, size=size) for name, size in sizes.items()]
            return SimpleNamespace(sha=COMMIT, siblings=files)

    def snapshot(repository, *, revision, allow_patterns):
        asked.append((repository, revision, tuple(allow_patterns)))
        return str(cache / "snapshots" / revision)

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "HfApi", Api)
    monkeypatch.setattr(hub, "snapshot_download", snapshot)
    return SimpleNamespace(asked=asked, sizes=sizes, api=Api)


def test_online_only_the_adapters_files_of_one_commit_are_fetched(online):
    with fetch(HubSource("owner/name", "main")) as found:
        assert (found / CONFIG).exists()
    assert online.asked == [("owner/name", COMMIT, (CONFIG, TENSORS))]


def test_sizes_are_checked_before_anything_is_fetched(online):
    with pytest.raises(AdapterSourceError, match="5199 bytes that max_adapter_bytes"):
        fetch(SOURCE, SourceLimits(max_adapter_bytes=5199)).__enter__()
    assert not online.asked


def test_a_repository_without_an_adapter(online):
    del online.sizes[CONFIG]
    with pytest.raises(AdapterNotFoundError, match=f"no {CONFIG}"):
        fetch(SOURCE).__enter__()
    with pytest.raises(AdapterNotFoundError, match=f"no deep/{CONFIG}"):
        fetch(HubSource("owner/name", None, "deep")).__enter__()
    assert not online.asked


def test_a_hub_that_is_not_reached(online, monkeypatch):
    def unreachable(*args, **kwargs):
        raise OfflineModeIsEnabled("no network")

    monkeypatch.setattr(online.api, "model_info", unreachable)
    with pytest.raises(AdapterSourceError, match="the hub cannot be reached"):
        fetch(SOURCE).__enter__()

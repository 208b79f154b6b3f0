"""URLs: fsspec's file systems, and those that are refused."""

import shutil

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from branchline.adapters.read import read_adapter
from branchline.adapters.sources import AdapterSource, SourceLimits, SourceReader, fetch
from branchline.core.errors import (
    AdapterFormatError,
    AdapterNotFoundError,
    AdapterSourceError,
)

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"


@pytest.fixture
def memory(plain):
    """The plain adapter on the memory file system, as a folder and as archives."""
    system = fsspec.filesystem("memory")
    for name in (CONFIG, TENSORS):
        system.pipe(f"/shop/sql/{name}", (plain / name).read_bytes())
    for kind, suffix in (("zip", "zip"), ("gztar", "tar.gz")):
        packed = shutil.make_archive(str(plain.parent / "packed"), kind, plain)
        with open(packed, "rb") as file:
            system.pipe(f"/shop/sql.{suffix}", file.read())
    yield system
    system.rm("/shop", recursive=True)


@pytest.mark.parametrize("path", ["sql", "sql/", "sql.zip", "sql.tar.gz"])
def test_folders_and_archives(memory, plain, base, path):
    with SourceReader().resolve(f"memory://shop/{path}") as folder:
        weights = read_adapter(folder, base, max_rank=16)
    assert not folder.exists()
    assert weights.digest == read_adapter(plain, base, max_rank=16).digest


def test_a_pickle_alone_is_left_to_the_reader(memory, base):
    memory.mv(f"/shop/sql/{TENSORS}", "/shop/sql/adapter_model.bin")
    with SourceReader().resolve("memory://shop/sql") as folder:
        assert {path.name for path in folder.iterdir()} == {CONFIG, "adapter_model.bin"}


@pytest.mark.parametrize("path", ["absent", "absent.zip"])
def test_what_is_not_there(memory, path):
    with pytest.raises(AdapterNotFoundError, match=r"memory://shop/absent"):
        SourceReader().resolve(f"memory://shop/{path}").__enter__()


def test_a_folder_without_tensors(memory):
    memory.rm(f"/shop/sql/{TENSORS}")
    with pytest.raises(AdapterNotFoundError, match=r"has no adapter_model"):
        SourceReader().resolve("memory://shop/sql").__enter__()


def test_an_archive_that_is_none(memory):
    memory.pipe("/shop/bad.zip", b"hello")
    with pytest.raises(AdapterFormatError, match="neither a folder nor a zip"):
        SourceReader().resolve("memory://shop/bad.zip").__enter__()


@pytest.mark.parametrize("path", ["sql", "sql.zip", "sql.tar.gz"])
def test_too_many_bytes_stop_the_transfer(memory, path):
    reader = SourceReader(SourceLimits(max_adapter_bytes=3000))
    with pytest.raises(AdapterSourceError, match="3000 bytes that max_adapter_bytes"):
        reader.resolve(f"memory://shop/{path}").__enter__()


def test_roots(memory):
    reader = SourceReader(SourceLimits(allowed_roots=("memory://shop/sql",)))
    with reader.resolve("memory://shop/sql"):
        pass
    with pytest.raises(AdapterSourceError, match="outside of the allowed roots"):
        reader.resolve("memory://shop/sql.zip").__enter__()


@pytest.mark.parametrize(
    ("url", "package"),
    [("s3://bucket/sql", "s3fs"), ("gs://bucket/sql", "gcsfs"), ("https://host/a.zip", "aiohttp")],
)
def test_a_missing_package_is_named(url, package, monkeypatch):
    scheme = AdapterSource.parse(url).scheme

    def missing(asked):
        assert asked == scheme
        raise ImportError(f"install {package}") from ModuleNotFoundError(name=package)

    monkeypatch.setattr(fsspec, "get_filesystem_class", missing)
    with pytest.raises(AdapterSourceError, match=f"pip install {package}"):
        fetch(AdapterSource.parse(url)).__enter__()


@pytest.mark.parametrize("scheme", ["dir", "git", "zip", "reference", "cached", "jupyter", "data"])
def test_schemes_that_would_go_around_the_limits(scheme):
    with pytest.raises(AdapterSourceError, match="reads this machine, or hands on"):
        fetch(AdapterSource.parse(f"{scheme}://etc/sql")).__enter__()


def test_an_unknown_scheme():
    with pytest.raises(AdapterSourceError, match="no file system serves nowhere://"):
        fetch(AdapterSource.parse("nowhere://etc/sql")).__enter__()


def test_a_broken_server_is_an_error_of_the_source_without_its_secrets(memory, monkeypatch):
    def broken(self, path, *args, **kwargs):
        raise OSError(f"500 for {path}?sig=Secret")

    monkeypatch.setattr(MemoryFileSystem, "_open", broken)
    with pytest.raises(AdapterSourceError, match="cannot be read") as caught:
        fetch(AdapterSource.parse("memory://shop/sql")).__enter__()
    assert "Secret" not in str(caught.value)

"""Folders of this machine: links, roots, sizes, and files that are replaced under way."""

import os
import shutil

import pytest

from branchline.adapters.read import read_adapter
from branchline.adapters.sources import AdapterSource, LocalSource, SourceLimits, fetch, local
from branchline.core.errors import (
    AdapterFormatError,
    AdapterNotFoundError,
    AdapterSourceError,
)

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"


def fetched(source, limits=None) -> dict[str, bytes]:
    source = source if isinstance(source, AdapterSource) else AdapterSource.parse(source)
    with fetch(source, limits) as folder:
        return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def rooted(plain, tmp_path):
    """A root with the plain adapter in it, and limits that allow that root alone."""
    root = tmp_path / "root"
    root.mkdir()
    shutil.copytree(plain, root / "sql")
    return root, SourceLimits(allowed_roots=(str(root),))


def test_an_unrestricted_folder_is_read_where_it_lies(plain, base):
    with fetch(LocalSource(str(plain))) as folder:
        assert folder == plain
        assert read_adapter(folder, base, max_rank=16).rank == 8


def test_a_folder_below_a_root_is_copied_and_the_copy_removed(rooted, base):
    root, limits = rooted
    (root / "sql" / "README.md").write_text("not taken")
    with fetch(LocalSource(str(root / "sql")), limits) as folder:
        assert sorted(path.name for path in folder.iterdir()) == [CONFIG, TENSORS]
        assert read_adapter(folder, base, max_rank=16).rank == 8
    assert not folder.exists()


def test_links_that_stay_inside_are_followed(rooted):
    root, limits = rooted
    (root / "alias").symlink_to("sql")
    blobs = root / "blobs"
    blobs.mkdir()
    shutil.move(root / "sql" / TENSORS, blobs / "x")
    (root / "sql" / TENSORS).symlink_to(blobs / "x")
    files = fetched(root / "alias", limits)
    assert files[TENSORS] == (blobs / "x").read_bytes()


def test_a_root_may_be_a_link(rooted, tmp_path):
    root, _ = rooted
    (tmp_path / "link").symlink_to(root)
    limits = SourceLimits(allowed_roots=(str(tmp_path / "link"),))
    assert set(fetched(root / "sql", limits)) == {CONFIG, TENSORS}
    assert set(fetched(tmp_path / "link" / "sql", limits)) == {CONFIG, TENSORS}


@pytest.mark.parametrize("way", ["path", "dots", "folder link", "file link", "file url", "sibling"])
def test_what_lies_outside_is_refused(rooted, plain, way):
    root, limits = rooted
    source = root / "sql"
    if way == "path":
        source = plain
    elif way == "dots":
        source = f"{root}/sql/../../plain"
    elif way == "folder link":
        source = root / "out"
        source.symlink_to(plain)
    elif way == "file link":
        (source / CONFIG).unlink()
        (source / CONFIG).symlink_to(plain / CONFIG)
    elif way == "file url":
        source = f"file://{plain}"
    else:
        source = shutil.copytree(plain, f"{root}-b")
    with pytest.raises(AdapterSourceError, match="outside of the allowed roots"):
        fetched(source, limits)


def test_the_answer_does_not_tell_what_lies_outside(rooted, plain):
    _, limits = rooted
    said = []
    for path in (plain, plain.parent / "absent"):
        with pytest.raises(AdapterSourceError) as caught:
            fetched(path, limits)
        said.append(str(caught.value).replace(str(path), ""))
    assert said[0] == said[1]


def test_a_source_with_a_root_of_its_own(rooted, plain):
    root, _ = rooted
    assert set(fetched(LocalSource(str(root / "sql"), root=str(root)))) == {CONFIG, TENSORS}
    (root / "out").symlink_to(plain)
    with pytest.raises(AdapterSourceError, match="outside"):
        fetched(LocalSource(str(root / "out"), root=str(root)))


def swap_when_opened(monkeypatch, swap, when):
    """Run `swap` once, right before the open of a path whose last part is `when`."""
    real_open, done = os.open, []

    def opened(path, flags, *args, **kwargs):
        if not done and os.path.basename(path) == when:
            done.append(path)
            swap()
        return real_open(path, flags, *args, **kwargs)

    monkeypatch.setattr(local.os, "open", opened)
    return done


def test_a_file_replaced_by_a_link_after_its_check(rooted, plain, monkeypatch):
    root, limits = rooted

    def swap():
        (root / "sql" / CONFIG).unlink()
        (root / "sql" / CONFIG).symlink_to(plain / CONFIG)

    done = swap_when_opened(monkeypatch, swap, CONFIG)
    with pytest.raises(AdapterSourceError, match="replaced while it was opened"):
        fetched(root / "sql", limits)
    assert done


def test_a_folder_replaced_by_a_link_after_its_check(rooted, plain, monkeypatch):
    root, limits = rooted

    def swap():
        (root / "sql").rename(root / "was")
        (root / "sql").symlink_to(plain)

    done = swap_when_opened(monkeypatch, swap, "sql")
    with pytest.raises(AdapterSourceError, match="replaced while it was opened"):
        fetched(root / "sql", limits)
    assert done


def test_a_file_replaced_by_a_pipe_does_not_block(rooted, monkeypatch):
    root, limits = rooted

    def swap():
        (root / "sql" / TENSORS).unlink()
        os.mkfifo(root / "sql" / TENSORS)

    done = swap_when_opened(monkeypatch, swap, TENSORS)
    with pytest.raises(AdapterFormatError, match="no regular file"):
        fetched(root / "sql", limits)
    assert done


def test_a_file_replaced_after_the_copy_changes_nothing(rooted, base):
    root, limits = rooted
    with fetch(LocalSource(str(root / "sql")), limits) as folder:
        (root / "sql" / CONFIG).write_text("{}")
        assert read_adapter(folder, base, max_rank=16).rank == 8


@pytest.mark.parametrize("restricted", [False, True])
def test_too_many_bytes(rooted, restricted):
    root, limits = rooted
    size = sum(path.stat().st_size for path in (root / "sql").iterdir())
    roots = limits.allowed_roots if restricted else None
    exact = SourceLimits(allowed_roots=roots, max_adapter_bytes=size)
    assert set(fetched(root / "sql", exact)) == {CONFIG, TENSORS}
    below = SourceLimits(allowed_roots=roots, max_adapter_bytes=size - 1)
    with pytest.raises(AdapterSourceError, match=f"{size - 1} bytes that max_adapter_bytes"):
        fetched(root / "sql", below)


@pytest.mark.parametrize("restricted", [False, True])
def test_what_is_not_there(rooted, restricted):
    root, limits = rooted
    with pytest.raises(AdapterNotFoundError, match="no such folder"):
        fetched(root / "absent", limits if restricted else None)


def test_a_file_that_is_no_archive(rooted):
    root, _ = rooted
    (root / "text").write_text("hello")
    with pytest.raises(AdapterFormatError, match="neither a folder nor a zip"):
        fetched(root / "text")


def test_an_exception_within_removes_the_copy_too(rooted):
    root, limits = rooted
    with pytest.raises(KeyError), fetch(LocalSource(str(root / "sql")), limits) as folder:
        raise KeyError
    assert not folder.exists()

"""What a written source means, and which roots allow it."""

import dataclasses
from pathlib import Path

import pytest

from branchline.adapters.sources import (
    AdapterSource,
    HubSource,
    LocalSource,
    SourceLimits,
    UrlSource,
    fetch,
)
from branchline.core.errors import AdapterSourceError, ConfigError

parse = AdapterSource.parse


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("adapters/sql", LocalSource("adapters/sql")),
        # The form of a repository is a path all the same: nothing goes to the network by accident.
        ("owner/name", LocalSource("owner/name")),
        (Path("/srv/a.zip"), LocalSource("/srv/a.zip")),
        ("file:///srv/my%20sql", LocalSource("/srv/my sql")),
        ("file://localhost/srv/sql", LocalSource("/srv/sql")),
        ("local:///srv/sql", LocalSource("/srv/sql")),
        ("hf://owner/name", HubSource("owner/name")),
        ("hf://owner/name@v1.0/sql/new", HubSource("owner/name", "v1.0", "sql/new")),
        ("hf://owner/name@refs%2Fpr%2F3", HubSource("owner/name", "refs/pr/3")),
    ],
)
def test_meanings(text, expected):
    assert parse(text) == expected
    assert parse(expected) is expected


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("s3://bucket/sql", "s3://bucket/sql"),
        ("HTTPS://User:Secret@Host:8000/a.zip?sig=Secret#x", "https://host:8000/a.zip"),
        ("sftp://user:Secret@host/sql", "sftp://host/sql"),
        ("memory://Folder/what?#.zip", "memory://Folder/what?#.zip"),
    ],
)
def test_no_secret_of_a_url_is_shown(text, label):
    source = parse(text)
    assert isinstance(source, UrlSource)
    assert source.label == label
    assert "Secret" not in f"{source.label} {source!r} {source}"
    assert source.url == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "  ",
        "a\0b",
        "file://host/srv/sql",
        "file://",
        "file:///a%00b",
        "hf://name",
        "hf://owner/../name",
        "hf://owner/name/*",
        "hf://owner/name@",
        "hf://owner/name@../../x",
        "s3://bucket/../other/sql",
        "https://host/a/%2e%2e/b",
        "https://host/a%2Fb",
        "https://host\\@other/a",
        "s3://",
        "simplecache::s3://bucket/sql",
        "zip://inner::s3://bucket/sql.zip",
    ],
)
def test_malformed_ones_are_refused(text):
    with pytest.raises(AdapterSourceError):
        parse(text)


def test_sources_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        parse("sql").path = "other"


# --- roots -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("root", "inside", "outside"),
    [
        ("s3://bucket/team", "s3://bucket/team/sql", "s3://bucket/team-b/sql"),
        ("s3://bucket/team/", "s3://bucket/team", "s3://bucket"),
        ("https://host/a", "https://HOST/a/b.zip", "https://host.evil.example/a/b.zip"),
        ("https://host/a", "https://u:p@host/a/b.zip?x=1", "https://host:81/a/b.zip"),
        ("https://host/a", "https://host/a/b", "http://host/a/b"),
        ("hf://owner", "hf://owner/name@v1/sql", "hf://owner2/name"),
        ("hf://owner/name", "hf://owner/name@v1/sql", "hf://owner/name2"),
    ],
)
def test_roots_of_urls(root, inside, outside):
    limits = SourceLimits(allowed_roots=(root,))
    limits.check_allowed(parse(inside))
    with pytest.raises(AdapterSourceError, match="allowed roots"):
        limits.check_allowed(parse(outside))
    with pytest.raises(AdapterSourceError, match="allowed roots"):
        limits.check_allowed(parse("/srv/sql"))


def test_a_local_root_allows_no_url(tmp_path):
    limits = SourceLimits(allowed_roots=(str(tmp_path),))
    limits.check_allowed(parse(tmp_path / "sql"))
    for text in ("s3://bucket/sql", "hf://owner/name", f"memory:/{tmp_path}/sql"):
        with pytest.raises(AdapterSourceError, match="allowed roots"):
            limits.check_allowed(parse(text))


def test_no_roots_allow_nothing(tmp_path):
    with (
        pytest.raises(AdapterSourceError, match="allowed roots"),
        fetch(parse(tmp_path), SourceLimits(allowed_roots=())),
    ):
        pass


@pytest.mark.parametrize(
    "settings",
    [
        {"max_adapter_bytes": 0},
        {"max_members": 0},
        {"max_expansion": -1},
        {"allowed_roots": ("",)},
        {"allowed_roots": ("hf://",)},
    ],
)
def test_limits_that_cannot_work(settings):
    with pytest.raises(ConfigError):
        SourceLimits(**settings)

"""From names to sources."""

import shutil

import pytest

from branchline.adapters.sources import FolderResolver, LocalSource, fetch
from branchline.core.errors import AdapterSourceError, ConfigError


@pytest.fixture
def root(plain, tmp_path):
    """A folder with the adapter `sql`, the archive `tone.zip`, and a folder that is no adapter."""
    root = tmp_path / "adapters"
    shutil.copytree(plain, root / "sql")
    shutil.make_archive(str(root / "tone"), "zip", plain)
    (root / "empty").mkdir()
    return root


def test_names(root):
    resolve = FolderResolver(str(root))
    assert resolve("sql") == LocalSource(str(root / "sql"), root=str(root))
    assert resolve("tone") == LocalSource(str(root / "tone.zip"), root=str(root))
    for name in ("sql", "tone"):
        source = resolve(name)
        assert source is not None
        with fetch(source) as folder:
            assert (folder / "adapter_config.json").exists()


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../adapters/sql", "/etc", "sql/", "sq", "SQL2", ".sql", "a\0b", "a\\b",
     "empty", "n" * 5000],
)  # fmt: skip
def test_what_is_no_adapters_name(root, name):
    assert FolderResolver(str(root))(name) is None


def test_a_link_that_leaves_the_root(root, plain):
    (root / "out").symlink_to(plain)
    source = FolderResolver(str(root))("out")
    assert source is not None
    with pytest.raises(AdapterSourceError, match="outside"), fetch(source):
        pass


def test_a_root_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="no such folder"):
        FolderResolver(str(tmp_path / "absent"))

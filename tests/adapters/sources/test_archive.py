"""Archives that nobody vouches for."""

import gzip
import io
import os
import random
import stat
import struct
import tarfile
import zipfile
from collections.abc import Callable

import pytest

from branchline.adapters.read import read_adapter
from branchline.adapters.sources import LocalSource, SourceLimits, fetch
from branchline.core.errors import AdapterFormatError, AdapterSourceError, BranchlineError

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
KINDS = ("zip", "tar", "tgz")


class Packer:
    """Writes one archive of any kind, sound or not."""

    def __init__(self, kind: str, path) -> None:
        self.kind, self.path = kind, path
        if kind == "zip":
            self.archive = zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED)
        else:
            self.archive = tarfile.open(path, "w:gz" if kind == "tgz" else "w")  # noqa: SIM115

    def add(self, name: str, data: bytes = b"x", **changes) -> "Packer":
        if isinstance(self.archive, zipfile.ZipFile):
            info = zipfile.ZipInfo(name)
            info.compress_type = zipfile.ZIP_DEFLATED
            if "type" in changes:
                info.external_attr = changes["type"] << 16
            self.archive.writestr(info, data)
        else:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            for key, value in changes.items():
                setattr(info, key, value)
            self.archive.addfile(info, io.BytesIO(data) if info.isreg() else None)
        return self

    def done(self) -> LocalSource:
        self.archive.close()
        return LocalSource(str(self.path))


@pytest.fixture(params=KINDS)
def pack(request, tmp_path) -> Callable[[], Packer]:
    """Makes a packer of each kind in turn; the name says nothing of the kind."""
    return lambda: Packer(request.param, tmp_path / "packed")


@pytest.fixture
def packed(pack, plain) -> Callable[..., Packer]:
    """A packer with the plain adapter in it, below a prefix."""

    def make(prefix: str = "") -> Packer:
        packer = pack()
        for name in (CONFIG, TENSORS):
            packer.add(prefix + name, (plain / name).read_bytes())
        return packer

    return make


def refused(source, match: str, kind=AdapterFormatError, **limits) -> None:
    with pytest.raises(kind, match=match), fetch(source, SourceLimits(**limits)):
        pass


@pytest.mark.parametrize("prefix", ["", "./", "sql/", "./sql/"])
def test_the_adapter_in_the_root_or_one_folder_down(packed, plain, base, prefix):
    source = packed(prefix).add("docs/readme/x.md").add(prefix + "other.txt").done()
    with fetch(source) as folder:
        assert sorted(path.name for path in folder.iterdir()) == [CONFIG, TENSORS]
        digest = read_adapter(folder, base, max_rank=16).digest
        assert all(stat.S_ISREG(path.lstat().st_mode) for path in folder.iterdir())
        assert not any(path.stat().st_mode & 0o111 for path in folder.iterdir())
    assert not folder.exists()
    assert digest == read_adapter(plain, base, max_rank=16).digest


def test_the_root_goes_before_a_folder(packed, plain):
    source = packed().add(f"old/{CONFIG}", b"{}").done()
    with fetch(source) as folder:
        assert (folder / CONFIG).read_bytes() == (plain / CONFIG).read_bytes()


@pytest.mark.parametrize(
    "name",
    [
        f"../{CONFIG}",
        f"sql/../../{CONFIG}",
        "sql/../x",
        "/etc/cron.d/x",
        f"/{CONFIG}",
        "C:/x",
        "..\\x",
        "sql\\..\\x",
    ],
)
def test_names_that_lead_out(packed, name):
    refused(packed().add(name).done(), r"absolute or no portable path|leads out")


@pytest.mark.parametrize("name", [TENSORS, "unrelated"])
def test_links_and_devices(pack, plain, name):
    kinds = {
        tarfile.SYMTYPE: stat.S_IFLNK,
        tarfile.LNKTYPE: None,
        tarfile.CHRTYPE: stat.S_IFCHR,
        tarfile.BLKTYPE: stat.S_IFBLK,
        tarfile.FIFOTYPE: stat.S_IFIFO,
    }
    for of_tar, of_zip in kinds.items():
        packer = pack().add(CONFIG, (plain / CONFIG).read_bytes())
        if packer.kind == "zip":
            if of_zip is None:
                continue
            packer.add(name, b"/etc/passwd", type=of_zip | 0o777)
        else:
            packer.add(name, b"", type=of_tar, linkname="/etc/passwd")
        refused(packer.done(), "is a link|is no regular file")


def test_a_link_to_a_folder_and_a_file_through_it(pack, tmp_path):
    packer = pack()
    if packer.kind == "zip":
        packer.add("sql", str(tmp_path).encode(), type=stat.S_IFLNK | 0o777)
    else:
        packer.add("sql", b"", type=tarfile.SYMTYPE, linkname=str(tmp_path))
    refused(packer.add(f"sql/{CONFIG}", b"{}").done(), "is a link")
    assert not (tmp_path / CONFIG).exists()


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("again", [CONFIG, f"./{CONFIG}", f".//{CONFIG}"])
def test_members_twice(packed, again):
    refused(packed().add(again, b"{}").done(), "is there twice")


def test_several_adapters_and_none(pack):
    source = pack().add(f"a/{CONFIG}").add(f"b/{CONFIG}").done()
    refused(source, r"not one adapter .* but 'a', 'b'")
    refused(pack().add(f"a/b/{CONFIG}").done(), f"but no {CONFIG}")


def test_too_many_members(packed):
    packer = packed()
    for number in range(30):
        packer.add(f"m{number}", b"")
    refused(packer.done(), r"more than 31 members", AdapterSourceError, max_members=31)
    with fetch(LocalSource(str(packer.path)), SourceLimits(max_members=32)):
        pass


def test_a_directory_of_a_million_names_is_not_even_read(pack, plain):
    packer = pack().add(CONFIG, (plain / CONFIG).read_bytes())
    if packer.kind != "zip":
        packer.add("n" * 2**20)  # in an extended header of a megabyte
    else:
        for number in range(40):
            packer.add(f"{number:03}" + "n" * 60_000)
    refused(packer.done(), "longer than any adapter's")


def test_a_bomb_of_zeros(pack, plain):
    packer = pack().add(CONFIG, (plain / CONFIG).read_bytes())
    source = packer.add(TENSORS, bytes(80 * 2**20)).done()
    if packer.kind == "tar":
        with fetch(source) as folder:  # not packed, so nothing expands
            assert (folder / TENSORS).stat().st_size == 80 * 2**20
    else:
        assert os.path.getsize(packer.path) < 2**20
        refused(source, "max_expansion", AdapterSourceError)
    refused(source, "max_adapter_bytes", AdapterSourceError, max_adapter_bytes=2**20)


def test_a_bomb_that_is_not_taken_is_not_unpacked(pack, plain):
    packer = pack().add("zeros", bytes(64 * 2**20)).add(CONFIG, (plain / CONFIG).read_bytes())
    source = packer.done()
    limits = SourceLimits(max_adapter_bytes=2**20)
    if packer.kind == "zip":
        with fetch(source, limits) as folder:
            assert [path.name for path in folder.iterdir()] == [CONFIG]
    else:
        refused(source, "max_adapter_bytes", AdapterSourceError, max_adapter_bytes=2**20)


def test_the_exact_size_fits(packed, plain):
    size = sum((plain / name).stat().st_size for name in (CONFIG, TENSORS))
    packer = packed()
    source = packer.done()
    limit = max(size, os.path.getsize(packer.path))
    with fetch(source, SourceLimits(max_adapter_bytes=limit)) as folder:
        assert sum(path.stat().st_size for path in folder.iterdir()) == size
    refused(source, "max_adapter_bytes", AdapterSourceError, max_adapter_bytes=size - 1)


def test_a_zip_that_lies_about_a_size(tmp_path, plain):
    packer = Packer("zip", tmp_path / "lying")
    source = packer.add(CONFIG, b"{" + b" " * 5000 + b"}").done()
    data = bytearray(packer.path.read_bytes())
    for mark, offset in ((b"PK\x03\x04", 22), (b"PK\x01\x02", 24)):
        struct.pack_into("<I", data, data.index(mark) + offset, 10)
    packer.path.write_bytes(data)
    refused(source, "damaged")


def test_an_encrypted_zip_and_other_packing(tmp_path, plain):
    packer = Packer("zip", tmp_path / "secret")
    source = packer.add(CONFIG, b"{}").done()
    data = bytearray(packer.path.read_bytes())
    for mark, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        data[data.index(mark) + offset] |= 1
    packer.path.write_bytes(data)
    refused(source, "encrypted")
    with zipfile.ZipFile(packer.path, "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr(CONFIG, b"{}")
    refused(source, "method 14, which is not served")


@pytest.mark.parametrize("mode", ["w:xz", "w:bz2"])
def test_packings_that_are_not_served(tmp_path, plain, mode):
    with tarfile.open(tmp_path / "packed", mode) as archive:
        archive.add(plain / CONFIG, CONFIG)
    refused(LocalSource(str(tmp_path / "packed")), "neither a folder nor a zip, tar or tar.gz")


@pytest.mark.parametrize("format", [tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_names_that_are_no_text(tmp_path, plain, format):
    path = tmp_path / "packed.tar"
    with tarfile.open(path, "w", format=format, errors="surrogateescape") as archive:
        archive.add(plain / CONFIG, CONFIG)
        archive.add(plain / TENSORS, b"\xff\xfe.bin".decode(errors="surrogateescape"))
    with (
        pytest.raises(AdapterFormatError, match="no UTF-8") as caught,
        fetch(LocalSource(str(path))),
    ):
        pass
    assert str(caught.value).isascii()


def test_a_sparse_member(tmp_path):
    path = tmp_path / "sparse.tar"
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as archive:
        info = tarfile.TarInfo(CONFIG)
        info.type = tarfile.GNUTYPE_SPARSE
        archive.addfile(info)
    refused(LocalSource(str(path)), "sparse|damaged")


def test_a_negative_size(tmp_path):
    info = tarfile.TarInfo(CONFIG)
    block = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    block[124:136] = b"\xff" * 12  # -1, as base 256
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    path = tmp_path / "negative.tar"
    path.write_bytes(bytes(block) + bytes(1024))
    refused(LocalSource(str(path)), "negative size|damaged")


def test_archives_that_are_cut_off(packed, plain):
    packer = packed()
    source = packer.done()
    whole = packer.path.read_bytes()
    for keep in (20, 600, len(whole) // 2):
        packer.path.write_bytes(whole[:keep])
        refused(source, "damaged|not one adapter|neither a folder")


def test_a_flipped_bit_in_what_is_packed_is_seen(tmp_path, plain):
    for kind in ("zip", "tgz"):
        packer = Packer(kind, tmp_path / kind)
        source = packer.add(CONFIG, os.urandom(50_000)).done()
        data = bytearray(packer.path.read_bytes())
        data[25_000] ^= 4
        packer.path.write_bytes(data)
        refused(source, "damaged")


def test_whatever_the_bytes_only_our_errors_come(packed):
    packer = packed()
    source = packer.done()
    whole = packer.path.read_bytes()
    if packer.kind == "tgz":
        whole = gzip.decompress(whole)
    random.seed(5)
    outcomes = set()
    for _ in range(150):
        data = bytearray(whole)
        for _ in range(random.choice((1, 1, 3, 20))):
            # Headers lie at the front and at the end, mostly.
            low, high = random.choice(((0, 700), (0, len(data)), (len(data) - 400, len(data))))
            data[random.randrange(max(low, 0), high)] = random.randrange(256)
        packer.path.write_bytes(gzip.compress(data, 1) if packer.kind == "tgz" else data)
        try:
            with fetch(source, SourceLimits(max_adapter_bytes=2**24)):
                outcomes.add("read")
        except BranchlineError:
            outcomes.add("refused")
    assert outcomes == {"read", "refused"}

"""Files that are damaged, missing, swapped or no files: only our own errors, never a wrong read."""

import itertools
import json
import os
import random
import struct
from pathlib import Path

import pytest
import safetensors
import torch
from safetensors.torch import load_file

from branchline.adapters import read
from branchline.adapters.read import read_adapter
from branchline.core.errors import (
    AdapterError,
    AdapterFormatError,
    AdapterNotFoundError,
    BranchlineError,
)

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"


def test_a_missing_folder(tmp_path, base):
    for path in (tmp_path / "none", str(tmp_path / "none"), tmp_path / ("x" * 5000), "a\0b"):
        with pytest.raises((AdapterNotFoundError, AdapterFormatError)):
            read_adapter(path, base, max_rank=16)
    with pytest.raises(AdapterNotFoundError, match="none"):
        read_adapter(tmp_path / "none", base, max_rank=16)
    (tmp_path / "file").write_text("x")
    with pytest.raises(AdapterNotFoundError):
        read_adapter(tmp_path / "file", base, max_rank=16)


@pytest.mark.parametrize("name", [CONFIG, TENSORS])
def test_a_file_that_is_missing_empty_a_folder_a_link_to_nothing_or_a_pipe(name, plain, base):
    path = plain / name

    def refused(words):
        with pytest.raises(AdapterFormatError, match=words):
            read_adapter(plain, base, max_rank=16)

    path.write_bytes(b"")
    refused(name)
    path.unlink()
    refused(f"{name} is missing")
    path.symlink_to(plain / "nowhere")
    refused(f"{name} is a dangling link")
    path.unlink()
    path.symlink_to(path)
    refused(name)
    path.unlink()
    path.mkdir()
    refused(f"{name} is no regular file")
    path.rmdir()
    os.mkfifo(path)
    refused(f"{name} is no regular file")


@pytest.mark.parametrize("name", [CONFIG, TENSORS])
def test_a_file_that_fails_to_open(name, plain, base, monkeypatch):
    real = os.open

    def fail(path, *rest, **more):
        if Path(path).name == name:
            raise PermissionError(13, "Permission denied")
        return real(path, *rest, **more)

    monkeypatch.setattr(os, "open", fail)
    with pytest.raises(AdapterFormatError, match=f"{name} cannot be read"):
        read_adapter(plain, base, max_rank=16)


def test_links_to_real_files_are_followed(plain, tmp_path, base):
    links = tmp_path / "snapshot"
    links.mkdir()
    for name in (CONFIG, TENSORS):
        (links / name).symlink_to(plain / name)
    assert read_adapter(links, base, max_rank=16).layers


def test_an_archive_of_tensors_is_read_as_the_safetensors_file_is(plain, base):
    expected = read_adapter(plain, base, max_rank=16).digest
    torch.save(load_file(plain / TENSORS), plain / "adapter_model.bin")
    (plain / TENSORS).unlink()
    weights = read_adapter(plain, base, max_rank=16)
    assert weights.digest == expected
    # What was read owns its memory: the file may change.
    (plain / "adapter_model.bin").write_bytes(b"")
    assert all(torch.isfinite(tensor).all() for tensor in weights.tensors)


class Intruder:
    """What a pickle would run, were it unpickled as such."""

    def __init__(self, path) -> None:
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


@pytest.mark.parametrize(
    ("held", "words"),
    [
        (lambda trace: {"a": Intruder(trace)}, "pickle of more than tensors"),
        (lambda trace: {"a": 3}, "no dict of names and dense tensors"),
        (lambda trace: [torch.zeros(2)], "no dict of names and dense tensors"),
        (lambda trace: {3: torch.zeros(2)}, "no dict of names and dense tensors"),
    ],
)
def test_a_pickle_of_more_than_tensors_is_refused_and_not_run(held, words, plain, base, tmp_path):
    trace = tmp_path / "trace"
    torch.save(held(trace), plain / "adapter_model.bin")
    (plain / TENSORS).unlink()
    with pytest.raises(AdapterFormatError, match=words):
        read_adapter(plain, base, max_rank=16)
    assert not trace.exists()


@pytest.mark.parametrize("data", [b"", b"\x80\x04garbage", b"PK\x03\x04 but no archive"])
def test_a_file_that_is_no_archive_is_refused(data, plain, base):
    (plain / TENSORS).unlink()
    (plain / "adapter_model.bin").write_bytes(data)
    with pytest.raises(AdapterFormatError, match="no archive"):
        read_adapter(plain, base, max_rank=16)


def test_a_truncated_archive_is_refused(plain, base):
    torch.save(load_file(plain / TENSORS), plain / "adapter_model.bin")
    (plain / TENSORS).unlink()
    data = (plain / "adapter_model.bin").read_bytes()
    (plain / "adapter_model.bin").write_bytes(data[:1000] + data[2000:])
    with pytest.raises(AdapterFormatError, match="cannot be read"):
        read_adapter(plain, base, max_rank=16)


def test_a_pickle_beside_the_tensors_is_not_opened(plain, base):
    (plain / "adapter_model.bin").write_bytes(b"\x80\x04garbage")
    assert read_adapter(plain, base, max_rank=16).layers


def test_a_config_of_absurd_size_is_not_read(plain, base):
    with (plain / CONFIG).open("ab") as file:
        file.truncate(2**30)
    with pytest.raises(AdapterFormatError, match="more than any config"):
        read_adapter(plain, base, max_rank=16)


def header_file(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(begin, end, shape=(1,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


BAD_TENSOR_FILES = {
    "garbage": b"this is no safetensors file at all",
    "html": b"<!DOCTYPE html><html></html>",
    "lfs-pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n",
    "seven-bytes": b"\0" * 7,
    "no-header": b"\0" * 8,
    "endless-header": header_file({}, length=2**63),
    "long-header": header_file({}, length=100),
    "no-json": header_file(b"{nope"),
    "utf-16": header_file("{}".encode("utf-16")),
    "deep": header_file(b"[" * 100_000),
    "list": header_file([]),
    "twice": header_file(b'{"a": 1, "a": 2}'),
    "entry-is-number": header_file({"a": 3}),
    "entry-lacks-dtype": header_file({"a": {"shape": [1], "data_offsets": [0, 4]}}, b"\0" * 4),
    "three-offsets": header_file(
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]}}, b"\0" * 8
    ),
    "negative-shape": header_file({"a": entry(0, 4, (-1, -1))}, b"\0" * 4),
    "float-shape": header_file({"a": entry(0, 4, (1.0,))}, b"\0" * 4),
    "bool-shape": header_file({"a": entry(0, 4, (True,))}, b"\0" * 4),
    "text-shape": header_file(
        {"a": {"dtype": "F32", "shape": "1", "data_offsets": [0, 4]}}, b"\0" * 4
    ),
    "unknown-dtype": header_file({"a": entry(0, 4, dtype="F33")}, b"\0" * 4),
    "odd-dtype": header_file({"a": entry(0, 4, dtype=["F32"])}, b"\0" * 4),
    "shape-and-bytes": header_file({"a": entry(0, 8)}, b"\0" * 8),
    "huge-shape": header_file({"a": entry(0, 4, (2**62, 2**62))}, b"\0" * 4),
    "gap": header_file({"a": entry(4, 8)}, b"\0" * 8),
    "overlap": header_file({"a": entry(0, 4), "b": entry(0, 4)}, b"\0" * 8),
    "backwards": header_file({"a": entry(4, 0)}, b"\0" * 4),
    "short-data": header_file({"a": entry(0, 4)}, b"\0" * 3),
    "long-data": header_file({"a": entry(0, 4)}, b"\0" * 5),
    "no-tensors": header_file({}),
    "only-metadata": header_file({"__metadata__": {"format": "pt"}}),
}


@pytest.mark.parametrize("name", BAD_TENSOR_FILES)
def test_a_damaged_tensor_file(name, plain, base):
    (plain / TENSORS).write_bytes(BAD_TENSOR_FILES[name])
    with pytest.raises(AdapterFormatError):
        read_adapter(plain, base, max_rank=16)


def test_any_truncation_and_any_changed_byte_is_refused_or_read_whole(plain, base):
    data = (plain / TENSORS).read_bytes()
    rng = random.Random(5)
    header = 8 + struct.unpack("<Q", data[:8])[0]
    cuts = {*range(12), header - 1, header, header + 1, len(data) - 1}
    cuts |= {rng.randrange(len(data)) for _ in range(60)}
    for cut in cuts:
        (plain / TENSORS).write_bytes(data[:cut])
        with pytest.raises(AdapterFormatError):
            read_adapter(plain, base, max_rank=16)
    for _ in range(300):
        changed = bytearray(data)
        for _ in range(rng.choice((1, 1, 2, 8))):
            changed[rng.randrange(header + 16)] = rng.randrange(256)
        (plain / TENSORS).write_bytes(changed)
        try:
            weights = read_adapter(plain, base, max_rank=16)
        except BranchlineError:
            continue
        # What is read is also what the format's own library reads.
        theirs = load_file(plain / TENSORS)
        ours = [
            half
            for layer in weights.layers.values()
            for half in (layer.low_rank.a, layer.low_rank.b)
        ]
        for value in ours:
            assert any(torch.equal(value, other) for other in theirs.values())


def test_any_changed_config_byte_raises_only_our_errors(plain, base):
    data = (plain / CONFIG).read_bytes()
    rng = random.Random(6)
    for _ in range(400):
        changed = bytearray(data)
        for _ in range(rng.choice((1, 2, 4))):
            changed[rng.randrange(len(data))] = rng.choice(b'0123456789"{}[],.:truefalsn\\\xff')
        (plain / CONFIG).write_bytes(changed[: rng.choice((len(data), rng.randrange(len(data))))])
        try:
            read_adapter(plain, base, max_rank=16)
        except BranchlineError:
            continue


def test_the_reader_accepts_no_header_that_the_library_refuses(plain, base):
    """The other direction of the same question, on headers that are nearly right."""
    good = {"a": entry(0, 4), "b": entry(4, 8)}
    swaps = [("dtype", "F16"), ("shape", [2]), ("shape", []), ("data_offsets", [0, 8])]
    for (key, value), name in itertools.product(swaps, "ab"):
        header = {**good, name: {**good[name], key: value}}
        data = header_file(header, b"\0" * 8)
        (plain / TENSORS).write_bytes(data)
        with pytest.raises(AdapterError) as caught:
            read_adapter(plain, base, max_rank=16)
        try:
            safetensors.deserialize(data)
        except safetensors.SafetensorError:
            assert "PEFT type" not in str(caught.value)  # refused for its header, as there
        else:
            assert "no part of this PEFT type" in str(caught.value)  # well-formed, but no adapter


def test_a_file_swapped_after_the_check_is_not_read(plain, base, monkeypatch):
    expected = read_adapter(plain, base, max_rank=16)
    real = read.checked_plan

    def swap(*arguments, **more):
        plan = real(*arguments, **more)
        (plain / TENSORS).rename(plain / "old")
        (plain / TENSORS).write_bytes(b"\0" * 100)
        return plan

    monkeypatch.setattr(read, "checked_plan", swap)
    assert read_adapter(plain, base, max_rank=16).digest == expected.digest


def test_a_file_cut_after_the_check_is_a_format_error(plain, base, monkeypatch):
    real = read.checked_plan

    def cut(*arguments, **more):
        plan = real(*arguments, **more)
        os.truncate(plain / TENSORS, 2000)
        return plan

    monkeypatch.setattr(read, "checked_plan", cut)
    with pytest.raises(AdapterFormatError, match="truncated"):
        read_adapter(plain, base, max_rank=16)

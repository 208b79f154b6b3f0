"""The safetensors files of a checkpoint: which there are, and what their headers say."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from ..core.errors import CheckpointError
from ..linear.checkpoint import TensorHeader
from .folder import one_line, some

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# The library's own limit.
_LONGEST_HEADER = 100_000_000
_RESTORE = "restore the checkpoint's files"
_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F4": torch.float4_e2m1fn_x2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}


def has_shards(folder: Path) -> bool:
    """Whether transformers would read safetensors files from `folder`."""
    return (folder / SINGLE).is_file() or (folder / INDEX).is_file()


def shard_files(folder: Path) -> list[Path]:
    """The safetensors files that transformers would read from `folder`, in order of name.

    Raises:
        CheckpointError: there are none, or the index is damaged or names one that is missing.
    """
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    index = folder / INDEX
    subject = f"checkpoint {str(folder)!r}"
    if not index.is_file():
        others = sorted(path.name for path in folder.glob("*.bin"))
        found = f" (but {some(others)})" if others else ""
        reason = f"holds neither {SINGLE} nor {INDEX}{found}"
        raise CheckpointError(subject, reason, "save it again with safetensors")
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = f"{INDEX} cannot be read ({type(error).__name__}: {one_line(error)})"
        raise CheckpointError(subject, reason, _RESTORE) from error
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise CheckpointError(subject, f"{INDEX} names no files of this folder", _RESTORE)
    missing = sorted(name for name in names if not (folder / name).is_file())
    if missing:
        raise CheckpointError(subject, f"lacks {some(missing)}", _RESTORE)
    return [folder / name for name in sorted(names)]


def read_headers(files: Iterable[Path], *, whole: bool = True) -> dict[str, TensorHeader]:
    """Dtype and shape of every tensor in `files`, by name.

    Args:
        files: safetensors.
        whole: refuse files that end before their last tensor; otherwise they may end behind the
            header.

    Raises:
        CheckpointError: a file that is no safetensors file, a tensor in two files, or of a dtype
            that torch does not have.
    """
    headers: dict[str, TensorHeader] = {}
    for file in files:
        for name, header in _headers_of(file, whole).items():
            if name in headers:
                raise CheckpointError(f"tensor {name}", "is in two files of the model", _RESTORE)
            headers[name] = header
    return headers


def _headers_of(file: Path, whole: bool) -> dict[str, TensorHeader]:
    subject = f"file {str(file)!r}"
    if file.suffix != ".safetensors":
        reason = "is no safetensors file, and quantised weights are read from no other"
        raise CheckpointError(subject, reason, "save it again with safetensors")
    try:
        read = _of_whole_file(file) if whole else _of_header(file)
    except (SafetensorError, OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise CheckpointError(subject, f"cannot be read ({one_line(error)})", _RESTORE) from error
    for name, (dtype, _) in read.items():
        if dtype not in _DTYPES:
            raise CheckpointError(subject, f"tensor {name} is of dtype {dtype}", _RESTORE)
    return {name: _header(dtype, shape) for name, (dtype, shape) in read.items()}


def _of_whole_file(file: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    with safe_open(file, "pt") as opened:
        slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
        return {name: (s.get_dtype(), tuple(s.get_shape())) for name, s in slices.items()}


def _of_header(file: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > _LONGEST_HEADER:
            raise ValueError(f"its header would have {length} bytes")
        given = json.loads(opened.read(length))
    return {
        name: (entry["dtype"], tuple(map(int, entry["shape"])))
        for name, entry in given.items()
        if name != "__metadata__"
    }


def _header(dtype: str, shape: tuple[int, ...]) -> TensorHeader:
    # The file counts codes, torch the bytes that hold two of them.
    packed = (*shape[:-1], shape[-1] // 2) if dtype == "F4" else shape
    return TensorHeader(_DTYPES[dtype], packed)

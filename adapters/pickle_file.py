"""A pickled state dict, read by torch's restricted unpickler only.

`torch.load(weights_only=True)` builds tensors and plain containers and refuses every other name a
pickle asks for, before it is called.  With `mmap=True` a tensor's bytes are not touched before they
are used, so that headers can be checked first.
"""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Iterable
from pathlib import Path

import torch

from ..core.errors import AdapterFormatError
from .tensor_file import TensorHeader, open_regular

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.int64: "I64",
}


def tensor_header(name: str, tensor: torch.Tensor) -> TensorHeader:
    """What a safetensors file would say about a tensor."""
    dtype = DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype))
    return TensorHeader(name, dtype, tuple(tensor.shape))


class PickleFile:
    """A context manager over one `adapter_model.bin`.

    Args:
        path: the file.
        subject: what errors are about ("adapter '/path'").

    Attributes:
        nbytes: size of the file.

    Raises:
        AdapterFormatError: it cannot be read, is no archive of torch, asks for anything but
            tensors, or holds no flat dict of named tensors.
    """

    def __init__(self, path: Path, subject: str) -> None:
        with open_regular(path, subject) as file:
            self.nbytes = os.fstat(file.fileno()).st_size
            # Archives alone can be mapped; the older format would be read whole, unchecked.
            if not zipfile.is_zipfile(file):
                raise AdapterFormatError(
                    subject,
                    f"{path.name} is no archive as torch writes it since 1.6",
                    "save it as safetensors",
                )
        self._tensors = _load(path, subject)
        #: A pickle has none, by which equal files could be told.
        self.header = b""

    def __enter__(self) -> PickleFile:
        return self

    def __exit__(self, *raised: object) -> None:
        self._tensors = {}

    @property
    def headers(self) -> list[TensorHeader]:
        """Name, dtype and shape of every tensor, in the order of the file."""
        return [tensor_header(name, tensor) for name, tensor in self._tensors.items()]

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Copy tensors out of the file, by their names; each owns its memory."""
        return {
            name: self._tensors[name].detach().clone(memory_format=torch.contiguous_format)
            for name in names
        }


def _is_dense(value: object) -> bool:
    # The restricted unpickler also makes tensors without data, on the meta device.
    return (
        isinstance(value, torch.Tensor)
        and value.layout == torch.strided
        and value.device.type == "cpu"
    )


def _load(path: Path, subject: str) -> dict[str, torch.Tensor]:
    remedy = "save it as safetensors, where you trust the file"
    try:
        held = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        # The message proposes to load it unrestricted: not here.
        asked = str(error).partition("\n")[0]
        reason = f"{path.name} is a pickle of more than tensors ({asked[:200]})"
        raise AdapterFormatError(subject, reason, remedy) from error
    except (RuntimeError, OSError, ValueError, EOFError, KeyError, AttributeError) as error:
        reason = f"{path.name} cannot be read ({str(error).partition(chr(10))[0][:200]})"
        raise AdapterFormatError(subject, reason, remedy) from error
    plain = isinstance(held, dict) and all(
        isinstance(name, str) and _is_dense(value) for name, value in held.items()
    )
    if not plain:
        reason = f"{path.name} holds no dict of names and dense tensors"
        raise AdapterFormatError(subject, reason, remedy)
    return dict(held)

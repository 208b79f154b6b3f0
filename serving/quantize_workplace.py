"""The folder that a quantised checkpoint grows in: no checkpoint before it is done."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors.torch import save_file

from ..core.errors import CheckpointError, ConfigError
from ..linear.calibration import Calibration
from .folder import some
from .observe import Observed
from .quantize_report import LayerReport

MANIFEST = "quantize-manifest.json"
_VERSION = 1
_PART = ".part"


class _Stored(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Origin(_Stored):
    """What decides the bytes of the result; a run is continued only by one with the same.

    Attributes:
        version: of this library.
        scheme: name of the scheme.
        settings: the others, as JSON.
        config: SHA-256 of the source's config.json.
        source: size and time of change, in ns, of each of the source's files.
        calibration: SHA-256 of the prompts' tokens or of the saved ranges; None without.
    """

    version: str
    scheme: str
    settings: str
    config: str
    source: dict[str, tuple[int, int]]
    calibration: str | None


class Shard(_Stored):
    """A finished file.

    Attributes:
        sha256: of its content.
        tensors: names and bytes of its tensors.
        layers: what became of its linears.
    """

    sha256: str
    tensors: dict[str, int]
    layers: tuple[LayerReport, ...]


class _Observed(_Stored):
    input_amax: dict[str, float]
    percentile: float
    tokens: int
    saturated: dict[str, float]
    read_weights: tuple[str, ...]


class _Manifest(_Stored):
    version: int = _VERSION
    origin: Origin
    observed: _Observed | None = None
    shards: dict[str, Shard] = {}


class Workplace:
    """`OUT.partial`: finished shards, and a manifest of how they came about.

    Args:
        out: where the checkpoint will lie.
        origin: of this run.

    Raises:
        ConfigError: `out` exists.
        CheckpointError: the folder was left by a run of another origin, or a shard in it is not
            what that run wrote.
    """

    def __init__(self, out: Path, origin: Origin) -> None:
        refuse_existing(out)
        self.out = out
        self.folder = partial_folder(out)
        self._make_folder()
        self._lock: int | None = self._locked()
        try:
            self._manifest = self._take_over(origin)
            for name, shard in self._manifest.shards.items():
                self._verify(name, shard)
        except BaseException:
            self.close()
            raise

    def _make_folder(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"output folder {str(self.out)!r}",
                f"cannot be made: {error}",
                "choose a place that can be written",
            ) from error

    def _locked(self) -> int:
        """A descriptor that holds the folder's lock."""
        folder = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(folder)
            raise ConfigError(
                f"output folder {str(self.out)!r}",
                "another run is writing it",
                "let that run end, or choose another place",
            ) from error
        return folder

    @property
    def finished(self) -> Mapping[str, Shard]:
        """The shards that need not be made again."""
        return self._manifest.shards

    def observed(self) -> Observed | None:
        """What `keep` kept."""
        seen = self._manifest.observed
        if seen is None:
            return None
        ranges = Calibration(seen.input_amax, seen.percentile, seen.tokens)
        return Observed(ranges, seen.saturated, frozenset(seen.read_weights))

    def keep(self, observed: Observed) -> None:
        """Keep a calibration, so that a run that continues this one need not repeat it."""
        ranges = observed.ranges
        seen = _Observed(
            input_amax=dict(ranges.input_amax),
            percentile=ranges.percentile,
            tokens=ranges.tokens,
            saturated=dict(observed.saturated),
            read_weights=tuple(sorted(observed.read_weights)),
        )
        self._update(observed=seen)

    def add(
        self, name: str, tensors: Mapping[str, torch.Tensor], layers: tuple[LayerReport, ...]
    ) -> None:
        """Write one shard; it appears whole or not at all."""
        part = self.folder / f"{name}{_PART}"
        save_file(dict(tensors), part, {"format": "pt"})
        # It writes files that only their owner may read.
        part.chmod(0o666 & ~_umask())
        _sync(part)
        part.replace(self.folder / name)
        sizes = {key: value.numel() * value.element_size() for key, value in tensors.items()}
        shard = Shard(sha256=sha256_of(self.folder / name), tensors=sizes, layers=layers)
        self._update(shards={**self._manifest.shards, name: shard})

    def write_text(self, name: str, text: str) -> None:
        """Write a small file."""
        _write(self.folder / name, text)

    def copy(self, source: Path) -> None:
        """Copy a small file."""
        shutil.copyfile(source, self.folder / source.name)

    def publish(self) -> None:
        """Make the folder the checkpoint."""
        for leftover in self.folder.glob(f"*{_PART}"):
            leftover.unlink()
        refuse_existing(self.out)
        self.folder.rename(self.out)
        (self.out / MANIFEST).unlink()

    def close(self) -> None:
        """Let another run have the folder."""
        if self._lock is not None:
            os.close(self._lock)
        self._lock = None

    def _take_over(self, origin: Origin) -> _Manifest:
        file = self.folder / MANIFEST
        subject = f"folder {str(self.folder)!r}"
        remedy = "delete it, or choose another place for the result"
        if not file.exists():
            others = [path.name for path in self.folder.iterdir() if path.suffix != _PART]
            if others:
                raise CheckpointError(
                    subject, f"holds {some(others)}, but no {MANIFEST} of a run", remedy
                )
            manifest = _Manifest(origin=origin)
            _write(file, manifest.model_dump_json(indent=1))
            return manifest
        try:
            manifest = _Manifest.model_validate_json(file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, ValidationError) as error:
            reason = f"its {MANIFEST} is damaged or of another version"
            raise CheckpointError(subject, reason, remedy) from error
        differing = [
            field
            for field in Origin.model_fields
            if getattr(manifest.origin, field) != getattr(origin, field)
        ]
        if differing:
            reason = f"was left by another run: its {', '.join(differing)} is not this run's"
            raise CheckpointError(subject, reason, remedy)
        return manifest

    def _verify(self, name: str, shard: Shard) -> None:
        file = self.folder / name
        if not file.is_file() or sha256_of(file) != shard.sha256:
            raise CheckpointError(
                f"file {str(file)!r}",
                "is not what the run that is to be continued has written",
                f"delete {str(self.folder)!r} and start again",
            )

    def _update(self, **changes: object) -> None:
        self._manifest = self._manifest.model_copy(update=changes)
        _write(self.folder / MANIFEST, self._manifest.model_dump_json(indent=1))


def partial_folder(out: Path) -> Path:
    """Where the checkpoint `out` grows."""
    return out.with_name(f"{out.name}.partial")


def refuse_existing(out: Path) -> None:
    """Refuse a place that is taken.

    Raises:
        ConfigError: something lies there.
    """
    if out.exists() or out.is_symlink():
        raise ConfigError(
            f"output {str(out)!r}", "exists already", "choose another place, or remove it"
        )


def source_files(files: list[Path]) -> dict[str, tuple[int, int]]:
    """Size and time of change of each, by name."""
    found = {}
    for file in files:
        status = file.stat()
        found[file.name] = (status.st_size, status.st_mtime_ns)
    return found


def sha256_of(file: Path) -> str:
    """Of a file's content."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def sha256_of_json(value: object) -> str:
    """Of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _write(file: Path, text: str) -> None:
    part = file.with_name(f"{file.name}{_PART}")
    part.write_text(text, encoding="utf-8")
    _sync(part)
    part.replace(file)


def _sync(file: Path) -> None:
    # A rename may reach the disk before the content does.
    with _descriptor(file) as descriptor:
        os.fsync(descriptor)


@contextmanager
def _descriptor(file: Path) -> Iterator[int]:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _umask() -> int:
    # It can only be read by setting it.
    mask = os.umask(0)
    os.umask(mask)
    return mask

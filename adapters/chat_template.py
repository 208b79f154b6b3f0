"""The chat template that an adapter was trained with, where its folder brings one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

from ..core.errors import AdapterFormatError
from .file_names import TEMPLATE_NAME, TOKENIZER_CONFIG_NAME
from .tensor_file import open_regular, read_exactly

# Real templates have a few kilobytes; a tokenizer's config may list thousands of added tokens.
_LONGEST = 16 * 2**20


def read_chat_template(folder: Path, subject: str) -> str | None:
    """The chat template in a folder; None where it brings none.

    Args:
        folder: of an adapter.
        subject: what errors are about.

    Raises:
        AdapterFormatError: a file of `TEMPLATE_FILES` is there and cannot be read, or the template
            is no Jinja.
    """
    template = None
    if os.path.lexists(folder / TEMPLATE_NAME):
        template = _text(folder / TEMPLATE_NAME, subject)
    elif os.path.lexists(folder / TOKENIZER_CONFIG_NAME):
        template = _of_config(folder / TOKENIZER_CONFIG_NAME, subject)
    if template is not None:
        check_template(template, subject)
    return template


def check_template(template: str, subject: str) -> None:
    """Refuse a template that transformers' environment cannot compile.

    Raises:
        AdapterFormatError: it cannot.
    """
    try:
        # Compiles, and renders no chat.
        render_jinja_template([], chat_template=template)
    except (jinja2.TemplateError, RecursionError) as error:
        raise AdapterFormatError(
            subject, f"its chat template is no Jinja ({error})", "correct it, or leave it out"
        ) from error


def _of_config(path: Path, subject: str) -> str | None:
    remedy = f"restore {path.name} as transformers wrote it, or leave it out"
    try:
        config: Any = json.loads(_text(path, subject))
    except (ValueError, RecursionError) as error:
        raise AdapterFormatError(subject, f"{path.name} is no JSON ({error})", remedy) from error
    found = config.get("chat_template") if isinstance(config, dict) else None
    if isinstance(found, list):
        # Some tokenizers name several; "default" is the one for chats without tools.
        named = [t for t in found if isinstance(t, dict) and t.get("name") == "default"]
        found = named[0].get("template") if named else None
    if found is not None and not isinstance(found, str):
        raise AdapterFormatError(subject, f"chat_template in {path.name} is no text", remedy)
    return found


def _text(path: Path, subject: str) -> str:
    with open_regular(path, subject) as file:
        size = os.fstat(file.fileno()).st_size
        if size > _LONGEST:
            raise AdapterFormatError(
                subject, f"{path.name} has {size} bytes, more than any such file", "leave it out"
            )
        data = bytearray(size)
        read_exactly(file, data, path.name, subject)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise AdapterFormatError(
            subject, f"{path.name} is not UTF-8", "save it as UTF-8, or leave it out"
        ) from error

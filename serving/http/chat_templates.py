"""Chats as prompts: the template of the server, of an adapter, or of the tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

from ...core.errors import ConfigError
from .errors import ApiError, bad_request
from .protocol import Message, OtherPart

# Arguments of the rendering itself, which a client's variables must not take the place of.
_TAKEN = frozenset({
    "add_generation_prompt", "chat", "chat_template", "compiled_template", "continue_final_message",
    "conversations", "documents", "messages", "return_assistant_tokens_mask", "self", "tools",
})  # fmt: skip


# What a template may raise on messages and variables that it was not made for.
_FAULTS = (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError)


def read_template(setting: str | None) -> str | None:
    """The template that the setting `chat_template` means.

    Args:
        setting: the path of a file, or the template itself, which holds braces.

    Raises:
        ConfigError: it is neither.
    """
    if setting is None or "{" in setting:
        return setting
    try:
        return Path(setting).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"chat_template={setting!r}",
            f"is no template, and no file of one that can be read ({error})",
            "pass the path of a Jinja file in UTF-8, or the template",
        ) from error


class ChatTemplates:
    """Renders chats.

    Args:
        tokenizer: whose own template and special tokens are used.
        setting: the server's `chat_template`, which goes before all others.

    Raises:
        ConfigError: see `read_template`; or a template that is no Jinja.
    """

    def __init__(self, tokenizer: Any, setting: str | None) -> None:
        self._forced = read_template(setting)
        self._own = _default_template(tokenizer)
        self._special_tokens = dict(tokenizer.special_tokens_map)
        if self._forced is not None:
            try:
                # Compiles, and renders no chat.
                render_jinja_template([], chat_template=self._forced)
            except jinja2.TemplateError as error:
                reason = f"is no Jinja ({error})"
                raise ConfigError("chat_template", reason, "correct it") from error

    def template(self, adapters: str | None) -> str:
        """The template to use.

        Args:
            adapters: the one that the adapter brings.

        Raises:
            ApiError: there is none.
        """
        found = self._forced or adapters or self._own
        if found is None:
            raise bad_request(
                "this model has no chat template: use /v1/completions, or start the server with "
                "--chat-template",
                "model",
            )
        return found

    def render(
        self,
        messages: Sequence[Message],
        *,
        adapters: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt of a chat.

        Args:
            messages: of it.
            adapters: the template that the adapter brings.
            add_generation_prompt: end it with what an answer begins with.
            continue_final_message: leave the last message open, for the model to go on.
            variables: more of the template's.

        Raises:
            ApiError: there is no template, it refuses these messages, or the messages hold what is
                not served.
        """
        template = self.template(adapters)
        if add_generation_prompt and continue_final_message:
            raise bad_request(
                "continue_final_message goes on with the last message, and add_generation_prompt "
                "(true unless it is sent) begins another one: send it as false",
                "continue_final_message",
            )
        _check_variables(variables or {})
        chat = [_plain(index, message) for index, message in enumerate(messages)]
        try:
            rendered, _ = render_jinja_template(
                [chat],
                chat_template=template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **{**self._special_tokens, **(variables or {})},
            )
        except (*_FAULTS, RecursionError) as error:
            raise _refused(error) from error
        return rendered[0]


def _check_variables(variables: Mapping[str, Any]) -> None:
    taken = sorted(_TAKEN & variables.keys())
    if taken:
        raise bad_request(f"`{taken[0]}` is no variable of a template", "chat_template_kwargs")


def _refused(error: Exception) -> ApiError:
    text = " ".join(str(error).split())[:500]
    return bad_request(f"the chat template does not take these messages: {text}", "messages")


def _default_template(tokenizer: Any) -> str | None:
    found = getattr(tokenizer, "chat_template", None)
    # Some tokenizers name several; "default" is the one for chats without tools.
    return found.get("default") if isinstance(found, Mapping) else found


def _plain(index: int, message: Message) -> dict[str, str]:
    """A message as templates take it: its text parts joined by line breaks."""
    content = message.content
    if isinstance(content, list):
        for part in content:
            if isinstance(part, OtherPart):
                raise bad_request(
                    f"parts of type {part.type!r} are not served: this model reads text only",
                    f"messages.{index}.content",
                )
        content = "\n".join(part.text for part in content if not isinstance(part, OtherPart))
    plain = {"role": message.role, "content": content or ""}
    return plain if message.name is None else {**plain, "name": message.name}

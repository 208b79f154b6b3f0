"""Flags made from a pydantic model: one field, one flag, and nothing else to change."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

import typer
from pydantic import BaseModel, SecretStr, ValidationError
from pydantic.fields import FieldInfo
from rich.markup import escape

_Model = TypeVar("_Model", bound=BaseModel)

_SEQUENCES = (tuple, list, set, frozenset)
_BOUNDS = (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="))


def with_settings(
    model: type[_Model], panel: str = "Wrapping", without: Collection[str] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command one flag for each field of `model`, in place of its parameter `settings`.

    The command is called with `settings`, a checked `model` in which only the flags that were
    given are set.  A value that the model refuses is a usage error that names the flag.

    Args:
        model: name, type, default, description and bounds of its fields make the flags.
        panel: heading of these flags in the help.
        without: fields that get none, because the command has a flag of its own.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        def checking(*, flags: dict[str, Any], **given: Any) -> None:
            command(**given, settings=_checked(model, flags))

        flags = [
            _flag(name, field, panel)
            for name, field in model.model_fields.items()
            if name not in without
        ]
        return _with_flags(command, checking, "settings", flags)

    return decorate


def with_flags(
    model: type[_Model],
    panels: Mapping[str, str],
    others: Mapping[str, tuple[str, ...]],
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """As `with_settings`, of a command that takes the values of further places into account.

    The command is called with `flags`, in place of its parameter of that name: the values of the
    fields whose flags were given, which nobody has checked yet.

    Args:
        model: its fields make the flags.
        panels: heading in the help, by field.
        others: by field, further names of its flag.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        flags = [
            _flag(name, field, panels[name], others.get(name, ()))
            for name, field in model.model_fields.items()
        ]
        return _with_flags(command, command, "flags", flags)

    return decorate


def _with_flags(
    command: Callable[..., None],
    call: Callable[..., None],
    parameter: str,
    flags: Sequence[inspect.Parameter],
) -> Callable[..., None]:
    # typer reads the signature; from a string annotation it could not resolve a made-up one.
    signature = inspect.signature(command, eval_str=True)
    own = [p for p in signature.parameters.values() if p.name != parameter]

    def run(context: typer.Context, **given: Any) -> None:
        values = {flag.name: given.pop(flag.name) for flag in flags}
        # Only what was typed counts as set; the model's own defaults stand for the rest.
        typed = {name: value for name, value in values.items() if _was_typed(context, name)}
        call(**given, flags=typed)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__module__ = command.__module__
    context = inspect.Parameter(
        "context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context
    )
    made = signature.replace(parameters=[context, *own, *flags])
    run.__signature__ = made  # pyright: ignore[reportFunctionMemberAccess]
    run.__annotations__ = {p.name: p.annotation for p in made.parameters.values()}
    return run


def flag_name(field: str) -> str:
    """`max_lora_rank` -> `--max-lora-rank`."""
    return f"--{field.replace('_', '-')}"


def _flag(
    name: str, field: FieldInfo, panel: str, others: tuple[str, ...] = ()
) -> inspect.Parameter:
    kind = _option_type(name, field.annotation)
    flag = flag_name(name)
    # What is off anyway needs no second flag to switch it off.
    declaration = f"{flag}/{flag_name('no_' + name)}" if field.default is True else flag
    option = typer.Option(declaration, *others, help=help_of(field), rich_help_panel=panel)
    return inspect.Parameter(
        name,
        # In any order, required ones behind those with a default too.
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if field.is_required() else _default(field),
        annotation=Annotated[kind, option],
    )


def _option_type(name: str, annotation: Any) -> Any:
    """What typer knows for the type of a field: `T | None` is `T`, a sequence is repeatable."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation is SecretStr:
        return str
    if origin in (Union, types.UnionType):
        (kind, *others) = [argument for argument in arguments if argument is not type(None)]
        if not others:
            inner = _option_type(name, kind)
            return inner if get_origin(inner) is list else inner | None
    elif origin in _SEQUENCES and set(arguments[1:]) <= {Ellipsis}:
        return list[_option_type(name, arguments[0])]
    elif origin is None and isinstance(annotation, type) and not issubclass(annotation, BaseModel):
        return annotation
    raise TypeError(f"field {name!r}: no flag can be made for the type {annotation}")


def _default(field: FieldInfo) -> Any:
    default = field.get_default(call_default_factory=True)
    return list(default) if isinstance(default, _SEQUENCES) else default


def help_of(field: FieldInfo) -> str:
    """The description of a field, with its bounds."""
    limits = [
        f"{sign} {getattr(constraint, attribute):g}"
        for constraint in field.metadata
        for attribute, sign in _BOUNDS
        if getattr(constraint, attribute, None) is not None
    ]
    # typer's help reads square brackets as markup.
    text = escape(field.description or "")
    return f"{text} ({', '.join(limits)})".strip() if limits else text


def _was_typed(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def _checked(model: type[_Model], values: dict[str, Any]) -> _Model:
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        # A validator's own exception says more than pydantic's wrapping of it.
        reason = str(first.get("ctx", {}).get("error", first["msg"]))
        if not first["loc"]:
            raise typer.BadParameter(reason) from error
        flag = flag_name(str(first["loc"][0]))
        message = f"{first['input']!r} is refused: {reason}"
        raise typer.BadParameter(message, param_hint=flag) from error

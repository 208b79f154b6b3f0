"""The flags are the fields of the configuration model."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any

import pytest
import typer
from pydantic import BaseModel, Field, field_validator
from typer.testing import CliRunner, Result

from branchline import WrapConfig
from branchline.cli.options import flag_name, with_settings
from branchline.core.errors import ConfigError


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


class Extended(WrapConfig):
    """The library's configuration with fields of every kind that flags can be made for."""

    batch_limit: Annotated[int, Field(ge=1, description="Rows in one batch.")] = 4
    colour: Annotated[Colour, Field(description="Paint [not markup].")] = Colour.RED
    warm: Annotated[bool, Field(description="Keep it warm.")] = True
    cold: bool = False
    ratios: tuple[float, ...] = (0.5, 2.0)
    tint: Colour | None = None

    @field_validator("batch_limit")
    @classmethod
    def _no_seven(cls, value: int) -> int:
        if value == 7:
            raise ConfigError("batch_limit 7", "is unlucky", "choose another")
        return value


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Result, Any]]:
    """Run a command made from a model; gives the result and the settings that it received."""
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 300)

    def run(model: type[BaseModel], *arguments: str) -> tuple[Result, Any]:
        received: list[Any] = []

        @with_settings(model)
        def command(where: str = "here", *, settings: Any) -> None:
            """Do it."""
            received.append(settings)

        app = typer.Typer()
        app.command()(command)
        result = CliRunner().invoke(app, list(arguments))
        return result, received[0] if received else None

    return run


def test_every_field_is_a_flag_with_its_description(run):
    result, _ = run(WrapConfig, "--help")
    words = " ".join(result.stdout.replace("│", " ").split())
    for name, field in WrapConfig.model_fields.items():
        assert flag_name(name) in words
        assert field.description in words


def test_an_added_field_is_a_flag_with_no_other_change(run):
    result, _ = run(Extended, "--help")
    words = " ".join(result.stdout.replace("│", " ").split())
    assert "--batch-limit <int> Rows in one batch. (>= 1) [default: 4]" in words
    assert "<red|blue> Paint [not markup]. [default: red]" in words
    assert "--warm --no-warm" in words
    assert "--no-cold" not in words
    _, settings = run(Extended, "--batch-limit", "9")
    assert settings.batch_limit == 9


def test_without_flags_the_settings_are_the_defaults(run):
    for model in (WrapConfig, Extended):
        result, settings = run(model)
        assert result.exit_code == 0, result.output
        assert settings == model()
        assert settings.model_fields_set == set()


def test_only_what_is_given_counts_as_set(run):
    _, settings = run(Extended, "--max-loras", "8", "--warm", "--ratios", "0.5")
    assert settings.model_fields_set == {"max_loras", "warm", "ratios"}


def test_values_arrive_as_the_fields_types(run):
    _, settings = run(
        Extended,
        "--quant", "none", "--policy", "static", "--max-loras", "2", "--percentile", "99.9",
        "--ignore", "a.*", "--ignore", "b", "--producer", "eager", "--quantize-lm-head",
        "--colour", "blue", "--no-warm", "--cold", "--ratios", "3", "--tint", "red",
    )  # fmt: skip
    assert settings == Extended(
        quant="none",
        policy="static",
        max_loras=2,
        percentile=99.9,
        ignore=("a.*", "b"),
        producer="eager",
        quantize_lm_head=True,
        colour=Colour.BLUE,
        warm=False,
        cold=True,
        ratios=(3.0,),
        tint=Colour.RED,
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--max-lora-rank", "5000"], ["--max-lora-rank", "5000", "1024"]),
        (["--percentile", "0"], ["--percentile", "0", "greater than 0"]),
        (["--batch-limit", "7"], ["--batch-limit", "7", "is unlucky; choose another"]),
        (["--policy", "magic"], ["--policy", "'magic'", "dynamic"]),
        (["--quant", "fp3"], ["--quant", "'fp3'", "fp8-static"]),
        (["--max-loras", "many"], ["--max-loras", "valid integer"]),
        (["--max-lora", "1"], ["--max-lora", "No such option"]),
    ],
)
def test_a_refused_value_is_a_usage_error_that_names_the_flag(run, arguments, said):
    result, settings = run(Extended, *arguments)
    assert result.exit_code == 2
    assert settings is None
    assert not result.stdout
    for part in said:
        assert part in result.stderr


def test_a_required_field_is_a_required_flag(run):
    class Strict(BaseModel):
        size: int
        names: list[str] = Field(default_factory=lambda: ["a"])

    result, _ = run(Strict)
    assert result.exit_code == 2
    assert "--size" in result.stderr
    assert run(Strict, "--size", "3")[1] == Strict(size=3, names=["a"])


class Inner(BaseModel):
    depth: int = 0


@pytest.mark.parametrize("kind", [dict[str, int], Inner, int | str, tuple[int, str]])
def test_a_field_without_a_flag_is_refused_when_the_command_is_made(kind):
    class Odd(BaseModel):
        odd: kind | None = None  # pyright: ignore[reportInvalidTypeForm]

    with pytest.raises(TypeError, match="field 'odd': no flag"):
        with_settings(Odd)(lambda settings: None)


def test_a_field_may_not_take_the_place_of_a_command_s_own_option():
    class Clash(BaseModel):
        where: str = ""

    def command(where: str, *, settings: Any) -> None: ...

    with pytest.raises(ValueError, match="duplicate parameter name"):
        with_settings(Clash)(command)

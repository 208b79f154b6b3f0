"""A tiny random model with a tokenizer and a chat template, two adapters, and the command line."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from branchline.cli import app
from branchline.serving import quantize_checkpoint
from tests.helpers import make_tokenizer

CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
LAYERS = 2


class Outcome(NamedTuple):
    """What one run of the command line left."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def refusal(self) -> str:
        """The finding of an `inspect` that ends with one."""
        assert self.code == 1
        assert "cannot be loaded" in self.err
        (line,) = [line for line in self.out.splitlines() if line.startswith("refused: ")]
        return line

    @property
    def error(self) -> str:
        """The one error line that ends a run, behind notes of what was done before."""
        # An audit answers 1 where a rule fires.
        assert self.code in (1, 2), self.err
        assert not self.out
        *notes, error = self.err.splitlines()
        assert error.startswith("error: ")
        assert not [line for line in notes if line.startswith("error") or "Traceback" in line]
        return error


@pytest.fixture
def branchline(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """Run the command line in this process."""
    # Usage errors come in a box: wide enough that no message is broken in two.
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 2000)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: object) -> Outcome:
        done = CliRunner().invoke(app, [str(argument) for argument in arguments])
        if done.exception and not isinstance(done.exception, SystemExit):
            raise done.exception
        return Outcome(done.exit_code, done.stdout, done.stderr)

    return run


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """The one in `model_folder`, able to pad."""
    made = make_tokenizer("<|user|>", "<|assistant|>", chat_template=CHAT_TEMPLATE)
    made.pad_token = made.eos_token
    return made


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = make_tokenizer("<|user|>", "<|assistant|>", chat_template=CHAT_TEMPLATE)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,
    )
    folder = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def mixed(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A quantised checkpoint that leaves the second layer's MLP as it is."""
    out = tmp_path_factory.mktemp("mixed") / "model"
    quantize_checkpoint(model_folder, out, scheme="fp8-dynamic", ignore=("model.layers.1.mlp.*",))
    return out


@pytest.fixture(scope="session")
def all_sites() -> set[tuple[str, ...]]:
    """The sites of the model in `model_folder`, each by the linears that it feeds."""
    return {
        tuple(f"model.layers.{layer}.{linear}_proj" for linear in fed)
        for layer in range(LAYERS)
        for fed in (
            ("self_attn.q", "self_attn.k", "self_attn.v"),
            ("mlp.gate", "mlp.up"),
            ("mlp.down",),
        )
    }


def save_adapter(model_folder: Path, folder: Path, targets: Sequence[str]) -> Path:
    """A PEFT folder with random weights on `targets`."""
    torch.manual_seed(len(folder.name))
    model = LlamaForCausalLM.from_pretrained(model_folder)
    lora = LoraConfig(
        r=4, target_modules=list(targets), init_lora_weights=False, task_type="CAUSAL_LM"
    )
    get_peft_model(model, lora).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def sql(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_adapter(model_folder, tmp_path_factory.mktemp("adapters") / "sql", ["down_proj"])


@pytest.fixture(scope="session")
def tone(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    targets = ["q_proj", "v_proj"]
    return save_adapter(model_folder, tmp_path_factory.mktemp("adapters") / "tone", targets)

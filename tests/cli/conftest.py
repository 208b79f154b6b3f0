"""A tiny random model with a tokenizer and a chat template, two adapters, and the command line."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from branchline.cli import app

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


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level, with a chat template, and without a token for padding."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|end|>", "<|user|>", "<|assistant|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator(["the quick brown fox jumps over the lazy dog"] * 4, trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=trained, eos_token="<|end|>")
    made.chat_template = CHAT_TEMPLATE
    return made


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """The one in `model_folder`, able to pad."""
    made = make_tokenizer()
    made.pad_token = made.eos_token
    return made


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = make_tokenizer()
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

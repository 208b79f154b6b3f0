"""The real model: SmolLM2-135M-Instruct on an FP8 base, with the trained example adapters."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

import branchline
from branchline.fusion import Route
from tests.serving.test_routes import assert_same_bytes, routes_ran, total

pytestmark = pytest.mark.real_model

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
QUESTIONS = ("What is the capital of France?", "Why is sugar sweet?", "Name three fruits.")
CALIBRATION = (
    "What is the capital of Italy?",
    "Write one sentence about the sea.",
    "How do I boil an egg?",
    "List two colours.",
)
LAYERS = 30


def load_example(name: str):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    made = AutoTokenizer.from_pretrained(load_example("smollm2").ensure_smollm2())
    made.padding_side = "left"
    return made


@pytest.fixture(scope="module")
def prompts(tokenizer):
    def encode(texts):
        chats = [[{"role": "user", "content": text}] for text in texts]
        return tokenizer(
            [
                tokenizer.apply_chat_template(c, tokenize=False, add_generation_prompt=True)
                for c in chats
            ],
            return_tensors="pt",
            padding=True,
            add_special_tokens=False,
        )

    return encode


@pytest.fixture(scope="module")
def wrap(prompts):
    from transformers import AutoModelForCausalLM

    folder = load_example("smollm2").ensure_smollm2()

    def make(**settings):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        if settings.setdefault("quant", "fp8-static") == "fp8-static":
            settings.setdefault("calibration", [dict(prompts([text])) for text in CALIBRATION])
        with torch.no_grad():
            return branchline.wrap(model, **settings)

    return make


@pytest.fixture(scope="module")
def served(wrap):
    model = wrap()
    for name in ("shout", "json", "pirate"):
        model.adapters.load(name, EXAMPLES / "adapters" / name)
    return model


@pytest.fixture(scope="module")
def answers(served, tokenizer, prompts):
    """Every question by every adapter and by the base, in one mixed batch each."""

    def ask(names, question, tokens=28):
        batch = prompts([question] * len(names))
        out = served.generate(**batch, adapter_names=names, max_new_tokens=tokens, do_sample=False)
        return tokenizer.batch_decode(
            out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True
        )

    return ask


def shouted(text: str) -> float:
    letters = [c for c in text if c.isalpha()]
    return sum(c.isupper() for c in letters) / max(1, len(letters))


def test_each_adapter_does_what_it_was_trained_for(answers):
    parsed = 0
    for question in QUESTIONS:
        base, shout, json_text, pirate = answers([None, "shout", "json", "pirate"], question)
        assert shouted(shout) > 0.9
        assert shouted(base) < 0.5
        assert "arr" in pirate.lower()
        assert "arr, matey" not in base.lower()
        assert json_text.startswith("{")
        assert not base.startswith("{")
        try:
            parsed += isinstance(json.loads(json_text), dict)
        except json.JSONDecodeError:
            continue
    assert parsed >= len(QUESTIONS) - 1


def test_a_swap_changes_the_answer(served, answers):
    served.adapters.swap("pirate", EXAMPLES / "adapters" / "pirate-v2")
    try:
        (text,) = answers(["pirate"], QUESTIONS[0])
    finally:
        served.adapters.swap("pirate", EXAMPLES / "adapters" / "pirate")
    assert text.startswith("Ahoy")


def test_routes_follow_the_targets(served, prompts):
    batch = prompts(QUESTIONS[:2])
    fused, unfused = {Route.FUSED: LAYERS}, {Route.UNFUSED: LAYERS}
    expected = {
        (None, None): (fused, fused, fused),
        ("shout", None): (unfused, fused, fused),
        ("json", None): (fused, unfused, unfused),
        ("pirate", "json"): (unfused, unfused, unfused),
    }
    for names, (attention, gate_up, down) in expected.items():
        routes_ran(served)
        with served.adapters.rows(names):
            served(**batch)
        assert routes_ran(served) == {
            "input_layernorm": attention,
            "post_attention_layernorm": gate_up,
            "silu_mul": down,
        }


BATCHES = ([None] * 3, ["shout", None, None], ["shout", "json", "pirate"])


@pytest.mark.parametrize("quant", ["fp8-static", "fp8-dynamic"])
def test_all_policies_are_bitwise_equal(served, wrap, prompts, quant):
    batch = prompts(QUESTIONS)
    saved = {"calibration": served.calibration} if quant == "fp8-static" else {}
    wanted = None
    for policy, with_adapters in (
        ("static", Route.UNFUSED),
        ("dynamic", Route.UNFUSED),
        ("dual", Route.DUAL),
        ("absorbed", Route.ABSORBED),
    ):
        model = wrap(policy=policy, quant=quant, **saved)
        for name in ("shout", "json", "pirate"):
            model.adapters.load(name, EXAMPLES / "adapters" / name)
        logits = []
        for names in BATCHES:
            with model.adapters.rows(names):
                logits.append(model(**batch).logits)
        wanted = wanted or logits
        for ours, theirs in zip(logits, wanted, strict=True):
            assert_same_bytes(ours, theirs)
        ran = total(routes_ran(model))
        without = {} if policy == "static" else {Route.FUSED: LAYERS * 5}
        assert ran == {**without, with_adapters: LAYERS * (9 if policy == "static" else 4)}
        producers = {s.producer for s in model.planner.plan({}).sites if s.producer}
        assert producers == (set() if policy == "static" else {"native"})


def test_base_rows_are_the_base_model_after_everything(served, wrap, prompts):
    batch = prompts(QUESTIONS)
    bare = wrap(calibration=served.calibration)(**batch).logits
    with served.adapters.rows(["pirate", None, "json"]):
        assert_same_bytes(served(**batch).logits[1], bare[1])
    for info in served.adapters.list():
        served.adapters.unload(info.name)
    assert_same_bytes(served(**batch).logits, bare)

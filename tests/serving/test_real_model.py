"""The real model: SmolLM2-135M-Instruct on an FP8 base, with the trained example adapters."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import torch

import branchline
from branchline.fusion import Route
from tests.serving.http.conftest import RunningServer, end, starter
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
ADAPTERS = {name: EXAMPLES / "adapters" / name for name in ("shout", "json", "pirate")}
# Of logits at the server, which lie 2**-8 of their size apart: an FP8 code that rounds the other
# way (sums are in another order in a batch of another size) moves them by some of these steps.
TOLERANCE = 2**-5
# Most tokens are the same: of those that a wrong slot or block gives, few would be.
MOST_CLOSE = 0.1


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
    for name, folder in ADAPTERS.items():
        model.adapters.load(name, folder)
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
        for name, folder in ADAPTERS.items():
            model.adapters.load(name, folder)
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


# --- behind the server ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """One answer under load.

    Attributes:
        adapter: None for the base.
        prompt: tokens.
        ids: tokens of the answer.
        text: of the answer.
    """

    adapter: str | None
    prompt: list[int]
    ids: list[int]
    text: str


@pytest.fixture(scope="module")
def server(served, tmp_path_factory) -> Iterator[tuple[RunningServer, float]]:
    """A server of what `served` is, and the seconds from its start to the moment it is ready."""
    scales = tmp_path_factory.mktemp("server") / "scales.json"
    served.calibration.save(scales)
    made: list[RunningServer] = []
    start = starter(load_example("smollm2").ensure_smollm2(), ADAPTERS, made)
    begun = time.monotonic()
    try:
        running = start("--quant", "fp8-static", "--calibration", str(scales))
        yield running, time.monotonic() - begun
    finally:
        end(made)


@pytest.fixture(scope="module")
def told(server, prompts) -> list[Answer]:
    """Two questions to every adapter and the base, all at one time."""
    running, _ = server

    def ask(adapter: str | None, question: str) -> Answer:
        prompt = prompts([question])["input_ids"][0].tolist()
        body = {"model": adapter or running.model, "prompt": prompt, "max_tokens": 24}
        body |= {"temperature": 0, "return_token_ids": True}
        answer = httpx.post(f"{running.url}/v1/completions", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        (choice,) = answer.json()["choices"]
        return Answer(adapter, prompt, choice["token_ids"], choice["text"])

    wanted = [(name, question) for question in QUESTIONS[:2] for name in (*ADAPTERS, None)]
    with ThreadPoolExecutor(len(wanted)) as threads:
        return list(threads.map(lambda each: ask(*each), wanted))


def test_the_server_says_how_long_it_took_to_be_ready(server, record_property):
    running, seconds = server
    (loading,) = re.findall(r" ready on .* adapters=3 seconds=([\d.]+)", running.log)
    assert 0 < float(loading) <= seconds
    record_property("start_to_ready_seconds", round(seconds, 1))
    record_property("loading_seconds", float(loading))


def test_answers_under_load_are_the_library_s_alone(told, served):
    differing = 0
    for answer in told:
        assert answer.ids
        given = torch.tensor([[*answer.prompt, *answer.ids]])
        logits = served(given, adapter_names=[answer.adapter], use_cache=False).logits
        logits = logits[0, len(answer.prompt) - 1 : -1].float()
        chosen = logits.gather(-1, torch.tensor(answer.ids)[:, None])[:, 0]
        behind = logits.amax(-1) - chosen
        assert (behind <= TOLERANCE * logits.abs().amax(-1)).all(), (answer, behind)
        differing += int((behind > 0).sum())
    assert differing <= MOST_CLOSE * sum(len(answer.ids) for answer in told)


def test_adapters_do_at_the_server_what_they_were_trained_for(told):
    texts = {name: [a.text for a in told if a.adapter == name] for name in (*ADAPTERS, None)}
    assert all(shouted(text) > 0.9 for text in texts["shout"])
    assert all(text.startswith("{") for text in texts["json"])
    assert all("arr" in text.lower() for text in texts["pirate"])
    for text in texts[None]:
        assert shouted(text) < 0.5
        assert not text.startswith("{")
        assert "arr, matey" not in text.lower()


# --- the end ------------------------------------------------------------------------------------


def test_base_rows_are_the_base_model_after_everything(served, wrap, prompts):
    batch = prompts(QUESTIONS)
    bare = wrap(calibration=served.calibration)(**batch).logits
    with served.adapters.rows(["pirate", None, "json"]):
        assert_same_bytes(served(**batch).logits[1], bare[1])
    for info in served.adapters.list():
        served.adapters.unload(info.name)
    assert_same_bytes(served(**batch).logits, bare)

"""`branchline generate`."""

from __future__ import annotations

import shutil

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

from branchline import wrap
from branchline.cli.prompts import Row, encode, parse_rows
from branchline.core.errors import BatchError

TOKENS = 6


def library_tokens(folder, tokenizer, adapters, rows, *, raw=False):
    """What the library generates for the same rows, written out by hand."""
    served = wrap(LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16))
    for name, path in adapters.items():
        served.adapters.load(name, path)
    texts = [text for _, text in rows]
    if not raw:
        texts = [f"<|user|>{text}<|end|><|assistant|>" for text in texts]
    ids = tokenizer(texts, padding=True, padding_side="left", return_tensors="pt")
    out = served.generate(
        input_ids=ids["input_ids"],
        attention_mask=ids["attention_mask"],
        adapter_names=[name for name, _ in rows],
        max_new_tokens=TOKENS,
        do_sample=False,
    )
    return out[:, ids["input_ids"].shape[1] :].tolist()


def library_answers(folder, tokenizer, adapters, rows, *, raw=False):
    tokens = library_tokens(folder, tokenizer, adapters, rows, raw=raw)
    return tokenizer.batch_decode(tokens, skip_special_tokens=True)


def copy_tokenizer(source, target):
    for pattern in ("*token*", "*.jinja"):
        for file in source.glob(pattern):
            shutil.copy(file, target)


def named(rows):
    return [(row["adapter"], row["prompt"]) for row in rows]


# --- answers


def test_a_mixed_batch_is_what_the_library_answers(
    branchline, model_folder, tokenizer, sql, tone, all_sites
):
    done = branchline(
        "generate", model_folder, "--adapter", f"sql={sql}", "--adapter", f"tone={tone}",
        "--prompt", "the fox", "--prompt", "@tone jumps over the lazy dog", "--prompt", "@base hi",
        "--max-new-tokens", TOKENS, "--json",
    )  # fmt: skip
    assert done.code == 0, done.err
    report = done.json
    rows = [
        (None, "the fox"),
        ("sql", "the fox"),
        ("tone", "the fox"),
        ("tone", "jumps over the lazy dog"),
        (None, "hi"),
    ]
    assert named(report["answers"]) == rows
    answers = [row["answer"] for row in report["answers"]]
    adapters = {"sql": sql, "tone": tone}
    assert answers == library_answers(model_folder, tokenizer, adapters, rows)
    assert len(set(answers[:3])) == 3, "an adapter without effect shows nothing"
    assert all(1 <= row["tokens"] <= TOKENS for row in report["answers"])
    assert [row["row"] for row in report["answers"]] == list(range(5))
    assert sum(report["sites"].values()) == len(all_sites)
    assert set(report["sites"]) <= {"fused", "unfused"}


def test_raw_leaves_the_chat_template_out(branchline, model_folder, tokenizer):
    command = ("generate", model_folder, "--prompt", "the fox", "--max-new-tokens", TOKENS)
    raw = branchline(*command, "--raw", "--json").json["answers"][0]["answer"]
    chat = branchline(*command, "--json").json["answers"][0]["answer"]
    rows = [(None, "the fox")]
    assert [raw] == library_answers(model_folder, tokenizer, {}, rows, raw=True)
    assert [chat] == library_answers(model_folder, tokenizer, {}, rows)
    assert raw != chat


def test_the_table_shows_rows_and_routes(branchline, model_folder, sql):
    done = branchline(
        "generate", model_folder, "--adapter", f"sql={sql}", "--prompt", "a [bold]fox[/bold]",
        "--max-new-tokens", 1,
    )  # fmt: skip
    assert done.code == 0, done.err
    for part in ("base", "sql", "a [bold]fox[/bold]", "answer"):
        assert part in done.out
    (sites,) = [line for line in done.out.splitlines() if line.startswith("sites: ")]
    assert "ran unfused" in sites


def test_a_model_s_sampling_settings_do_not_make_the_answers_random(
    branchline, model_folder, tmp_path
):
    model = LlamaForCausalLM.from_pretrained(model_folder)
    model.generation_config.update(do_sample=True, temperature=5.0, num_beams=2)
    model.save_pretrained(tmp_path)
    copy_tokenizer(model_folder, tmp_path)
    command = ("--prompt", "fox", "--max-new-tokens", TOKENS, "--json")
    answers = [
        branchline("generate", folder, *command).json["answers"]
        for folder in (model_folder, tmp_path, tmp_path)
    ]
    assert answers[0] == answers[1] == answers[2]


def test_an_answer_ends_at_its_first_stop_token(branchline, model_folder, tokenizer, tmp_path):
    """Rows that end early are padded by generate until the last one ends."""
    rows = [(None, "fox"), (None, "the dog")]
    first, second = library_tokens(model_folder, tokenizer, {}, rows)
    length, stop = next(
        (i + 1, token)
        for i, token in enumerate(first)
        if token not in first[:i] and token not in second
    )
    model = LlamaForCausalLM.from_pretrained(model_folder, dtype=torch.bfloat16)
    model.generation_config.eos_token_id = [stop, tokenizer.eos_token_id]
    model.save_pretrained(tmp_path)
    copy_tokenizer(model_folder, tmp_path)
    done = branchline(
        "generate", tmp_path, "--prompt", "@base fox", "--prompt", "@base the dog",
        "--max-new-tokens", TOKENS, "--json",
    )  # fmt: skip
    answers = done.json["answers"]
    assert [row["tokens"] for row in answers] == [length, TOKENS]
    assert [row["answer"] for row in answers] == [
        tokenizer.decode(first[:length], skip_special_tokens=True),
        tokenizer.decode(second, skip_special_tokens=True),
    ]


# --- the prompt syntax


@pytest.mark.parametrize(
    ("prompt", "rows"),
    [
        ("hi", [(None, "hi"), ("a", "hi"), ("b.2", "hi")]),
        ("@a hi  there", [("a", "hi  there")]),
        ("@b.2\nhi", [("b.2", "hi")]),
        ("@base hi", [(None, "hi")]),
        ("@@a hi", [(None, "@a hi"), ("a", "@a hi"), ("b.2", "@a hi")]),
        ("mail me@example.org", [(n, "mail me@example.org") for n in (None, "a", "b.2")]),
        ("a=hi", [(n, "a=hi") for n in (None, "a", "b.2")]),
        (" @a hi", [(n, " @a hi") for n in (None, "a", "b.2")]),
    ],
)
def test_who_is_asked(prompt, rows):
    assert parse_rows([prompt], ["a", "b.2"]) == [Row(*row) for row in rows]


def test_prompts_keep_their_order():
    rows = parse_rows(["@a one", "two", "@a one"], ["a"])
    assert rows == [Row("a", "one"), Row(None, "two"), Row("a", "two"), Row("a", "one")]


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        (["@sqk hi"], "asks adapter 'sqk', but there is only @base, @sql"),
        (["@ hi"], "asks adapter '', but there is only @base, @sql"),
        (["hi", "@sql"], "prompt '@sql' holds no text"),
        (["  "], "holds no text"),
    ],
)
def test_a_prompt_that_asks_nobody_is_a_usage_error(branchline, prompts, said):
    flags = [part for prompt in prompts for part in ("--prompt", prompt)]
    done = branchline("generate", "nowhere", "--adapter", "sql=path", *flags)
    assert done.code == 2
    assert said in done.err
    assert "--prompt" in done.err
    assert not done.out


def test_at_least_one_prompt_is_required(branchline):
    done = branchline("generate", "nowhere")
    assert done.code == 2
    assert "Missing option '--prompt'" in done.err


def test_the_syntax_is_in_the_help(branchline):
    words = " ".join(branchline("generate", "--help").out.replace("│", " ").split())
    assert '"TEXT" asks the base model and every adapter, one row each' in words
    assert '"@NAME TEXT" asks that adapter only' in words


# --- tokens


def test_rows_are_padded_on_the_left(tokenizer):
    encoded = encode(tokenizer, ["the lazy dog", "the"], raw=True)
    short = encode(tokenizer, ["the"], raw=True)["input_ids"][0]
    width = encoded["input_ids"].shape[1]
    assert encoded["attention_mask"][1].tolist() == [0] * (width - len(short)) + [1] * len(short)
    assert encoded["input_ids"][1, -len(short) :].tolist() == short.tolist()


def test_a_template_that_refuses_is_an_error_that_says_how_to_go_on(tokenizer, monkeypatch):
    template = "{{ raise_exception('needs a system prompt') }}"
    monkeypatch.setattr(tokenizer, "chat_template", template)
    with pytest.raises(BatchError, match=r"needs a system prompt.*--raw"):
        encode(tokenizer, ["hi"], raw=False)
    assert encode(tokenizer, ["hi"], raw=True)["input_ids"].shape[0] == 1


# --- models that cannot answer


def test_more_tokens_than_the_model_has_positions(branchline, model_folder):
    done = branchline("generate", model_folder, "--prompt", "hi", "--max-new-tokens", 600)
    assert done.code == 1
    assert "512 positions" in done.err
    assert "--max-new-tokens" in done.err


def test_a_model_without_a_head_cannot_answer(branchline, model_folder, tmp_path):
    LlamaModel(LlamaConfig.from_pretrained(model_folder)).save_pretrained(tmp_path)
    copy_tokenizer(model_folder, tmp_path)
    done = branchline("generate", tmp_path, "--prompt", "hi")
    assert done.code == 1
    assert "error: model LlamaModel: does not continue a prompt" in done.err
    assert "Traceback" not in done.err


def test_a_folder_without_a_tokenizer_cannot_be_asked(branchline, model_folder, tmp_path):
    LlamaForCausalLM.from_pretrained(model_folder).save_pretrained(tmp_path)
    done = branchline("generate", tmp_path, "--prompt", "hi")
    assert done.code == 1
    assert "holds no readable tokenizer" in done.err
    assert str(tmp_path) in done.err

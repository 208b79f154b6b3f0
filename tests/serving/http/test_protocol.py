"""The parts between a request and the engine that need neither: texts, stops, templates, limits."""

from __future__ import annotations

import asyncio
import json
import random
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from branchline.adapters.chat_template import read_chat_template
from branchline.core.errors import AdapterFormatError, AdapterNotFoundError, ConfigError
from branchline.serving.engine.requests import FinishReason, Token, Update
from branchline.serving.http.admission import Admission
from branchline.serving.http.answer import Answer, Shape
from branchline.serving.http.bridge import Bridge
from branchline.serving.http.chat_templates import ChatTemplates
from branchline.serving.http.detokenize import Detokenizer
from branchline.serving.http.errors import ApiError, api_error_of, told
from branchline.serving.http.protocol import ChatBody, CompletionBody, Message
from branchline.serving.http.stop_strings import StopStrings
from branchline.serving.http.tokenization import Tokenization
from tests.helpers import make_tokenizer
from tests.serving.http.conftest import CHAT_TEMPLATE

BYTES = Tokenization(make_tokenizer("<|user|>"))


def sentencepiece_like() -> Tokenization:
    """Words with a mark for spaces, and bytes for whatever is no word."""
    words = ["▁the", "▁fox", "es", "▁"]
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocab |= {word: 256 + index for index, word in enumerate(words)}
    vocab["<unk>"] = len(vocab)
    made = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return Tokenization(PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>"))


WORDS = sentencepiece_like()


def told_of(tokenization, tokens, prompt=(), skip=True):
    detokenizer = Detokenizer(tokenization, prompt, skip)
    pieces = [detokenizer.feed(token) for token in tokens]
    return [*pieces, detokenizer.flush()]


# --- tokens to text ------------------------------------------------------------------------------


@given(st.text(max_size=60))
def test_pieces_make_the_text_and_no_half_characters(text):
    tokens = BYTES.encode(text, False)
    pieces = told_of(BYTES, tokens)
    assert "".join(pieces) == BYTES.decode(tokens, True)
    if "\ufffd" not in text:
        assert "\ufffd" not in "".join(pieces)


@given(st.text("a é€🦊", max_size=40))
def test_bytes_between_words_make_the_text(text):
    tokens = [*text.encode(), 257, *text.encode()]
    pieces = told_of(WORDS, tokens, [256])
    assert "".join(pieces) == f"{text} fox{text}"
    assert "\ufffd" not in "".join(pieces)


@given(st.lists(st.integers(0, len(BYTES.tokenizer) - 1), max_size=60))
def test_any_tokens_make_the_same_text_as_all_at_once(tokens):
    whole = "".join(told_of(BYTES, tokens))
    # Broken bytes become one or several U+FFFD, by where the decoder is cut.
    assert whole.replace("\ufffd", "") == BYTES.decode(tokens, True).replace("\ufffd", "")


def test_characters_of_four_bytes_come_whole():
    tokens = list("a🦊é€".encode())
    pieces = told_of(WORDS, tokens)
    assert pieces == ["a", "", "", "", "🦊", "", "é", "", "", "€", ""]


def test_a_real_replacement_character_hides_no_character_behind_it():
    for text in ("a\ufffd👩b", "\ufffd\ufffd👩\ufffd👩", "👩\ufffdb"):
        assert "".join(told_of(BYTES, BYTES.encode(text, False))) == text


def test_broken_bytes_are_told_at_the_end_or_when_they_cannot_become_whole():
    assert told_of(WORDS, [0xF0, 0x9F])[-1] == "\ufffd\ufffd"
    pieces = told_of(WORDS, [0xFF] * 60 + [257])
    assert "".join(pieces) == WORDS.decode([0xFF] * 60 + [257], True)
    assert "\ufffd" in "".join(pieces[:40])


def test_an_answer_keeps_the_space_before_its_first_word():
    prompt = [256]
    assert "".join(told_of(WORDS, [257, 258], prompt)) == " foxes"


def test_special_tokens_are_left_out_if_asked():
    end = BYTES.tokenizer.eos_token_id
    tokens = [*BYTES.encode("a", False), end, *BYTES.encode("b", False)]
    assert "".join(told_of(BYTES, tokens)) == "ab"
    assert "".join(told_of(BYTES, tokens, skip=False)) == "a<|end|>b"


def test_a_hundred_special_tokens_do_not_hide_what_follows():
    end = BYTES.tokenizer.eos_token_id
    tokens = [end] * 100 + BYTES.encode("fox", False)
    assert "".join(told_of(BYTES, tokens)) == "fox"


def test_the_cost_of_a_token_does_not_grow_with_the_answer():
    longest = 0

    class Counting:
        def decode(self, tokens, skip):
            nonlocal longest
            longest = max(longest, len(tokens))
            return BYTES.decode(tokens, skip)

    rng = random.Random(0)
    for choices in (BYTES.encode("fox €", False), range(len(BYTES.tokenizer))):
        detokenizer = Detokenizer(Counting(), (), True)  # pyright: ignore[reportArgumentType]
        for _ in range(3000):
            detokenizer.feed(rng.choice(choices))
    assert longest < 100


def test_bytes_of_tokens():
    euro = BYTES.encode("€", False)
    assert b"".join(BYTES.bytes_of(token) for token in euro) == "€".encode()
    assert BYTES.name_of(euro[0]) == "bytes:\\xe2"
    assert WORDS.bytes_of(0xE2) == b"\xe2"
    assert BYTES.bytes_of(BYTES.tokenizer.eos_token_id) == b"<|end|>"


# --- stop strings --------------------------------------------------------------------------------


def fed(stops, pieces, include=False):
    watcher, told = StopStrings(stops, include), []
    for piece in pieces:
        released = watcher.feed(piece)
        told.append(released.text)
        if released.stop is not None:
            return told, released.stop
    return [*told, watcher.flush()], None


@given(st.data(), st.text("ab", max_size=40), st.lists(st.text("ab", min_size=1, max_size=6)))
def test_stops_are_found_wherever_the_text_is_cut(data, text, stops):
    ends = [(text.index(s) + len(s), -len(s)) for s in stops if s in text]
    end, length = min(ends, default=(len(text), 0))
    expected = text[: end + length] if ends else text
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    told, stop = fed(stops, pieces)
    assert "".join(told) == expected
    assert (stop is not None) == bool(ends)


def test_nothing_of_a_stop_leaks_while_it_may_become_one():
    told, stop = fed(["STOP"], ["fox S", "TO", "x ST", "OP and more"])
    assert told == ["fox ", "", "STOx ", ""]
    assert stop == "STOP"


def test_overlapping_beginnings():
    assert fed(["aab"], ["aa", "a", "b"]) == (["", "a", ""], "aab")
    assert fed(["ab", "b"], ["ab"], include=True) == (["ab"], "ab")


def test_many_long_stops_cost_no_more_than_linear_time():
    stops = ["a" * 4000 + str(n) for n in range(16)]
    told, stop = fed(stops, ["a" * 5] * 2000)
    assert "".join(told) == "a" * 10_000
    assert stop is None


# --- answers -------------------------------------------------------------------------------------


def answer_of(shape, updates, prompt=()):
    answer = Answer(0, BYTES, prompt, shape)
    pieces = [answer.take(update) for update in updates]
    return answer, pieces


def tokens_of(text):
    return [Token(token, -0.5) for token in BYTES.encode(text, False)]


def test_tokens_of_a_stop_string_are_not_told():
    updates = [Update((token,)) for token in tokens_of("fo@@")]
    answer, pieces = answer_of(Shape(stops=("@@",)), updates)
    assert "".join(piece.text for piece in pieces) == "fo"
    named = [BYTES.text_of(token.id) for piece in pieces for token in piece.tokens]
    assert "@" not in "".join(named)
    assert pieces[-1].finish is FinishReason.STOP
    assert pieces[-1].stop_reason == "@@"
    assert answer.generated == len(updates)


def test_every_token_is_told_once_where_nothing_stops():
    made = tokens_of("fo@x €€")
    *first, last = made
    updates = [Update((token,)) for token in first] + [Update((last,), FinishReason.LENGTH)]
    _, pieces = answer_of(Shape(stops=("@@",)), updates)
    assert [token for piece in pieces for token in piece.tokens] == made
    assert "".join(piece.text for piece in pieces) == "fo@x €€"


def test_a_stop_token_has_no_text():
    token = tokens_of("x")[0]
    update = Update((token,), FinishReason.STOP)
    _, [piece] = answer_of(Shape(stop_token_ids=frozenset({token.id})), [update])
    assert (piece.text, piece.stop_reason) == ("", token.id)
    _, [kept] = answer_of(Shape(include_stop=True), [update])
    assert kept.text == "x"


# --- bodies --------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["tools", "functions", "audio", "logit_processor", "documents"])
def test_unserved_and_unknown_fields_of_a_chat(field):
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(ValueError, match=field):
        ChatBody.model_validate({"messages": messages, field: [{"type": "function"}]})


def test_fields_that_ask_for_nothing_are_taken():
    messages = [{"role": "user", "content": "x", "tool_calls": None}]
    body = {"messages": messages, "tools": [], "tool_choice": "none", "store": False}
    body |= {"response_format": {"type": "text"}, "user": "somebody", "audio": None}
    assert ChatBody.model_validate(body).n == 1


@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "frequency_penalty"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), "1", True])
def test_numbers_are_finite_numbers(field, value):
    with pytest.raises(ValueError, match=field):
        CompletionBody.model_validate({"prompt": "x", field: value})


def test_half_a_surrogate_pair_is_refused():
    with pytest.raises(ValueError, match="surrogate"):
        CompletionBody.model_validate(json.loads('{"prompt": "\\ud800"}'))


# --- templates -----------------------------------------------------------------------------------


def chat(*contents):
    return [Message(role="user", content=content) for content in contents]


def test_whose_template_is_used(tmp_path):
    own = make_tokenizer("<|user|>", chat_template="own:{{ messages[0]['content'] }}")
    assert ChatTemplates(own, None).render(chat("x")) == "own:x"
    assert ChatTemplates(own, None).render(chat("x"), adapters="its") == "its"
    file = tmp_path / "t.jinja"
    file.write_text("file:{{ eos_token }}")
    assert ChatTemplates(own, str(file)).render(chat("x"), adapters="its") == "file:<|end|>"
    inline = ChatTemplates(own, "{{ messages | length }}")
    assert inline.render(chat("x", "y")) == "2"


def test_templates_get_variables_and_joined_parts():
    templates = ChatTemplates(make_tokenizer(), "{{ messages[0].content }}{{ thinking }}")
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    message = Message.model_validate({"role": "user", "content": parts})
    assert templates.render([message], variables={"thinking": "!"}) == "a\nb!"


def test_what_templates_refuse():
    own = make_tokenizer("<|user|>")
    with pytest.raises(ApiError, match="no chat template"):
        ChatTemplates(own, None).render(chat("x"))
    raising = ChatTemplates(own, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ApiError, match="roles must alternate"):
        raising.render(chat("x"))
    with pytest.raises(ApiError, match="messages"):
        ChatTemplates(own, "{{ messages[5].content.x }}").render(chat("x"))
    with pytest.raises(ApiError, match="`messages`"):
        raising.render(chat("x"), variables={"messages": []})
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    with pytest.raises(ApiError, match="image_url"):
        ChatTemplates(own, CHAT_TEMPLATE).render([Message.model_validate(image)])
    with pytest.raises(ApiError, match="add_generation_prompt"):
        ChatTemplates(own, CHAT_TEMPLATE).render(chat("x"), continue_final_message=True)


def test_templates_of_adapters(tmp_path):
    assert read_chat_template(tmp_path, "adapter 'x'") is None
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": [{"name": "default", "template": "d"}]}))
    assert read_chat_template(tmp_path, "adapter 'x'") == "d"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert read_chat_template(tmp_path, "adapter 'x'") == "file"
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(AdapterFormatError, match="no Jinja"):
        read_chat_template(tmp_path, "adapter 'x'")
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(AdapterFormatError, match="UTF-8"):
        read_chat_template(tmp_path, "adapter 'x'")
    (tmp_path / "chat_template.jinja").unlink()
    config.write_text('{"chat_template": 5}')
    with pytest.raises(AdapterFormatError, match="no text"):
        read_chat_template(tmp_path, "adapter 'x'")


@pytest.mark.parametrize("setting", ["no/such/file.jinja", "{% endfor %}"])
def test_a_setting_that_is_no_template(setting):
    with pytest.raises(ConfigError, match="template"):
        ChatTemplates(make_tokenizer(), setting)


# --- limits, errors, threads ---------------------------------------------------------------------


def test_admission_counts_what_runs():
    admission = Admission(3, 1)
    with admission.admitted(2, "a"):
        with pytest.raises(ApiError) as full, admission.admitted(2, "b"):
            pass
        assert (full.value.status, full.value.headers) == (503, {"Retry-After": "1"})
        with pytest.raises(ApiError) as many, admission.admitted(1, "a"):
            pass
        assert many.value.status == 429
        with admission.admitted(1, None):
            assert admission.answers == 3
    with admission.admitted(3, "a"):
        assert admission.answers == 3
    assert admission.answers == 0


def test_errors_tell_no_internals():
    assert told(KeyError("secret")).status == 500
    assert "secret" not in told(KeyError("secret")).message
    assert told(TimeoutError()).status == 504
    assert api_error_of(AdapterNotFoundError("a", "b", "c")).status == 404


def test_updates_arrive_in_order_and_share_wakeups():
    async def run():
        bridge, seen = Bridge(asyncio.get_running_loop()), []
        sinks = [bridge.sink(lambda update, n=n: seen.append((n, update))) for n in range(2)]

        def engine():
            for count in range(500):
                sinks[count % 2](Update(cached_tokens=count))

        thread = threading.Thread(target=engine)
        thread.start()
        async with asyncio.timeout(10):
            while len(seen) < 500:
                await asyncio.sleep(0.001)
        thread.join()
        return seen, sinks

    seen, sinks = asyncio.run(run())
    assert [update.cached_tokens for _, update in seen] == list(range(500))
    assert {n for n, _ in seen} == {0, 1}
    # The loop is closed: whoever listened is gone, and the engine's thread must not fail.
    sinks[0](Update())

"""`POST /v1/embeddings`, of an encoder in this process."""

from __future__ import annotations

import base64
import json

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import BertConfig, BertForMaskedLM, BertModel

from branchline.core.errors import WrapError
from branchline.serving.http.embeddings import batches_of
from branchline.serving.http.pooling import Pooling, PoolingConfig
from tests.helpers import make_tokenizer
from tests.serving.http.inside import client_of, serving

TEXTS = ["the quick brown fox", "dog", "jumps over the lazy dog " * 3]


def make_model(kind):
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=300, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=128,
    )  # fmt: skip
    model = kind(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.1)
    return model.to(torch.bfloat16)


def save_encoder_adapter(model, folder):
    config = LoraConfig(
        r=8,
        lora_alpha=16,
        target_modules=["query", "value"],
        init_lora_weights=False,
        task_type="FEATURE_EXTRACTION" if isinstance(model, BertModel) else None,
    )
    get_peft_model(model, config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=[BertModel, BertForMaskedLM])
def state(request, tmp_path_factory):
    root = tmp_path_factory.mktemp("encoder")
    model = make_model(request.param)
    model.save_pretrained(root / "tiny-bert")
    make_tokenizer().save_pretrained(root / "tiny-bert")
    adapter = save_encoder_adapter(model.float(), root / "tuned")
    with serving(root / "tiny-bert", {"tuned": adapter}, make_model(request.param)) as state:
        yield state


@pytest.fixture(scope="module")
def client(state):
    with client_of(state) as client:
        yield client


def vectors(client, texts, **fields):
    response = client.post("/v1/embeddings", json={"input": texts, **fields})
    assert response.status_code == 200, response.text
    data = response.json()["data"]
    assert [item["index"] for item in data] == list(range(len(data)))
    return np.array([item["embedding"] for item in data], dtype=np.float32)


def expected(state, text, adapter=None):
    """One text alone, without padding."""
    ids = torch.tensor([state.tokenization.encode(text, True)])
    with state.served.adapters.rows([adapter]):
        hidden = state.served.model.base_model(input_ids=ids).last_hidden_state[0].float()
    mean = hidden.mean(0)
    return (mean / mean.norm()).numpy()


@pytest.mark.parametrize("adapter", [None, "tuned"])
def test_vectors_are_means_whatever_they_are_batched_with(state, client, adapter):
    found = vectors(client, TEXTS, model=adapter)
    for vector, text in zip(found, TEXTS, strict=True):
        assert np.allclose(vector, expected(state, text, adapter), atol=0.02)
        assert np.linalg.norm(vector) == pytest.approx(1.0, abs=1e-5)


def test_the_adapter_matters(client):
    difference = vectors(client, TEXTS) - vectors(client, TEXTS, model="tuned")
    assert np.abs(difference).max() > 0.05


def test_forms_of_input_and_output(state, client):
    by_text = vectors(client, TEXTS[0])
    ids = state.tokenization.encode(TEXTS[0], True)
    assert np.array_equal(vectors(client, ids), by_text)
    assert np.array_equal(vectors(client, [ids]), by_text)
    body = {"input": TEXTS[0], "encoding_format": "base64"}
    told = client.post("/v1/embeddings", json=body).json()
    raw = base64.b64decode(told["data"][0]["embedding"])
    assert np.array_equal(np.frombuffer(raw, "<f4"), by_text[0])
    assert told["usage"] == {"prompt_tokens": len(ids), "total_tokens": len(ids)}


def test_fewer_dimensions_are_of_length_one_again(client):
    whole, short = vectors(client, TEXTS), vectors(client, TEXTS, dimensions=16)
    assert short.shape == (3, 16)
    cut = whole[:, :16] / np.linalg.norm(whole[:, :16], axis=1, keepdims=True)
    assert np.allclose(short, cut, atol=1e-6)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"input": []}, "input", "empty"),
        ({"input": ["x", ""]}, "input", "empty"),
        ({"input": "fox " * 200}, "input", "128"),
        ({"input": [99_999]}, "input", "99999"),
        ({"input": "x", "dimensions": 65}, "dimensions", "64"),
        ({"input": "x", "encoding_format": "hex"}, "encoding_format", "base64"),
    ],
)
def test_what_cannot_be_is_refused_by_name(client, fields, param, words):
    response = client.post("/v1/embeddings", json=fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert words in error["message"]


def test_an_encoder_makes_no_text(client):
    chat = {"messages": [{"role": "user", "content": "x"}]}
    for path, body in (("completions", {"prompt": "x"}), ("chat/completions", chat)):
        response = client.post(f"/v1/{path}", json=body)
        assert response.status_code == 400
        assert "embeddings" in response.json()["error"]["message"]


def test_leases_and_counts(state, client):
    vectors(client, TEXTS, model="tuned")
    client.post("/v1/embeddings", json={"input": "", "model": "tuned"})
    assert state.served.adapters._aliases.known("tuned").version.leases == 0
    assert state.admission.answers == 0
    assert 'adapter="tuned",outcome="stop"}' in state.metrics.exposition("")[0].decode()


def test_batches_hold_so_many_tokens_with_their_padding():
    texts = tuple((0,) * length for length in (3, 9, 1, 8, 20))
    batches = batches_of(texts, 18)
    assert sorted(place for batch in batches for place in batch) == [0, 1, 2, 3, 4]
    assert batches == [(4,), (1, 3), (0, 2)]


# --- pooling -------------------------------------------------------------------------------------


def sentence_transformers(folder, pooling, *kinds):
    folder.mkdir(exist_ok=True)
    names = ("Transformer", "Pooling", *kinds)
    modules = [
        {"type": f"sentence_transformers.models.{kind}", "path": kind if index else ""}
        for index, kind in enumerate(names)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "Pooling").mkdir(exist_ok=True)
    (folder / "Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


def test_pooling_is_what_the_checkpoint_says(tmp_path):
    assert PoolingConfig.read(tmp_path) == PoolingConfig(Pooling.MEAN, True)
    cls = {"word_embedding_dimension": 64, "pooling_mode_cls_token": True}
    cls["pooling_mode_mean_tokens"] = False
    assert PoolingConfig.read(sentence_transformers(tmp_path, cls)) == PoolingConfig(
        Pooling.CLS, False
    )
    newer = sentence_transformers(tmp_path, {"pooling_mode": "lasttoken"}, "Normalize")
    assert PoolingConfig.read(newer) == PoolingConfig(Pooling.LAST, True)


@pytest.mark.parametrize(
    ("pooling", "kinds", "words"),
    [
        ({"pooling_mode_cls_token": True}, ["Dense"], "Dense"),
        ({"pooling_mode_weightedmean_tokens": True}, [], "weightedmean"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, [], "mean"),
    ],
)
def test_other_steps_are_refused(tmp_path, pooling, kinds, words):
    with pytest.raises(WrapError, match=words):
        PoolingConfig.read(sentence_transformers(tmp_path, pooling, *kinds))


def test_padding_is_in_no_vector():
    hidden = torch.arange(12.0).reshape(1, 4, 3)
    hidden[0, 2:] = 1000.0
    mask = torch.tensor([[1, 1, 0, 0]])
    pooled = {p: PoolingConfig(p, False).pool(hidden, mask)[0].tolist() for p in Pooling}
    assert pooled == {
        Pooling.MEAN: [1.5, 2.5, 3.5],
        Pooling.CLS: [0.0, 1.0, 2.0],
        Pooling.LAST: [3.0, 4.0, 5.0],
        Pooling.MAX: [3.0, 4.0, 5.0],
    }

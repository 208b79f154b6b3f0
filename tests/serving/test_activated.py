"""Activated LoRA against PEFT: the adapter acts from its invocation tokens on."""

from __future__ import annotations

import json

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from branchline.core.errors import AdapterUnsupportedError, BatchError
from tests.models import token_ids

CALL = [7, 9]


@pytest.fixture(scope="module")
def activated(make_family, tmp_path_factory):
    """The folder of an adapter that waits for the tokens 7 9."""
    folder = tmp_path_factory.mktemp("activated")
    model = make_family("llama").plain(torch.float32)
    config = LoraConfig(
        r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM",
        alora_invocation_tokens=CALL,
    )  # fmt: skip
    wrapped = get_peft_model(model, config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, value in wrapped.named_parameters():
            if "lora_" in name:
                value.copy_(torch.randn(value.shape, generator=generator) * 0.3)
    wrapped.save_pretrained(folder)
    return folder


def prompts() -> torch.Tensor:
    """Rows that call it in the middle, twice, not at all, and at the end."""
    ids = token_ids(4, 9)
    ids[ids == CALL[0]] = 8
    ids[0, 3:5] = torch.tensor(CALL)
    ids[1, 1:3] = torch.tensor(CALL)
    ids[1, 5:7] = torch.tensor(CALL)
    ids[3, 7:9] = torch.tensor(CALL)
    return ids


def reference(llama, folder):
    model = PeftModel.from_pretrained(llama.plain(torch.float32), folder, adapter_name="late")
    return model.eval()


def test_forward_is_pefts(llama, activated):
    served = llama.served(torch.float32, quant="none")
    served.adapters.load("late", activated)
    ids = prompts()
    with torch.no_grad():
        expected = reference(llama, activated)(ids).logits
    found = served(ids, adapter_names=["late"] * 4).logits
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    base = served(ids).logits
    assert torch.equal(found[2], base[2])
    # What comes before the call has the base model's bytes: its keys and values can be shared.
    assert torch.equal(found[0, :3], base[0, :3])
    assert not torch.allclose(found[0, 3:], base[0, 3:])


def test_beside_other_adapters(llama, activated):
    served = llama.served(quant="fp8-dynamic")
    served.adapters.load("late", activated)
    ids, names = prompts(), ["late", "attn", None, "late"]
    mixed = served(ids, adapter_names=names).logits
    for row, name in enumerate(names):
        assert torch.equal(mixed[row], served(ids, adapter_names=[name] * 4).logits[row])


def test_generation_is_pefts(llama, activated):
    served = llama.served(torch.float32, quant="none")
    served.adapters.load("late", activated)
    ids = prompts()
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        expected = reference(llama, activated).generate(input_ids=ids, **settings)
    assert torch.equal(served.generate(ids, adapter_names=["late"] * 4, **settings), expected)
    with served.adapters.rows(["late"] * 4):
        assert torch.equal(served.generate(ids, **settings), expected)


def test_generation_beside_an_adapter_of_the_head(llama, activated, tmp_path):
    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    model = get_peft_model(llama.plain(torch.float32), config)
    with torch.no_grad():
        model.get_output_embeddings().weight.normal_()
    model.save_pretrained(tmp_path)
    served = llama.served(torch.float32, quant="none")
    served.adapters.load("late", activated)
    served.adapters.load("head", tmp_path)
    ids = prompts()
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    mixed = served.generate(ids, adapter_names=["late", "head", "head", "late"], **settings)
    for row, name in enumerate(["late", "head", "head", "late"]):
        alone = served.generate(ids, adapter_names=[name] * 4, **settings)
        assert torch.equal(mixed[row], alone[row])


def test_one_token_at_a_time_is_the_whole_prompt(llama, activated):
    served = llama.served(torch.float32, quant="none")
    served.adapters.load("late", activated)
    ids, logits, cache = prompts(), [], None
    whole = served(ids, adapter_names=["late"] * 4).logits
    with served.adapters.rows(["late"] * 4):
        for chunk in ids.split([4, 1, 4], dim=1):
            out = served(chunk, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            logits.append(out.logits)
    found = torch.cat(logits, dim=1)
    # Row 0's call is cut in two, and row 1 calls twice: tokens served already stay as they are.
    torch.testing.assert_close(found[2:], whole[2:], atol=1e-5, rtol=1e-4)
    assert not torch.allclose(found[0, 4:], served(ids).logits[0, 4:])


def test_embeddings_do_not_show_it(llama, activated):
    served = llama.served(torch.float32, quant="none")
    served.adapters.load("late", activated)
    embeds = served.get_input_embeddings()(prompts())
    with pytest.raises(BatchError, match="activated LoRA"):
        served(inputs_embeds=embeds, adapter_names=["late"] * 4)


def test_its_tokens_are_part_of_its_identity(llama, activated, tmp_path):
    config = json.loads((activated / "adapter_config.json").read_text())
    config["alora_invocation_tokens"] = [1, 2]
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    weights = (activated / "adapter_model.safetensors").read_bytes()
    (tmp_path / "adapter_model.safetensors").write_bytes(weights)
    served = llama.served(torch.float32, quant="none")
    first, second = (served.adapters.load(n, f) for n, f in (("a", activated), ("b", tmp_path)))
    assert first.digest != second.digest


def test_it_is_not_mixed(llama, activated):
    served = llama.served(torch.float32, quant="none")
    served.adapters.load("late", activated)
    with pytest.raises(AdapterUnsupportedError, match="'late'"):
        served(prompts(), adapter_names=[{"late": 1.0, "attn": 1.0}] * 4)

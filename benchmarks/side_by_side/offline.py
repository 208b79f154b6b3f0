"""One library's `generate`, in an environment of its own: ``offline.py SIDE SPEC.json``.

Prints one line of JSON.  Imports nothing of this project but, for the side "branchline", the
package: the other environments have none of it.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def load_peft(spec: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """PEFT's mixed batches over the model in bfloat16."""
    from peft import PeftModel

    model: Any = _base(spec)
    for folder in map(Path, spec["adapters"]):
        if isinstance(model, PeftModel):
            model.load_adapter(folder, folder.name)
        else:
            model = PeftModel.from_pretrained(model, folder, folder.name)
    chosen = [name or "__base__" for name in spec["names"]]
    return model.eval(), {"adapter_names": chosen} if spec["adapters"] else {}


def load_torchao(spec: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """torchao's FP8 weights over the base; it serves no adapters."""
    from torchao.quantization import Float8WeightOnlyConfig, quantize_

    model = _base(spec)
    quantize_(model, Float8WeightOnlyConfig())
    return model, {}


def load_branchline(spec: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Ours, by the scheme that the spec names."""
    import branchline

    served = branchline.wrap(
        _base(spec), quant=spec["quant"], max_loras=max(1, len(spec["adapters"])), max_lora_rank=64
    )
    for folder in map(Path, spec["adapters"]):
        served.adapters.load(folder.name, folder)
    return served, {"adapter_names": spec["names"]} if spec["adapters"] else {}


LOAD = {"peft": load_peft, "torchao": load_torchao, "branchline": load_branchline}
#: Whose version is told.
DISTRIBUTION = {"peft": "peft", "torchao": "torchao", "branchline": "branchline"}


def _base(spec: dict[str, Any]) -> Any:
    model = AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.bfloat16)
    return model.eval().to(spec["device"])


def main(side: str, spec: dict[str, Any]) -> dict[str, Any]:
    """Load, generate in rounds, and tell the seconds and tokens."""
    torch.set_num_threads(spec["threads"])
    tokenizer = AutoTokenizer.from_pretrained(spec["model"])
    ids = torch.tensor([tokenizer(text).input_ids for text in spec["prompts"]])
    model, settings = LOAD[side](spec)
    settings |= {"do_sample": False, "max_new_tokens": spec["tokens"], "pad_token_id": 0}
    settings |= {"min_new_tokens": spec["tokens"]}
    inputs = {"input_ids": ids.to(spec["device"])}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    seconds, made = [], 0
    for turn in range(spec["rounds"] + 1):
        begun = time.perf_counter()
        with torch.no_grad():
            out = model.generate(**inputs, **settings)
        made = (out.shape[1] - ids.shape[1]) * out.shape[0]
        if turn:
            seconds.append(time.perf_counter() - begun)
    return {
        "version": version(DISTRIBUTION[side]),
        "torch": torch.__version__,
        "seconds": statistics.median(seconds),
        "tokens": made,
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], json.loads(Path(sys.argv[2]).read_text("utf-8")))))

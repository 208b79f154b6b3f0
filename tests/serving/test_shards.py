"""Headers of safetensors files: dtypes and shapes as torch has them."""

from __future__ import annotations

import torch
from safetensors.torch import load_file, save_file

from branchline.serving.shards import read_headers


def test_a_header_says_what_the_loaded_tensor_is(tmp_path):
    codes = (torch.float4_e2m1fn_x2, torch.float8_e4m3fn, torch.float8_e8m0fnu)
    tensors = {
        **{str(dtype): torch.zeros(4, 8, dtype=torch.uint8).view(dtype) for dtype in codes},
        "scalar": torch.tensor(2.0),
        "bf16": torch.ones(3, 2, dtype=torch.bfloat16),
    }
    file = tmp_path / "model.safetensors"
    save_file(tensors, file)
    loaded = load_file(file)
    assert read_headers([file]) == {
        name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in loaded.items()
    }

"""Block shapes as configurations write them."""

import pytest

from branchline.core.block_shape import BlockShape
from branchline.core.errors import CheckpointError

WHERE = ("config.json: quantization_config", "weight_block_size")


@pytest.mark.parametrize("value", [[128, 64], (128, 64)])
def test_a_list_and_a_tuple_are_one_shape(value):
    found = BlockShape.parse(value, *WHERE)
    assert found == BlockShape(128, 64)
    assert found is not None
    assert (found.rows, found.columns, str(found)) == (128, 64, "128x64")


def test_null_means_no_blocks():
    assert BlockShape.parse(None, *WHERE) is None


@pytest.mark.parametrize(
    "value",
    [
        [],
        [128],
        [128, 128, 128],
        "128x128",
        ["128", "128"],
        [128.0, 128.0],
        [0, 128],
        [128, -1],
        [[128, 128]],
        [[128], [128]],
        [True, True],
        [128, None],
        {"rows": 128, "columns": 128},
        128,
        False,
        [2**31, 128],
    ],
)
def test_anything_else_is_refused_with_key_and_value(value):
    with pytest.raises(CheckpointError, match="expected two positive integers") as caught:
        BlockShape.parse(value, *WHERE)
    assert caught.value.subject == WHERE[0]
    assert f"{WHERE[1]} is {value!r}" in caught.value.reason

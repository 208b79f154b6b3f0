"""The C kernels against the oracle, bit for bit, on every instruction set of this processor."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from branchline.core import oracle
from branchline.core.oracle import ActivationSemantics
from branchline.core.quant_key import (
    FP8_DYNAMIC_TOKEN,
    FP8_STATIC_TENSOR,
    KEYS,
    MXFP8,
    NVFP4,
)
from branchline.linear import native
from branchline.linear.contract import InputContract, InputScale
from branchline.linear.outputs import RawRequest, new_outputs
from tests.helpers import every_encoding
from tests.linear.native.cases import (
    ALL_KEYS,
    BF16,
    IDENTITY,
    KEY_IDS,
    NORM_IDS,
    NORMS,
    SCALE,
    SPECIAL,
    TABLE,
    UNARY,
    WIDTHS,
    Expected,
    adapters,
    bits,
    check_activation,
    check_norm,
    contract,
    each_isa,
    norm_inputs,
    random,
    raw_bits,
    shuffled,
    strided,
)

# --- activations --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", UNARY)
def test_all_encodings(name):
    """Rows of neighbours, then rows that mix all magnitudes."""
    semantics = ActivationSemantics(name, gated=False)
    check_activation(semantics, (every_encoding().view(512, 128),), KEYS)
    every = ALL_KEYS if name == "identity" else KEYS
    check_activation(semantics, (shuffled(every_encoding(), 1).view(512, 128),), every)


@pytest.mark.parametrize("scale", [2.0**-40, 1.3e-3, 1.0, 3.7, 449.3, 1e20])
def test_all_encodings_at_other_scales(scale):
    keys = (FP8_STATIC_TENSOR,)
    for name in UNARY:
        semantics = ActivationSemantics(name, gated=False)
        check_activation(semantics, (every_encoding().view(256, 256),), keys, scale)


@pytest.mark.parametrize("least", [0, 1 << 40])
@pytest.mark.parametrize("name", UNARY)
def test_with_and_without_a_table_of_codes(monkeypatch, name, least):
    """Codes alone; beside the raw rows of some requests; beside products for some."""
    monkeypatch.setattr(native, "_CODE_TABLE_ELEMENTS", least)
    semantics, given = ActivationSemantics(name, gated=False), contract(FP8_STATIC_TENSOR)
    padded = replace(FP8_STATIC_TENSOR, row_multiple=4)
    for columns in WIDTHS:
        x = shuffled(every_encoding(), columns)[: 3 * columns].view(3, -1)
        check_activation(semantics, (x,), (FP8_STATIC_TENSOR, padded))
    x = shuffled(every_encoding(), 5).view(256, 256)
    check_activation(semantics, (x,), (FP8_STATIC_TENSOR,))
    check_activation(semantics, (strided(x),), (FP8_STATIC_TENSOR,))
    raw = oracle.activate(semantics, x)
    expected, wanted = Expected(raw, given), torch.arange(256) % 5 == 0
    request = adapters([2], 256, [-1, 0] * 128)
    for isa, shrinks in itertools.product(each_isa(), ((), (request,))):
        found = new_outputs(x, given, "test", raw=RawRequest(wanted), shrinks=shrinks)
        native.activation(semantics, (x,), found)
        expected.check(found, isa)
        assert torch.equal(raw_bits(found.raw.values[wanted]), raw_bits(raw[wanted])), isa
        assert (bits(found.raw.values[~wanted]) == -1).all(), isa


def test_when_codes_are_looked_up():
    """Where it is cheaper than what it replaces; one table for all scales of one value."""

    def table(name, *, gated=False, key=FP8_STATIC_TENSOR, rows=64, scale=SCALE):
        outputs = new_outputs(torch.zeros(rows, 512, dtype=BF16), contract(key, scale), "test")
        return native._code_table(ActivationSemantics(name, gated=gated), outputs)

    assert table("silu") is table("silu")
    assert table("silu") is not table("silu", scale=2 * SCALE)
    assert table("gelu_tanh") is not None
    assert table(TABLE) is not None
    for name in ("identity", "relu", "relu2"):
        assert table(name) is None
    assert table("silu", rows=63) is None
    assert table("silu", gated=True) is None
    assert table("silu", key=FP8_DYNAMIC_TOKEN) is None


GATED = [
    *(ActivationSemantics(name, gated=True) for name in UNARY),
    *(ActivationSemantics(name, gated=True, limit=7.0) for name in ("silu", "gelu_erf", TABLE)),
    ActivationSemantics("gelu_tanh", gated=True, limit=1.1, multiplier=0.73),
]


@pytest.mark.parametrize("semantics", GATED, ids=str)
def test_gated(semantics):
    """Every encoding on both sides, beside ordinary numbers."""
    ordinary = random(512, 128)
    static, token, *_, nvfp4 = KEYS
    for gate, up, keys in (
        (every_encoding().view(512, 128), ordinary, (static, token)),
        (ordinary, every_encoding().view(512, 128), (static, nvfp4)),
        (
            shuffled(every_encoding(), 2).view(512, 128),
            shuffled(every_encoding(), 3).view(512, 128),
            KEYS,
        ),
    ):
        check_activation(semantics, (gate, up), keys)


@pytest.mark.parametrize("key", ALL_KEYS, ids=KEY_IDS)
@pytest.mark.parametrize("columns", WIDTHS)
def test_widths(key, columns):
    rows = 3 if columns > 2000 else 5
    x, up = random(rows, columns), random(rows, columns, seed=1)
    check_activation(IDENTITY, (x,), (key,))
    check_activation(ActivationSemantics("relu2", gated=False), (strided(x),), (key,))
    check_activation(ActivationSemantics("silu", gated=True), (x, strided(up)), (key,))


@pytest.mark.parametrize("rows", [0, 1, 3, 17, 129, 300])
def test_row_counts(rows):
    x, up = random(rows, 200), random(rows, 200, seed=1)
    check_activation(IDENTITY, (x,), ALL_KEYS)
    check_activation(ActivationSemantics("gelu_tanh", gated=True), (x, up), ALL_KEYS)
    for semantics in NORMS:
        keys = KEYS if rows < 100 else (FP8_STATIC_TENSOR, FP8_DYNAMIC_TOKEN)
        check_norm(semantics, norm_inputs(semantics, x), keys)


def test_no_columns():
    """A row of nothing still has its scale."""
    x = torch.empty((4, 0), dtype=BF16)
    for key in KEYS:
        expected = Expected(x, contract(key))
        for isa in each_isa():
            found = replace(new_outputs(x, contract(key), "test"), rows=4)
            native.activation(IDENTITY, (x,), found)
            expected.check(found, f"{key} {isa}")


def test_leading_dimensions():
    x = random(6, 5, 96)
    for view in (x, x[:, 2], x[2], x[0, 0]):
        check_activation(IDENTITY, (view,), ALL_KEYS)


def test_special_values():
    """Alone in a row of zeros, beside ordinary numbers, and as the largest of a block."""
    x = torch.zeros(3 * len(SPECIAL) + 2, 160, dtype=BF16)
    for row, value in enumerate(SPECIAL):
        x[row, 40] = value
        x[row + len(SPECIAL)] = random(1, 160, seed=row)[0]
        x[row + len(SPECIAL), 150] = value
        x[row + 2 * len(SPECIAL)] = value
    x[-1] = torch.nan
    x[-2, 5] = torch.nan
    check_activation(IDENTITY, (x,), ALL_KEYS)
    check_activation(IDENTITY, (x,), ALL_KEYS, scale=1.0)
    for semantics in NORMS:
        check_norm(semantics, norm_inputs(semantics, x), KEYS)


def test_extreme_global_scales():
    """Block scales that saturate, and their products that over- and underflow."""
    x = torch.cat([shuffled(every_encoding(), 4).view(-1, 64), random(8, 64)])
    for number in (1e-38, 1e-20, 1.0, 1e20, 3e38):
        given = InputContract(NVFP4, None, InputScale.checked(number, "test"))
        expected = Expected(x, given)
        for isa in each_isa():
            found = new_outputs(x, given, "test")
            native.activation(IDENTITY, (x,), found)
            expected.check(found, f"global scale {number} {isa}")


# --- norms --------------------------------------------------------------------------------------


@pytest.mark.parametrize("semantics", NORMS, ids=NORM_IDS)
@pytest.mark.parametrize("columns", WIDTHS)
def test_norm_widths(semantics, columns):
    x = random(4, columns)
    check_norm(semantics, norm_inputs(semantics, x), (FP8_DYNAMIC_TOKEN, MXFP8))
    inputs = norm_inputs(semantics, strided(x), strided(random(4, columns, seed=3)))
    check_norm(semantics, inputs, (FP8_STATIC_TENSOR,))


@pytest.mark.parametrize("semantics", NORMS, ids=NORM_IDS)
def test_norm_keys(semantics):
    check_norm(semantics, norm_inputs(semantics, random(9, 250)), ALL_KEYS)


@pytest.mark.parametrize("semantics", NORMS, ids=NORM_IDS)
def test_norm_magnitudes(semantics):
    """Over- and underflowing squares, cancelling sums, every encoding."""
    x = random(8, 128)
    x[0], x[1], x[2] = x[0] * 2.0**70, x[1] * 2.0**-70, 0.0
    x[3, 5], x[4, 5], x[5] = torch.inf, torch.nan, 3.0
    x[6] = 1000.0 + random(1, 128)[0]
    check_norm(semantics, norm_inputs(semantics, x), KEYS)
    check_norm(
        semantics, norm_inputs(semantics, every_encoding().view(512, 128)), (KEYS[0], KEYS[1])
    )


# --- decoding -----------------------------------------------------------------------------------


def test_decode():
    """Bit for bit, NaN included; at every offset of a tail; rows that lie apart."""
    codes = torch.arange(256, dtype=torch.uint8)
    many = torch.randint(0, 0x7F, (9, 8200), dtype=torch.uint8)[:, 3:8197]
    for _ in each_isa():
        for part in (codes[None], *(codes[None, -n:] for n in (1, 15, 17, 255)), many):
            wanted = part.contiguous().view(torch.float8_e4m3fn).float()
            assert torch.equal(bits(native.decode_fp8(part)), bits(wanted))
        assert native.decode_fp8(torch.empty((0, 64), dtype=torch.uint8)).shape == (0, 64)
        assert native.decode_fp8(torch.empty((4, 0), dtype=torch.uint8)).shape == (4, 0)

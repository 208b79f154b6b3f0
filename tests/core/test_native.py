"""The C kernels against the oracle, on every instruction set that this processor has."""

from __future__ import annotations

import pytest
import torch

from branchline.core import native
from branchline.core.oracle import NormSemantics, quantize_static, quantize_token, rms_norm

#: Those this processor has; a machine without the library fails here, for it has no compiler.
ISAS = ("scalar", "avx2", "avx512")[: native.load().functions.bl_best_isa() + 1]
IDENTITY = 0
NAN_CODE = 0x7F
SCALES = (2.0**-40, 1.3e-3, 0.0371, 1.0, 3.7, 449.3, 1e20)
WIDTHS = (1, 7, 31, 32, 33, 64, 576, 1368, 3420, 8191, 8193)


@pytest.fixture(params=ISAS)
def library(request):
    loaded = native.load()
    assert loaded.functions.bl_set_isa(ISAS.index(request.param)) == 0
    yield loaded
    loaded.functions.bl_set_isa(loaded.functions.bl_best_isa())


@pytest.fixture(scope="module")
def encodings():
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def random(rows: int, columns: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows + columns)
    return (torch.randn(rows, columns, generator=generator) * 4).bfloat16()


def encode(library, x: torch.Tensor, scale: float, threads: int = 2) -> torch.Tensor:
    """Codes with a gap of three bytes between rows, which must stay untouched."""
    rows, columns = x.shape
    room = torch.full((rows, columns + 3), NAN_CODE, dtype=torch.uint8)
    library.call(
        "bl_act_static", IDENTITY, x.data_ptr(), x.stride(0), None, 0, room.data_ptr(),
        room.stride(0), rows, columns, torch.tensor([scale]).reciprocal().item(), threads,
    )  # fmt: skip
    assert (room[:, columns:] == NAN_CODE).all()
    return room[:, :columns]


def decode(library, codes: torch.Tensor) -> torch.Tensor:
    out = torch.full(codes.shape, torch.nan)
    library.call(
        "bl_fp8_decode", codes.data_ptr(), codes.stride(0), out.data_ptr(), out.stride(0),
        *codes.shape, 2,
    )  # fmt: skip
    return out


def token(library, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.full(x.shape, NAN_CODE, dtype=torch.uint8)
    scale = torch.full((x.shape[0], 1), torch.nan)
    library.call(
        "bl_quantize_token", x.data_ptr(), x.stride(0), codes.data_ptr(), codes.stride(0),
        scale.data_ptr(), *x.shape, 2,
    )  # fmt: skip
    return codes, scale


def check_token(library, x: torch.Tensor) -> None:
    codes, scale = token(library, x)
    wanted_codes, wanted_scale = quantize_token(x)
    assert torch.equal(scale, wanted_scale)
    assert torch.equal(codes, wanted_codes.view(torch.uint8))


@pytest.mark.parametrize("scale", SCALES)
def test_encode_all(library, encodings, scale):
    wanted = quantize_static(encodings, torch.tensor([scale])).view(torch.uint8)
    assert torch.equal(encode(library, encodings[None], scale)[0], wanted)


@pytest.mark.parametrize("columns", WIDTHS)
def test_encode_widths(library, columns):
    x = random(5, columns)
    wanted = quantize_static(x, torch.tensor([0.0371])).view(torch.uint8)
    assert torch.equal(encode(library, x, 0.0371), wanted)


@pytest.mark.parametrize("threads", [0, 1, 2, 5])
def test_threads_do_not_show(library, threads):
    x = random(3, 70001)
    wanted = quantize_static(x, torch.tensor([0.0371])).view(torch.uint8)
    assert torch.equal(encode(library, x, 0.0371, threads), wanted)


def test_decode_all(library):
    """Bit for bit, NaN included; then again at every offset of a tail."""
    codes = torch.arange(256, dtype=torch.uint8)
    wanted = codes.view(torch.float8_e4m3fn).float()
    assert torch.equal(decode(library, codes[None])[0].view(torch.int32), wanted.view(torch.int32))
    for columns in (1, 15, 17, 255):
        part = decode(library, codes[None, -columns:])[0]
        assert torch.equal(part.view(torch.int32), wanted[-columns:].view(torch.int32))


def test_decode_strided_rows(library):
    codes = torch.randint(0, 0x7F, (9, 8200), dtype=torch.uint8)[:, 3:8197]
    wanted = codes.contiguous().view(torch.float8_e4m3fn).float()
    assert torch.equal(decode(library, codes), wanted)


def test_token_all_encodings(library, encodings):
    """Rows of one sign and exponent each, then rows that mix all of them."""
    check_token(library, encodings.view(512, 128))
    order = torch.randperm(65536, generator=torch.Generator().manual_seed(3))
    check_token(library, encodings[order].view(512, 128))


@pytest.mark.parametrize("columns", WIDTHS)
def test_token_widths(library, columns):
    check_token(library, random(6, columns))
    check_token(library, random(6, columns + 9)[:, 4 : columns + 4])


def test_token_zero_and_tiny_rows(library):
    x = random(5, 100)
    x[1], x[2], x[3], x[4] = 0, 1e-40, torch.inf, torch.nan
    check_token(library, x)


@pytest.mark.parametrize("shape", [(0, 64), (4, 0)])
def test_empty(library, shape):
    x = torch.empty(shape, dtype=torch.bfloat16)
    assert encode(library, x, 1.0).shape == shape
    assert decode(library, torch.empty(shape, dtype=torch.uint8)).shape == shape
    check_token(library, x)


@pytest.mark.parametrize("order", ["llama", "gemma"])
@pytest.mark.parametrize("columns", [1, 33, 576, 3420])
@pytest.mark.parametrize("with_codes", [True, False])
def test_norm_raw_output(library, order, columns, with_codes):
    x, weight = random(4, columns), random(1, columns)[0]
    x[1, 0] = torch.nan
    raw = torch.full((4, columns), torch.nan, dtype=torch.bfloat16)
    codes = torch.full((4, columns), NAN_CODE, dtype=torch.uint8)
    library.call(
        "bl_rms_norm_static", ("llama", "gemma").index(order), x.data_ptr(), columns,
        weight.data_ptr(), codes.data_ptr() if with_codes else None, columns, raw.data_ptr(),
        columns, 4, columns, 1e-5, 1.0, 2,
    )  # fmt: skip
    wanted = rms_norm(NormSemantics(order, 1e-5), x, weight)
    finite = torch.nan_to_num(wanted, nan=7.0), torch.nan_to_num(raw, nan=7.0)
    assert torch.equal(finite[0].view(torch.int16), finite[1].view(torch.int16))
    if with_codes:
        expected = quantize_static(wanted, torch.tensor([1.0])).view(torch.uint8)
        assert torch.equal(codes, expected)
    else:
        assert (codes == NAN_CODE).all()


def test_unknown_isa_is_refused():
    functions = native.load().functions
    best = functions.bl_best_isa()
    assert functions.bl_set_isa(best + 1) == -1
    assert functions.bl_set_isa(-1) == -1
    assert functions.bl_set_isa(best) == 0

"""The C library: that it is there, the choice of an instruction set, and its mirror in Python."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest
import torch

from branchline.core import native
from branchline.core.errors import ConfigError

#: A machine without the library fails here, for it has no compiler.
ISAS = ("scalar", "avx2", "avx512", "amx")[: native.load().functions.bl_best_isa() + 1]
HEADER = (Path(__file__).parents[2] / "native/branchline_native.h").read_text(encoding="utf-8")
CODE = re.sub(r"/\*.*?\*/", "", HEADER, flags=re.DOTALL)
C_TYPES = {"int64_t": native._I64, "double": native._F64}


@pytest.fixture
def fresh(monkeypatch):
    """load() as in a new process; the instruction set is put back afterwards."""
    native.load.cache_clear()
    monkeypatch.delenv(native.ISA_VARIABLE, raising=False)
    yield monkeypatch
    native.load.cache_clear()
    monkeypatch.undo()
    native.load()


def test_unknown_isa_is_refused():
    functions = native.load().functions
    best = functions.bl_best_isa()
    assert functions.bl_set_isa(best + 1) == -1
    assert functions.bl_set_isa(-1) == -1
    assert functions.bl_set_isa(best) == 0


@pytest.mark.parametrize("isa", ISAS)
def test_isa_by_variable(fresh, isa):
    fresh.setenv(native.ISA_VARIABLE, isa)
    assert native.load().isa == isa


def test_isa_that_is_not_there(fresh):
    fresh.setenv(native.ISA_VARIABLE, "mmx")
    with pytest.raises(ConfigError, match="BRANCHLINE_NATIVE_ISA=mmx"):
        native.load()


def test_switched_off(fresh):
    fresh.setenv(native.ISA_VARIABLE, "none")
    loaded = native.load()
    assert not loaded.available
    assert native.ISA_VARIABLE in loaded.reason


def test_library_of_another_version(fresh):
    fresh.setattr(native, "ABI_VERSION", native.ABI_VERSION + 1)
    loaded = native.load()
    assert not loaded.available
    assert "another version" in loaded.reason


# --- the mirror of native/branchline_native.h ---------------------------------------------------


def test_abi_version():
    assert f"#define BL_ABI_VERSION {native.ABI_VERSION}\n" in HEADER
    assert native.load().functions.bl_abi_version() == native.ABI_VERSION


def enumerators(name: str) -> dict[str, int]:
    body = re.search(rf"enum {name} {{(.*?)}}", CODE, re.DOTALL)
    assert body, name
    pairs = re.findall(r"BL_(\w+) = (\d+)", body[1])
    return {enumerator: int(value) for enumerator, value in pairs}


def test_packed_low_rank_call():
    """Its numbers lie where the C structure has them, each field eight bytes."""
    slots = torch.zeros(3, dtype=torch.int32)
    packed = native.low_rank_call(
        1, (2, torch.bfloat16, 3), slots, (4, torch.float16, 5), shrunk=6, product=7
    )
    body = re.search(r"struct bl_low_rank_call {(.*?)\n};", CODE, re.DOTALL)
    assert body
    fields = [
        field.lstrip("*")
        for declaration in body[1].split(";")[:-1]
        for field in re.sub(r"^\s*(const )?((struct )?\w+) ", "", declaration).split(", ")
    ]
    found = dict(zip(fields, struct.unpack(f"{len(fields)}q", packed), strict=True))
    assert found == {
        "stack": 1,
        "x": 2,
        "x_dtype": native.LORA_DTYPES[torch.bfloat16],
        "x_stride": 3,
        "shrunk": 6,
        "slots": slots.data_ptr(),
        "requests": 3,
        "product": 7,
        "out": 4,
        "out_dtype": native.LORA_DTYPES[torch.float16],
        "out_stride": 5,
    }


@pytest.mark.parametrize(
    ("name", "mirror"),
    [
        ("bl_activation_kind", native.ActivationKind),
        ("bl_norm_order", native.NormOrder),
        ("bl_epilogue", native.Epilogue),
    ],
)
def test_enum(name, mirror):
    assert enumerators(name) == {member.name: member.value for member in mirror}


@pytest.mark.parametrize(
    ("name", "mirror"),
    [("bl_scale_dtype", native.SCALE_DTYPES), ("bl_lora_dtype", native.LORA_DTYPES)],
)
def test_dtype_enum(name, mirror):
    assert list(enumerators(name).values()) == list(mirror.values())


@pytest.mark.parametrize(
    ("name", "mirror"),
    [
        ("bl_activation_source", native.ActivationSource),
        ("bl_norm_source", native.NormSource),
        ("bl_shrink", native.ShrinkOutput),
        ("bl_low_rank", native.LowRank),
        ("bl_output", native.Output),
        ("bl_magnitude", native.Magnitude),
    ],
)
def test_struct(name, mirror):
    """Fields by name, order and kind: number, floating-point number or address."""
    body = re.search(rf"struct {name} {{(.*?)\n}};", CODE, re.DOTALL)
    assert body, name
    wanted = []
    for declaration in body[1].split(";")[:-1]:
        kind, names = re.fullmatch(
            r"\s*(?:const )?((?:struct )?\w+) (.*?)\s*", declaration
        ).groups()
        for field in names.split(", "):
            wanted.append((field.lstrip("*"), None if "*" in field else C_TYPES[kind]))
    found = [(field, kind if kind in C_TYPES.values() else None) for field, kind in mirror._fields_]
    assert found == wanted

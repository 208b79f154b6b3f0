from __future__ import annotations

import inspect
import pickle

import pytest

from branchline.core import errors
from branchline.core.errors import BranchlineError

CLASSES = [
    cls
    for _, cls in inspect.getmembers(errors, inspect.isclass)
    if issubclass(cls, Exception) and cls.__module__ == errors.__name__
]
PARTS = ("adapter 'sql'", "has rank 64 but slots were sized for 16", "load with rank >= 64")

each_class = pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)


def test_the_list_is_not_empty():
    assert {"ConfigError", "RawConsumerError", "AdapterMismatchError"} <= {
        cls.__name__ for cls in CLASSES
    }


@each_class
def test_three_parts_and_all_of_them_in_the_message(cls):
    error = cls(*PARTS)
    assert isinstance(error, BranchlineError)
    assert (error.subject, error.reason, error.remedy) == PARTS
    for part in PARTS:
        assert part in str(error)


@each_class
@pytest.mark.parametrize("count", [0, 1, 2, 4])
def test_fewer_or_more_parts_cannot_be_raised(cls, count):
    with pytest.raises(TypeError):
        cls(*(PARTS * 2)[:count])


@each_class
def test_keeps_its_parts_across_processes(cls):
    error = pickle.loads(pickle.dumps(cls(*PARTS)))
    assert type(error) is cls
    assert str(error) == str(cls(*PARTS))


@each_class
def test_is_documented(cls):
    assert cls.__doc__
    assert cls.__doc__.strip().endswith((".", ")")) or "Args:" in cls.__doc__


@pytest.mark.parametrize(
    ("name", "builtin"),
    [
        ("ConfigError", ValueError),
        ("CalibrationError", errors.ConfigError),
        ("ScaleError", ValueError),
        ("ContractError", TypeError),
        ("RawConsumerError", errors.ContractError),
        ("QuantKeyMismatchError", errors.ContractError),
        ("MalformedActivationError", errors.ContractError),
        ("KernelUnavailableError", RuntimeError),
        ("RegistryError", ValueError),
        ("BatchError", ValueError),
        ("AdapterNotFoundError", LookupError),
        ("AdapterMismatchError", errors.AdapterError),
        ("AdapterUnsupportedError", errors.AdapterError),
        ("AdapterFormatError", errors.AdapterError),
        ("AdapterCapacityError", RuntimeError),
    ],
)
def test_family(name, builtin):
    assert issubclass(getattr(errors, name), builtin)


def test_no_family_is_a_key_error():
    # str(KeyError) quotes its argument, and LookupError handlers would see a repr.
    assert not any(issubclass(cls, KeyError) for cls in CLASSES)

"""Where the values of a probe lie, and which others lie beside them.

What reads its neighbours, or counts elements or dimensions, may equal an activation on one tensor
of all encodings.  It does not equal it on every arrangement of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

#: Zeros, subnormals, large, infinite.
SPECIAL = (0.0, -0.0, 1.0, -1.0, 0.5, 448.0, -3300.0, 1e-40, -6e-8, 3e38, float("inf"))

_CHUNK = 1024
_FILL = (0.0, 1.0)

Values = tuple[torch.Tensor, ...]


def all_encodings(dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
    """Every value of a two-byte float dtype, (65536,); for float32, those of bfloat16 widened."""
    codes = torch.arange(-(2**15), 2**15, dtype=torch.int32, device=device).to(torch.int16)
    if dtype == torch.float32:
        return codes.view(torch.bfloat16).float()
    return codes.view(dtype)


def shuffled(values: torch.Tensor, seed: int) -> torch.Tensor:
    """`values`, any shape, in an order that is the same each time."""
    generator = torch.Generator().manual_seed(seed)
    flat = values.flatten()
    return flat[torch.randperm(flat.numel(), generator=generator).to(flat.device)].view_as(values)


def special_values(
    numbers: Iterable[float], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """`SPECIAL` and, in both signs, `numbers` and their neighbours in `dtype`: 1-D."""
    given = torch.tensor([*numbers], dtype=torch.float64).to(dtype)
    as_int = {2: torch.int16, 4: torch.int32}[given.element_size()]
    near = [(given.view(as_int) + step).view(dtype) for step in (-1, 0, 1)]
    near += [-value for value in near]
    return torch.cat([torch.tensor(SPECIAL).to(dtype), *near]).to(device)


def whole_vectors(values: Values) -> Iterator[Values]:
    """Contiguous chunks, each of values of one magnitude.

    A whole number of vectors each: where a tensor is not, torch may give its last elements other
    bytes, by other code.

    Args:
        values: 1-D of 65,536 elements, one for each argument.
    """
    yield from _chunks(_sorted(values), 1024)


def anywhere(values: Values) -> Iterator[Values]:
    """Every shape, stride and neighbourhood that could show.

    Args:
        values: 1-D of 65,536 elements, one for each argument.
    """
    yield values
    yield tuple(v[:-1].view(255, 257) for v in values)
    yield tuple(v.view(64, 4, 256).transpose(0, 2) for v in values)
    yield tuple(torch.stack([v, v.flip(0)], -1)[:, 0] for v in values)
    # As one half of a packed tensor.
    yield tuple(torch.cat([v.view(64, -1), v.view(64, -1)], -1)[:, 1024:] for v in values)
    ordered = _sorted(values)
    yield from _chunks(ordered, 1027)
    yield from _chunks(tuple(v[::128] for v in ordered), 13)
    yield from _among_equals(values)


def _chunks(values: Values, size: int) -> Iterator[Values]:
    for chunk in zip(*(v.split(size) for v in values), strict=True):
        yield tuple(part.clone() for part in chunk)


def _among_equals(values: Values) -> Iterator[Values]:
    for fill in _FILL:
        for position in range(0, values[0].numel(), 4093):
            probe = tuple(torch.full((33,), fill, dtype=v.dtype, device=v.device) for v in values)
            for tensor, v in zip(probe, values, strict=True):
                tensor[16] = v[position]
            yield probe


def _sorted(values: Values) -> Values:
    order = values[0].float().argsort(stable=True)
    return tuple(v[order] for v in values)

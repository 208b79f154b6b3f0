"""How a product is cut into tiles: a pure function of the number of rows.

Rows of the activation are the *columns* of a matrix instruction and output channels its rows.  So
one row alone takes the same instruction, in the same order of steps along K, as thousands: were it
the other way round, few rows would take another instruction on Hopper, whose sums differ.
"""

from __future__ import annotations

from typing import NamedTuple

#: Columns of one step along K, and of one sum in a tensor core: never another number.
STEP = 128
#: Of the launch: a product and a sum become one rounding only where that is written.
OPTIONS = {"enable_fp_fusion": False}


class MatmulPlan(NamedTuple):
    """Constants of the compiled kernel.

    Attributes:
        rows: of the activation in a tile.
        channels: output channels of a tile.
        warps: that share a tile.
        stages: steps along K that are on their way at a time.
    """

    rows: int
    channels: int
    warps: int
    stages: int

    @property
    def shared_bytes(self) -> int:
        """Bytes of codes that lie in shared memory at a time."""
        return (self.rows + self.channels) * STEP * self.stages


#: By the most rows that each is for.  All fit the 99 KiB of compute capability 8.9 and 12.0.
_PLANS = (
    (16, MatmulPlan(rows=16, channels=64, warps=4, stages=5)),
    (64, MatmulPlan(rows=64, channels=64, warps=4, stages=4)),
)
_MANY = MatmulPlan(rows=128, channels=128, warps=8, stages=3)
#: For codes that are read a byte at a time: an address for each takes the registers.
_BYTES = MatmulPlan(rows=64, channels=64, warps=8, stages=1)
PLANS = (*(plan for _, plan in _PLANS), _MANY, _BYTES)


def plan_matmul(rows: int, columns: int, *, one_scale: bool = True) -> MatmulPlan:
    """The tiles for `rows` rows, at least 1.

    Args:
        rows: of the activation.
        columns: K.
        one_scale: the channels of a tile share their scales; if not, those take the registers that
            the widest tile needs for its sums.
    """
    if columns % 16:
        return _BYTES
    plans = _PLANS if one_scale else _PLANS[:1]
    widest = _MANY if one_scale else _PLANS[-1][1]
    return next((plan for most, plan in plans if rows <= most), widest)

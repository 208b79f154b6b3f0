"""The parts that an adapter's branch of one module may consist of, as bits that a plan adds up."""

from __future__ import annotations

from enum import IntEnum


class Part(IntEnum):
    """One part; several are their sum.

    Integers, not flags: the forward of every linear asks for them.

    Attributes:
        PLAIN: a low-rank product, and no other part beside it.
        LOW_RANK: a low-rank product with other parts beside it.
        GAIN: the base output is multiplied, column by column.
        SHIFT: something is added to the output, column by column.
        IN_SCALE: the input is multiplied, column by column.
        ROTATION: the input is multiplied with blocks of matrices.
        DELTA: a dense change of the weight.
        WEIGHT: a weight in the base's place.
        OWN: weights of a module that is no linear: an embedding, or a norm.
        OUTPUT_ROTATION: the base output is multiplied with blocks of matrices.
    """

    PLAIN = 1
    LOW_RANK = 2
    GAIN = 4
    SHIFT = 8
    IN_SCALE = 16
    ROTATION = 32
    DELTA = 64
    WEIGHT = 128
    OWN = 256
    OUTPUT_ROTATION = 512


#: Parts by which the base is fed something else than the site's output.
CHANGES_INPUT = Part.IN_SCALE | Part.ROTATION
#: Parts that need the raw activation; the others act on the output alone.
READS_RAW = CHANGES_INPUT | Part.PLAIN | Part.LOW_RANK | Part.DELTA | Part.WEIGHT

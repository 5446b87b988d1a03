"""Shares of a device: what `gpus=` may say, and what it comes to.

A device is 840 units, so that halves to eighths of it are whole numbers of them.
"""

from __future__ import annotations

import math
import numbers
from typing import Any

UNITS = 840
"""Units of a whole device."""
CONTEXT_BYTES = 768 << 20
"""Memory of a card that each process needs for CUDA itself, beside JAX's pool: reserved per sharer."""
_UNKNOWN_MEMORY_PART = 0.9
"""What is promised to the sharers of a card whose memory the driver does not tell."""


def checked(gpus: Any) -> int | float:
    """Give a valid `gpus=` back: whole numbers as int, shares of one device as float.

    Raises:
        TypeError: If it is no number.
        ValueError: If it is negative, or neither whole nor a share.
    """
    if isinstance(gpus, bool) or not isinstance(gpus, numbers.Real):
        text = f"gpus must be a whole number (0 for the CPU only) or a share of one GPU (0.5, 1/3), not {gpus!r}"
        raise TypeError(text)
    try:
        value = float(gpus)
    except OverflowError:
        value = math.inf
    if not math.isfinite(value) or value < 0 or (value > 1 and not value.is_integer()):
        text = f"gpus must be 0 (the CPU only), a whole number, or a share of one GPU (0.5, 1/3), not {value:g}"
        raise ValueError(text)
    return int(value) if value.is_integer() else value


def is_share(gpus: float) -> bool:
    """Say whether several such requests fit on one device."""
    return 0 < gpus < 1


def units(gpus: float) -> int:
    """How much of each device a request takes."""
    return max(1, math.ceil(UNITS * gpus - 1e-6)) if is_share(gpus) else UNITS


def per_device(gpus: float) -> int:
    """How many such requests one device serves at a time."""
    return UNITS // units(gpus)


def memory_fraction(gpus: float, memory_bytes: int | None) -> float:
    """The part of a device's memory that JAX's pool may have, for a share: what CUDA itself needs is left out.

    Raises:
        ValueError: If that leaves nothing for the pool.
    """
    fraction = gpus * _UNKNOWN_MEMORY_PART if memory_bytes is None else gpus - CONTEXT_BYTES / memory_bytes
    if fraction < 1e-4:
        of = "" if memory_bytes is None else f"{gpus * memory_bytes / 2**30:.1f} of {memory_bytes / 2**30:.1f} GiB, "
        text = (
            f"gpus={gpus:g} leaves no memory: it is {of}less than CUDA alone needs for each process "
            f"({CONTEXT_BYTES / 2**30:.2f} GiB). Ask for a larger share."
        )
        raise ValueError(text)
    return math.floor(fraction * 1e4) / 1e4

"""Guarded functions at module level, for tests that send them to joblib's processes by name.

Workers import this module: it imports nothing heavy, so that a fresh process stays cheap.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from jaxguard import isolated_jax_worker

if TYPE_CHECKING:
    import pathlib

# joblib's multiprocessing backend pickles by name alone, so each guarded function is defined as such.
fresh = isolated_jax_worker(slot_timeout=120)
warm = isolated_jax_worker(slot_timeout=120, reuse=True)


@fresh
def cube(x: int) -> tuple[int, int]:
    """Say where it ran."""
    return x**3, os.getpid()


@warm
def warm_cube(x: int) -> tuple[int, int]:
    """Say where it ran."""
    return x**3, os.getpid()


@fresh
def jax_mean(x: int) -> Any:
    """Need JAX itself."""
    import jax.numpy as jnp

    return jnp.arange(x + 1).mean()


@fresh
def fail_on_three(x: int) -> int:
    """Fail in the middle of the work."""
    if x == 3:
        message = "three"
        raise LookupError(message)
    return x


@fresh
def end_with(code: int) -> None:
    """End its process at once."""
    os._exit(code)


def unsafe_increment(counter: pathlib.Path) -> None:
    """Lose increments unless nobody else is here."""
    value = int(counter.read_text() or "0")  # an overlapping writer may just have truncated it
    time.sleep(0.001)
    counter.write_text(str(value + 1))


@fresh
def increment(counter: pathlib.Path) -> None:
    """Count, in a process of its own."""
    unsafe_increment(counter)


@warm
def warm_increment(counter: pathlib.Path) -> None:
    """Count, in a warm worker."""
    unsafe_increment(counter)

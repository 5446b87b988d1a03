"""What a guarded call costs, beside a fresh loky executor in the same run.

    python tests/benchmarks/cost_of_a_call.py

Prints a table: the median of each way to run a function, in milliseconds, and as a ratio to the last row.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from loky import ProcessPoolExecutor

from jaxguard import isolated_jax_worker
from jaxguard.testing import fake_slots

EXEC = {"OMP_DYNAMIC": "FALSE"}  # read at import: no fork of the keeper has it


def nothing() -> None:
    """Do nothing."""


def operation() -> float:
    """Start JAX and run one operation."""
    import jax.numpy as jnp

    return float(jnp.ones(3).sum())


def in_a_new_executor() -> None:
    """Do the operation in a process that loky starts for it."""
    with ProcessPoolExecutor(1) as executor:
        executor.submit(operation).result()


WAYS: dict[str, tuple[int, Callable[[], object]]] = {
    "warm worker, nothing": (200, isolated_jax_worker(reuse=True)(nothing)),
    "fresh worker, nothing": (20, isolated_jax_worker(nothing)),
    "fresh worker, a JAX operation": (12, isolated_jax_worker(operation)),
    "fresh worker by exec, a JAX operation": (5, isolated_jax_worker(env=EXEC)(operation)),
    "new loky executor, a JAX operation": (5, in_a_new_executor),
}


def median_ms(repeat: int, call: Callable[[], object]) -> float:
    """Time a call, after one that is not counted."""
    call()
    times = []
    for _ in range(repeat):
        began = time.perf_counter()
        call()
        times.append(1000 * (time.perf_counter() - began))
    return statistics.median(times)


def main() -> None:
    """Measure and print."""
    with fake_slots(2):
        medians = {name: median_ms(*way) for name, way in WAYS.items()}
    last = list(medians.values())[-1]
    width = max(map(len, medians))
    for name, median in medians.items():
        print(f"{name:{width}}  {median:8.1f} ms  {median / last:6.3f}")


if __name__ == "__main__":
    main()

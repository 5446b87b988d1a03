"""For your own tests: slots that are nobody else's, and guarded functions that run in the test's process."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

from . import _settings

__all__ = ["fake_slots", "inline"]


@contextmanager
def fake_slots(count: int) -> Iterator[None]:
    """Have `count` CPU slots of your own for the duration of the block, whatever the host has.

    They are real slots: guarded calls hold them, wait for them, and run in workers. No other test and no other program
    shares them; child processes of the block do.

    Args:
        count: How many slots, at least 1.

    Raises:
        TypeError: If `count` is not a whole number.
        ValueError: If `count` is less than 1.

    Example:
        >>> from jaxguard import slot_count
        >>> from jaxguard.testing import fake_slots
        >>> with fake_slots(3):
        ...     slot_count()
        3
    """
    given: object = count
    if not isinstance(given, int) or isinstance(given, bool):
        text = f"fake_slots takes a whole number, not {count!r}"
        raise TypeError(text)
    if count < 1:
        text = f"fake_slots takes a number of slots from 1, not {count}"
        raise ValueError(text)
    with _set(_settings.DEVICES, f"cpu:{count}@test-{os.getpid()}-{secrets.token_hex(6)}"):
        yield


@contextmanager
def inline() -> Iterator[None]:
    """Run guarded functions in this process for the duration of the block: no slot, no worker, a debugger works.

    They run one at a time, and are still refused if they, or their arguments, could not travel to a worker.

    Example:
        >>> import os
        >>> from jaxguard import isolated_jax_worker
        >>> from jaxguard.testing import inline
        >>> with inline():
        ...     isolated_jax_worker(os.getpid)() == os.getpid()
        True
    """
    with _set(_settings.INLINE, "1"):
        yield


@contextmanager
def _set(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before

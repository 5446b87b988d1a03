"""Fixtures for tests of guarded code; pytest finds them by itself where jaxguard is installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from . import testing

_DEFAULT_SLOTS = 2


@pytest.fixture
def jaxguard_fake_slots() -> Iterator[Callable[[int], None]]:
    """Two CPU slots of the test's own; call it with another number to have that many."""
    with ExitStack() as stack:

        def set_number(count: int) -> None:
            stack.enter_context(testing.fake_slots(count))

        set_number(_DEFAULT_SLOTS)
        yield set_number


@pytest.fixture
def jaxguard_inline() -> Iterator[None]:
    """Guarded functions run in the test's process."""
    with testing.inline():
        yield


@pytest.fixture
def jaxguard_slot() -> Iterator[Any]:
    """A slot for the test's own process (each pytest-xdist worker is one) while the test runs.

    Guarded calls of that test run in this process too. On a GPU, the process keeps the slot once JAX has started.
    """
    from ._gpu_slot import gpu_slot

    with gpu_slot() as slot:
        yield slot

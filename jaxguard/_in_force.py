"""What the open `gpu_slot` blocks have put in force in this process: its environment, and JAX's configuration.

What a block says holds for the code inside it and for the processes that this starts. Other threads still choose among
all that this process had outside of its blocks, so that is remembered here, and they ask here.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from . import _descriptors, _jax_state

_said: list[dict[str, str]] = []
"""What the blocks that are open have put in the environment, the oldest first."""
_outside: dict[str, str | None] = {}
"""What these variables were before."""
_turn = threading.Lock()


def environment() -> dict[str, str]:
    """The environment of this process, as it is outside of its blocks."""
    with _turn:
        env = dict(os.environ)
        for name, value in _outside.items():
            if value is None:
                env.pop(name, None)
            else:
                env[name] = value
        return env


def outside(name: str) -> str | None:
    """One variable of it."""
    with _turn:
        return _outside.get(name, os.environ.get(name))


@contextmanager
def in_force(variables: dict[str, str], jax_settings: dict[str, Any]) -> Iterator[None]:
    """Put variables and JAX's configuration in force for the duration of the block."""
    before: dict[str, Any] = {}
    try:
        with _turn:
            for name in variables:
                _outside.setdefault(name, os.environ.get(name))
            _said.append(variables)
            os.environ.update(variables)
        before = _configure_jax(jax_settings)
        yield
    finally:
        try:
            _unsay(variables)
        except BaseException:  # a user's time limit: what it came in between of is done after all
            _unsay(variables)
            raise
        finally:
            _configure_jax(before)


def _unsay(variables: dict[str, str]) -> None:
    """Threads may leave crosswise: the last one that is still inside has its say, and after it what was outside."""
    with _turn:
        _said[:] = [said for said in _said if said is not variables]
        for name, before in _outside.items():
            value = next((said[name] for said in reversed(_said) if name in said), before)
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        if not _said:
            _outside.clear()


def _configure_jax(settings: dict[str, Any]) -> dict[str, Any]:
    """Tell an imported JAX, which has read its environment already; give what was. One that has started stays so."""
    jax = sys.modules.get("jax")
    if jax is None or _jax_state.started():
        return {}
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    return before


def _after_fork_in_child() -> None:
    global _turn  # noqa: PLW0603 – the old lock may be held by a thread that does not exist here
    _turn = threading.Lock()
    _said.clear()
    _outside.clear()


_descriptors.after_fork_in_child(_after_fork_in_child)

"""A call, ready to travel: all that is decided before anybody waits for a slot.

The function and its arguments, pickled; the environment that the worker will have; a picture of what the parent has
set at this moment.
"""

from __future__ import annotations

import logging
import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import (
    _caching,
    _calls,
    _descriptors,
    _devices,
    _diagnosis,
    _environment,
    _in_force,
    _inherited,
    _linux,
    _settings,
    _starting,
    _trials,
)

logger = logging.getLogger("jaxguard")


@dataclass(frozen=True, slots=True)
class Options:
    """What a guard was given."""

    gpus: float = 1
    timeout: float = math.inf
    slot_timeout: float = math.inf
    reuse: bool = False
    env: tuple[tuple[str, str | None], ...] = ()
    devices: _devices.Listed | None = None
    cpus: int | None = None
    compile_cache: str = _caching.SHARED


_HEAVY = 100_000_000
"""From this size on, in bytes, a function that travels by value is told of."""
_told: set[str] = set()


class PackedCall:
    """A call, ready to travel."""

    def __init__(
        self,
        name: str,
        roots: _trials.Roots,
        options: Options,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self.function, self.arguments = _pack_both(name, roots, function, args, kwargs)
        try:
            env = _asked_for(options)
            self.at_import = _starting.read_at_import(env)
            self.env = _environment.thread_variables() | env  # the user's own settings win
            self.cache = _caching.plan(options.compile_cache, env, dict(options.env))
            self.picture = _picture(options)
        except BaseException:
            self.close()
            raise
        self.key = (
            options.gpus,
            options.devices,
            options.cpus,
            options.env,
            _settings.devices(),
            _caching.key_of(self.cache),
            tuple(sorted(self.at_import.items())),
        )
        """Calls with the same key can share a warm worker."""

    def hand_over(self) -> tuple[_calls.Packed, _calls.Packed]:
        """Give the function and the arguments away, with their descriptors."""
        parts = self.function, self.arguments
        self.function, self.arguments = (part._replace(descriptors=[]) for part in parts)
        return parts

    def close(self) -> None:
        """Close what was not given away."""
        _descriptors.close(*self.function.descriptors, *self.arguments.descriptors)


def check_travels(name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise what a guarded call would raise if any of this cannot travel."""
    for part in _pack_both(name, _trials.Roots("inline"), function, args, kwargs):
        _descriptors.close(*part.descriptors)


def _pack_both(
    name: str, roots: _trials.Roots, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[_calls.Packed, _calls.Packed]:
    reference = _calls.reference(function)
    first = _pack(function if reference is None else reference, lambda: function, name, roots)
    try:
        if first.size > _HEAVY and name not in _told:
            _told.add(name)
            logger.warning("jaxguard: %s", _diagnosis.explain_weight(function, name, first.size, roots.replace))
        return first, _pack((args, kwargs), lambda: _diagnosis.Arguments.of(function, args, kwargs), name, roots)
    except BaseException:
        _descriptors.close(*first.descriptors)
        raise


def _pack(value: object, suspect: Callable[[], Any], name: str, roots: _trials.Roots) -> _calls.Packed:
    try:
        return _calls.pack(value, plain=False, replace=roots.replace)
    except Exception as error:
        if _linux.is_a_users(error):
            raise
        raise TypeError(_diagnosis.explain(suspect(), name, error, roots.replace)) from error


def _asked_for(options: Options) -> dict[str, str]:
    """The environment that a call asks for."""
    env = _in_force.environment()
    for name, value in options.env:
        if value is None:
            env.pop(name, None)
        else:
            env[name] = value
    _environment.check_memory(env)
    if (
        options.cpus is None
        or (threads := _environment.thread_variables(options.cpus)) == _environment.thread_variables()
    ):
        return env
    return threads | env  # the numerical libraries read them when they are imported


def _picture(options: Options) -> bytes:
    picture = _inherited.capture()
    for name, _ in options.env:  # env= is nearer to the call than what the parent has set for itself
        picture["jax"].pop(name.lower(), None)
    return pickle.dumps(picture)

"""Which compilation cache a worker's JAX uses: what a guard was told, and what the user has set for JAX itself.

The calling process decides, the worker carries it out. A user's own settings of JAX's cache win over the default.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import secrets
import sys
import threading
import warnings
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Any

from . import _descriptors, _flights, _jax_state, _linux, _programs, _recompiles, _settings, _store, errors
from ._gpus import Device

logger = logging.getLogger("jaxguard")

SHARED, PRIVATE, OFF = "shared", "private", "off"
_DIRECTORY = "jax_compilation_cache_dir"
_ENABLE = "jax_enable_compilation_cache"
_DEFAULTS: dict[str, Any] = {
    _DIRECTORY: None,
    _ENABLE: True,
    "jax_compilation_cache_max_size": -1,
    "jax_persistent_cache_min_compile_time_secs": 1.0,
    "jax_persistent_cache_min_entry_size_bytes": 0,
    "jax_persistent_cache_enable_xla_caches": "xla_gpu_per_fusion_autotune_cache_dir",
}
"""JAX's settings of its cache, and the values that they have when nobody has set them."""
_DECIDING = {_DIRECTORY, _ENABLE}
"""Those that make the cache the user's: the others without them are settings of a cache that is not there."""
_OURS: dict[str, Any] = {
    "jax_compilation_cache_max_size": -1,
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
    "jax_persistent_cache_enable_xla_caches": "none",  # else the directory is part of each key
}
_NEVER_FAIL = "jax_raise_persistent_cache_errors"

_ASIDE = (
    "jaxguard: a guarded function has changed the directory of JAX's compilation cache. JAX goes by that; its worker "
    'shares no programs from then on. compile_cache="off" says that this is wanted.'
)

_told: set[str] = set()


@dataclass(frozen=True, slots=True)
class Plan:
    """What a worker does about its compilation cache."""

    way: str = OFF
    root: str = ""
    name: str = ""
    """The name of the worker's own directory."""
    own: dict[str, Any] = field(default_factory=dict)
    """The user's own settings for JAX, set in the calling process."""

    @property
    def private(self) -> str | None:
        """The worker's own directory, to be removed when it has ended."""
        return _store.private_path(self.root, self.name) if self.root else None


def checked(compile_cache: Any) -> str:
    """Give a valid `compile_cache=` back.

    Raises:
        TypeError: If it is not text.
        ValueError: If it is none of the words that are valid, and no absolute path.
    """
    if isinstance(compile_cache, os.PathLike):
        compile_cache = os.fspath(compile_cache)
    valid = 'Valid are: "shared" (the default), "private", "off", or the absolute path of a directory.'
    if not isinstance(compile_cache, str):
        text = f"compile_cache must be text or a path, not {compile_cache!r}. {valid}"
        raise TypeError(text)
    if compile_cache not in {SHARED, PRIVATE, OFF} and not os.path.isabs(compile_cache):
        text = f"compile_cache={compile_cache!r} is not valid. {valid}"
        raise ValueError(text)
    return compile_cache


def plan(compile_cache: str, env: Mapping[str, str], of_the_guard: Container[str] = ()) -> Plan:
    """Decide, at a call, for a worker that will have this environment.

    Args:
        compile_cache: What the guard was told.
        env: The environment.
        of_the_guard: Names in it that the guard's `env=` sets or unsets: they are nearer to the call than what the
            caller has set for itself.

    Raises:
        ValueError: If a guard and the user's own settings for JAX say different things.
    """
    by_hand = {name: value for name, value in _set_by_hand().items() if name.upper() not in of_the_guard}
    own = sorted({*_DECIDING & by_hand.keys(), *is_set_in(env)})
    if not own:
        if compile_cache == OFF:
            return Plan()
        directory = compile_cache if os.path.isabs(compile_cache) else _store.root()
        return Plan(PRIVATE if compile_cache == PRIVATE else SHARED, directory, secrets.token_hex(8))
    words = " and ".join(name.upper() if name.upper() in env else f"jax.config.{name}" for name in own)
    if compile_cache not in {SHARED, OFF}:
        text = (
            f"compile_cache={compile_cache!r} of the guard and {words} are both set, and only one can be in force. "
            "Remove the second (jaxguard sets up JAX's cache by itself), or leave compile_cache= away."
        )
        raise ValueError(text)
    if compile_cache == SHARED:
        _tell_once(
            f"jaxguard: workers share no programs through jaxguard, because {words} is set: JAX's own cache is used as "
            f"you have set it up. Remove that to share through jaxguard; to keep it and silence this, say "
            'compile_cache="off".'
        )
    return Plan(own=by_hand)


def key_of(plan: Plan) -> tuple[object, ...]:
    """What two calls must have in common to use the same warm worker."""
    return plan.way, plan.root, tuple(sorted(plan.own.items()))


def _set_by_hand() -> dict[str, Any]:
    jax = sys.modules.get("jax")
    if jax is None:
        return {}
    values = {name: getattr(jax.config, name, default) for name, default in _DEFAULTS.items()}
    return {name: value for name, value in values.items() if value != _DEFAULTS[name]}


def is_set_in(env: Mapping[str, str]) -> list[str]:
    """Which settings of an environment make JAX's cache the user's own.

    The switch as JAX reads it, where all but a few words switch the cache off.
    """
    found = [_DIRECTORY] if env.get(_DIRECTORY.upper()) else []
    switch = env.get(_ENABLE.upper(), "")
    return [*found, _ENABLE] if switch and switch.lower() not in {"y", "yes", "t", "true", "on", "1"} else found


def _tell_once(text: str) -> None:
    if text not in _told:
        _told.add(text)
        logger.warning("%s", text)


def learn(topic: tuple[str | None, str], facts: dict[str, Any]) -> None:
    """Take in what a worker tells of a call: say what is to be said, each thing once."""
    for note in facts.get("notes", []):
        _tell_once(note)
    _recompiles.learn(topic, facts.get("programs", []))


# ---------------------------------------------------------------- in the worker


class Cache:
    """What a worker has of all that: settings at once, the store with the first program."""

    def __init__(self, plan: Plan, devices: tuple[Device, ...]) -> None:
        import jax

        self.watch = _programs.Watch()
        self._plan = plan
        self._devices = devices
        self._turn = threading.RLock()  # a signal handler of the user's may compile
        self._is_open = False
        self._aside = False
        self._flights: _flights.Flights | None = None
        self._notes: list[str] = []
        self.watch.listen()
        for name, value in plan.own.items():
            jax.config.update(name, value)
        if plan.private is not None:
            for name, value in {**_OURS, _DIRECTORY: plan.private}.items():
                jax.config.update(name, value)
            self.watch.before, self.watch.after = self._before, self._after
            self.keep_quiet()
        _here.append(self)

    def _open(self) -> None:
        """Make this worker's directory, and open the store."""
        import jax

        with self._turn:
            if self._is_open:
                return
            self._is_open = True
            try:
                store = _store.Store(self._plan.root, kind_of(self._devices))
                store.enter(self._plan.name)
                if self._plan.way == SHARED:
                    store.tidy()
                    self._flights = _flights.Flights(store, str(self._plan.private))
            except (errors.JaxguardError, OSError) as error:
                if _linux.is_a_users(error):
                    raise
                reason = str(error) if isinstance(error, errors.JaxguardError) else error.strerror or str(error)
                self._notes.append(_lost(reason, self._plan))
                jax.config.update(_DIRECTORY, None)
                self._aside = True

    def _is_ours(self) -> bool:
        """Say whether JAX still looks in this worker's directory: user code may have given it another one."""
        import jax

        return bool(jax.config.values[_DIRECTORY] == self._plan.private)

    def _before(self, program: _programs.Program) -> None:
        if self._aside:
            return
        if not self._is_ours():
            self._stand_aside()
            return
        self._open()
        if self._flights is not None and not self._aside:
            program.storable = self._stores_all()
            self._flights.before(program)
            if not program.fetched and program.module is not None:
                program.text, program.constants = _recompiles.without_constants(_jax_state.text_of(program.module))

    def _after(self, program: _programs.Program) -> None:
        if self._flights is not None:
            self._flights.after(program)

    def _stand_aside(self) -> None:
        """Leave JAX's cache to the user for good: it begins anew in the directory that he has set."""
        from jax.experimental.compilation_cache import compilation_cache

        self._aside = True
        self._notes.append(_ASIDE)
        compilation_cache.reset_cache()

    @staticmethod
    def _stores_all() -> bool:
        import jax

        return all(jax.config.values[name] == value for name, value in _OURS.items())

    def keep_quiet(self) -> None:
        """Have JAX neither warn nor fail for entries that it cannot read or write: jaxguard says once what is lost."""
        if self._plan.private is not None and not self._aside:
            import jax

            jax.config.update(_NEVER_FAIL, False)
            warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache")

    def forsake(self) -> None:
        """In a forked child: what is open here is its parent's."""
        self._turn = threading.RLock()  # a signal handler of the user's may compile
        self._flights = None
        self._aside = True
        if self._plan.private is not None:
            import jax

            jax.config.update(_DIRECTORY, None)

    def take_facts(self) -> dict[str, Any]:
        """What there is to say since the last look."""
        notes, self._notes = self._notes, []
        if self._flights is not None:
            self._flights.end_all()
            notes += [_lost(reason, self._plan) for reason in self._flights.take_lost()]
        return {**_programs.facts(self.watch.take()), "notes": notes}


_here: list[Cache] = []
"""The one of this worker."""


def _after_fork_in_child() -> None:
    for cache in _here:
        cache.forsake()


_descriptors.after_fork_in_child(_after_fork_in_child)


def _lost(reason: str, plan: Plan) -> str:
    return (
        f"jaxguard: compiled programs are not kept in {plan.root}: {reason}. Trials run, and each compiles for itself. "
        f"Mend it, or name another directory (compile_cache= of the guard, or {_settings.CACHE_DIR})."
    )


def kind_of(devices: tuple[Device, ...]) -> str:
    """A name for the programs that this jaxlib makes for this hardware: others are of no use to it."""
    from jaxlib.version import __version__ as version

    gpus = sorted({re.sub(r"[^A-Za-z0-9]+", "-", device.kind) for device in devices if device.is_gpu})
    return ",".join([f"jaxlib-{version}", *gpus, f"cpu-{_cpu()}"])


def _cpu() -> str:
    """The model of the processor and what it can do, as a short text."""
    words: dict[str, str] = {}
    with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            if not line.strip():  # the others are the same
                break
            name, _, value = line.partition(":")
            words.setdefault(name.strip(), value.strip())
    known = [words.get(name, "") for name in ("model name", "CPU part", "flags", "Features")]
    return hashlib.blake2b("\n".join(known).encode(), digest_size=4).hexdigest()

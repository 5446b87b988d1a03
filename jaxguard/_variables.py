"""Environment variables that fight each other, that nobody reads, or that do something else than they seem to do."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from . import _caching, _environment, _settings
from ._findings import Finding, Verdict

_OWN = {
    _settings.DEVICES,
    _settings.DIR,
    _settings.CACHE_DIR,
    _settings.ALLOW_FOREIGN,
    _settings.INLINE,
    _settings.HOLD,
    _settings.RUN,
}
_NOT_CONFIG = re.compile(r"JAX_(ENABLE_|DISABLE_|DEBUG_|TRACEBACK_|COORDINATOR|LOCAL_|NUM_|PROCESS_|CUDA|TPU|PLUGIN)")
"""Variables that JAX reads beside its configuration."""


def environment() -> Iterator[Finding]:
    """Variables that fight each other, that nobody reads, or that do something else than they seem to do."""
    env = dict(os.environ)
    quiet = True
    for finding in (*_own_settings(env), *_memory_names(env), *_unknown_to_jax(env), *_odd_ones(env)):
        quiet = False
        yield finding
    if quiet:
        yield Finding("environment", Verdict.OK, "no variable that fights another one")


def _own_settings(env: dict[str, str]) -> Iterator[Finding]:
    for name in sorted(env):
        if name.startswith("JAXGUARD_") and name not in _OWN:
            yield Finding(
                "environment", Verdict.BAD, f"{name} is no setting of jaxguard", "nobody reads it", f"unset {name}"
            )
    _settings.directory(), _settings.cache_directory(), _settings.allow_foreign()
    if _settings.inline():
        yield Finding(
            "environment",
            Verdict.NOTE,
            f"{_settings.INLINE}=1: guarded functions run in the calling process, one at a time",
            "no isolation, no slot, no timeout: it is for debuggers",
            f"unset {_settings.INLINE}",
        )


def _memory_names(env: dict[str, str]) -> Iterator[Finding]:
    try:
        own = _environment.check_memory(env)
    except ValueError as error:
        yield Finding("environment", Verdict.BAD, str(error), "JAX would not start in a worker")
        return
    if own:
        yield Finding(
            "environment",
            Verdict.NOTE,
            "the part of a GPU's memory is set by hand",
            "each worker takes that part, also one that has a share of the GPU",
            f"unset {_environment.MEMORY} XLA_PYTHON_CLIENT_MEM_FRACTION, and jaxguard sets it",
        )


def _unknown_to_jax(env: dict[str, str]) -> Iterator[Finding]:
    import jax

    known = {name.upper() for name in jax.config.values}
    for name in sorted(env):
        if name.startswith("JAX_") and name not in known and not _NOT_CONFIG.match(name):
            yield Finding(
                "environment",
                Verdict.NOTE,
                f"{name} is unknown to JAX {jax.__version__}",
                "misspelt, removed, or of another version: it has no effect",
                f"unset {name}",
            )


def _odd_ones(env: dict[str, str]) -> Iterator[Finding]:
    if env.get("XLA_FLAGS"):
        yield Finding(
            "environment",
            Verdict.NOTE,
            f"XLA_FLAGS={env['XLA_FLAGS']}",
            "each worker gets these flags too, and one that XLA does not know ends it",
            "unset XLA_FLAGS, or give it to one guard: env={'XLA_FLAGS': ...}",
        )
    if _caching.is_set_in(env):
        yield Finding(
            "environment",
            Verdict.NOTE,
            f"{' and '.join(name.upper() for name in _caching.is_set_in(env))} is set",
            "JAX's own cache is as you have set it up, or off; programs are not compiled once for all workers",
            "unset it, to share programs through jaxguard",
        )
    wanted = [f"{name}={env[name]}" for name in _environment.THREADS if env.get(name, "").isdecimal()]
    share = int(next(iter(_environment.thread_variables().values())))
    if any(int(word.partition("=")[2]) > share for word in wanted):
        yield Finding(
            "environment",
            Verdict.NOTE,
            f"{', '.join(wanted)}, and a slot's share of the cores is {share}",
            "all slots together start more threads than there are cores",
            f"unset {' '.join(word.partition('=')[0] for word in wanted)}, and jaxguard sets the share",
        )

"""Has JAX started here, and on what? Which program does it need? The one module that opens doors that are not public.

JAX "starts" when it creates its backends: it opens devices, takes memory and starts threads. Importing it, building
`jax.jit(f)` or changing `jax.config` does not. No public function tells without starting it.
"""

from __future__ import annotations

import inspect
import os
import sys
import types
from typing import Any

from . import _descriptors, errors

_LOOKS_FOR_PROGRAMS = "compile_or_get_cached"
"""The function of `jax._src.compiler` that looks for a program in JAX's cache."""
_FRAMES = 12

_forked_after_start = False


def started() -> bool:
    """Say whether JAX has started in this process, without starting it."""
    jax = sys.modules.get("jax")
    if jax is None:
        return False
    bridge = sys.modules.get("jax._src.xla_bridge")
    try:
        return bool(bridge.backends_are_initialized())  # type: ignore[union-attr]
    except AttributeError:
        return threads_of_xla() > 0


def threads_of_xla() -> int:
    """Count the threads that XLA started here, which a started JAX cannot hide: for the day the other door closes."""
    count = 0
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/comm", "rb") as file:
                count += file.read().lower().startswith((b"tf_", b"xla", b"pjrt", b"cuda"))
        except OSError:  # the thread ended meanwhile
            continue
    return count


def local_devices() -> list[Any]:
    """The devices on which JAX runs here; only asked once it has started, so asking starts nothing."""
    return list(sys.modules["jax"].local_devices()) if started() else []


def starters() -> str:
    """Name modules that have JAX arrays at their top level: most likely one of them started JAX at import."""
    jax = sys.modules.get("jax")
    if jax is None or not started():
        return ""
    found = []
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in {"jax", "jaxlib", "jaxguard"}:
            continue
        for variable, value in list(getattr(module, "__dict__", {}).items()):
            # As text: a class made by Cython may have a descriptor there.
            if str(type(value).__module__).startswith("jaxlib") and isinstance(value, jax.Array):
                found.append(f"{name}.{variable}")
                break
    return f" (arrays at the top level of a module start it: {', '.join(found[:3])})" if found else ""


def refuse_if_forked(what: str) -> None:
    """Raise in a process that was forked from one in which JAX had started.

    Raises:
        ForkedAfterJax: Such a process has JAX's locks but not its threads, and hangs at its next compilation.
    """
    if _forked_after_start:
        text = (
            f"{what} cannot be used in this process (pid {os.getpid()}): it was forked from pid {os.getppid()} after "
            "JAX had started there, and JAX would hang here. Start the processes another way (joblib's default "
            'backend "loky", multiprocessing\'s "spawn"), or put isolated_jax_worker on the function: it runs in a '
            "clean process even when it is called from here."
        )
        raise errors.ForkedAfterJax(text)


def program_in_need() -> tuple[str, Any] | None:
    """In a listener to JAX's events: the name of the cache entry that JAX is about to look for, and its module.

    JAX tells them to nobody. They are variables of the function that sends the event, a few frames up.
    """
    frame: types.FrameType | None = inspect.currentframe()
    for _ in range(_FRAMES):
        if frame is None:
            return None
        if frame.f_code.co_name == _LOOKS_FOR_PROGRAMS:
            name, module = (frame.f_locals.get(variable) for variable in ("cache_key", "computation"))
            return (name, module) if isinstance(name, str) else None
        frame = frame.f_back
    return None


def text_of(module: Any) -> str:
    """A module of StableHLO as text, without locations, and without what is in large constants."""
    return str(module.operation.get_asm(large_elements_limit=16))


def _after_fork_in_child() -> None:
    global _forked_after_start  # noqa: PLW0603 – a fact about this process
    _forked_after_start = _forked_after_start or started()


_descriptors.after_fork_in_child(_after_fork_in_child)

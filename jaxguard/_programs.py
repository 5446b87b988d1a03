"""What JAX compiles in a worker, counted through its public monitoring events.

Events are sent synchronously by the thread that compiles. Names of events are JAX's: see `jax.monitoring`.
"""

from __future__ import annotations

import threading
from typing import Any

_COMPILED = "/jax/core/compile/backend_compile_duration"
_HIT = "/jax/compilation_cache/cache_hits"
_SAVED = "/jax/compilation_cache/compile_time_saved_sec"


class Counts:
    """Compilations of this process since the last look."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reset()

    def _reset(self) -> None:
        self._compiles, self._compile_s, self._hits, self._saved_s = 0, 0.0, 0, 0.0

    def listen(self) -> None:
        """Start counting; before any user code, so that nothing is missed."""
        import jax.monitoring

        jax.monitoring.register_event_listener(self._event)
        jax.monitoring.register_event_duration_secs_listener(self._duration)

    def _event(self, event: str, **_: Any) -> None:
        if event == _HIT:
            with self._lock:
                self._hits += 1

    def _duration(self, event: str, duration_secs: float, **_: str | int) -> None:
        with self._lock:
            if event == _COMPILED:
                self._compiles += 1
                self._compile_s += duration_secs
            elif event == _SAVED:
                self._saved_s += max(0.0, duration_secs)

    def take(self) -> dict[str, float]:
        """The counts under the names that the trial's attribute has; then begin again from zero.

        JAX reports reading an executable from its cache as a compilation too: those are hits, not compilations.
        """
        with self._lock:
            counts = {
                "compiles": max(0, self._compiles - self._hits),
                "compile_s": round(self._compile_s, 4),
                "cache_hits": self._hits,
                "saved_s": round(self._saved_s, 4),
            }
            self._reset()
        return counts

"""The programs that JAX compiles or loads in this process, watched through its public monitoring events.

JAX sends an event in the thread that needs a program before it looks for it in its persistent cache, and another when
it has compiled or loaded it, or failed. Listeners are called synchronously, so whoever is told before may take the
time to put the program there. Names of events are JAX's, see `jax.monitoring`.

The key under which JAX stores a program is found at that moment (`_jax_state`). If that should fail one day, programs
have no key: they are still stored and found, only nobody waits for another who compiles the same one.
"""

from __future__ import annotations

import logging
import re
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from . import _entries, _jax_state, _phases

_REQUEST = "/jax/compilation_cache/compile_requests_use_cache"
_HIT = "/jax/compilation_cache/cache_hits"
_SAVED = "/jax/compilation_cache/compile_time_saved_sec"
_COMPILED = "/jax/core/compile/backend_compile_duration"
_DRESS = re.compile(r"^(jit|pjit|pmap)[_(]|\)$")

_WORTH_TELLING_S = 0.05

logger = logging.getLogger("jaxguard")


@dataclass(eq=False)
class Program:
    """One program that was compiled or loaded."""

    key: str | None = None
    function: str = ""
    hit: bool = False
    failed: bool = False
    compile_s: float = 0.0
    saved_s: float = 0.0
    waited_s: float = 0.0
    """How long it was waited for while another process compiled it."""
    asked: bool = False
    """Whether the store was asked for it."""
    fetched: bool = False
    """Whether it was put where JAX looks for it."""
    storable: bool = True
    """Whether nothing but its kind would keep JAX from storing it."""
    stored: bool = True
    """Whether JAX stores such a program."""
    module: Any = None
    """JAX's module, only as long as it is asked for."""
    text: str = ""
    """What the module says but for its constants, as a digest."""
    constants: list[str] = field(default_factory=list)
    behind: BaseException | None = None
    """What was being handled when the program was asked for: no failure of its own."""


@dataclass
class _Thread(threading.local):
    programs: list[Program] = field(default_factory=list)
    """Those on their way, the innermost last: to compile one may take another."""


class Watch:
    """Keeps a list of the programs of this process, and tells somebody before and after each."""

    def __init__(self) -> None:
        self.before: Callable[[Program], None] = lambda _: None
        self.after: Callable[[Program], None] = lambda _: None
        self._here = _Thread()
        self._lock = threading.Lock()
        self._done: list[Program] = []

    def listen(self) -> None:
        """Start watching; before any user code, so that nothing is missed."""
        import jax.monitoring

        jax.monitoring.register_event_listener(self._event)
        jax.monitoring.register_event_duration_secs_listener(self._duration)

    def take(self) -> list[Program]:
        """The programs since the last look."""
        with self._lock:
            done, self._done = self._done, []
        return done

    # ------------------------------------------------------------ what JAX calls

    def _event(self, event: str, **_: Any) -> None:
        here = self._here
        if event == _REQUEST:
            program = Program(behind=sys.exc_info()[1])
            if (found := _jax_state.program_in_need()) is not None:
                name, program.module = found
                program.key = _entries.key_of(name + _entries.SUFFIX)
                program.function = _DRESS.sub("", name.rpartition("-")[0])
            here.programs.append(program)
            began = time.monotonic()
            self._tell(self.before, program)
            program.waited_s = time.monotonic() - began
            program.module = None
            doing = _phases.LOADING if program.fetched else _phases.COMPILING
            _phases.program(id(program), program.function, program.key, doing)
        elif event == _HIT and here.programs:
            here.programs[-1].hit = True

    def _duration(self, event: str, duration_secs: float, **named: str | int) -> None:
        here = self._here
        if event == _SAVED and here.programs:
            here.programs[-1].saved_s = max(here.programs[-1].saved_s, duration_secs)
        if event != _COMPILED:
            return
        program = here.programs.pop() if here.programs else Program(behind=sys.exc_info()[1])
        program.function = _DRESS.sub("", str(named.get("fun_name") or program.function))
        error = sys.exc_info()[1]
        program.failed = error is not None and error is not program.behind
        program.behind = None
        if not program.hit:
            program.compile_s = max(0.0, duration_secs - program.waited_s)
        _phases.program_done(id(program))
        self._tell(self.after, program)
        with self._lock:
            self._done.append(program)

    @staticmethod
    def _tell(somebody: Callable[[Program], None], program: Program) -> None:
        """Let nothing of ours fail the user's step; what a signal handler of his raises goes on."""
        try:
            somebody(program)
        except (ValueError, LookupError, AttributeError):
            logger.debug("jaxguard: the store failed for %s", program.function, exc_info=True)


_LISTED = 16
"""How many programs of a trial are told one by one: those that took, or saved, most."""


def facts(programs: list[Program]) -> dict[str, Any]:
    """What a trial's attribute says of its programs."""
    rows: dict[tuple[str, str | None], dict[str, Any]] = {}
    for program in programs:
        name = program.function or "?"
        key = program.key[:16] if program.key else None
        row = rows.setdefault(
            (name, key),
            {"function": name, "key": key, "compiles": 0, "compile_s": 0.0, "cache_hits": 0, "saved_s": 0.0},
        )
        row["compiles"] += not program.hit
        row["cache_hits"] += program.hit
        row["compile_s"] = round(row["compile_s"] + program.compile_s, 4)
        row["saved_s"] = round(row["saved_s"] + (program.saved_s if program.hit else 0.0), 4)
        if program.waited_s > _WORTH_TELLING_S:
            row["waited_s"] = round(row.get("waited_s", 0.0) + program.waited_s, 4)
        if not program.stored:
            row["stored"] = False
        if program.text:
            row.update(text=program.text, constants=program.constants)
    listed = sorted(rows.values(), key=lambda row: -(row["compile_s"] + row["saved_s"]))
    counted = ("compiles", "compile_s", "cache_hits", "saved_s")
    rest = {name: round(sum(row[name] for row in listed[_LISTED:]), 4) for name in counted}
    return {
        "programs": listed[:_LISTED],
        **({"other_programs": {"programs": len(listed) - _LISTED, **rest}} if len(listed) > _LISTED else {}),
        "compiles": sum(not program.hit for program in programs),
        "compile_s": round(sum(program.compile_s for program in programs), 4),
        "cache_hits": sum(program.hit for program in programs),
        "saved_s": round(sum(program.saved_s for program in programs if program.hit), 4),
    }

"""One of many compiles, the others wait for it: a worker's side of the store.

Before JAX looks for a program in the worker's directory, it is fetched from the store; if it is not there, one worker
of all takes the flight and compiles it, and the others wait until it is published, side by side with what else they
do. A wait has a bound, and nobody who has a flight waits for another: so nobody waits for ever, and nobody in a circle.
"""

from __future__ import annotations

import logging
import threading
import time

from . import _descriptors, _entries, _linux, _phases, _store
from ._programs import Program

_LONGEST_WAIT_S = 1200.0
"""Longer than large programs take; a compiler that hangs is not told from a slow one."""
_SAY_SO_S = 30.0
_LONGEST_NAME = 150
"""Of a function, in bytes: JAX makes it part of a file's name, and fails to write one that is too long."""
_SHORTEST_POLL_S, _LONGEST_POLL_S = 0.005, 0.05

logger = logging.getLogger("jaxguard")


class Flights:
    """Puts each program where JAX looks for it, or lets JAX compile it for all."""

    def __init__(self, store: _store.Store, private: str) -> None:
        self._store = store
        self._private = private
        self._flights: dict[tuple[int, Program], int] = {}
        """Those that are under way, by thread and program."""
        self._lost: set[str] = set()

    def take_lost(self) -> list[str]:
        """What could not be kept since the last look, in words."""
        lost, self._lost = sorted(self._lost), set()
        return lost

    # ------------------------------------------------------------ for each program

    def before(self, program: Program) -> None:
        """Fetch a program, or become the one who compiles it, or wait for that one."""
        program.asked = True
        try:
            if program.key is None:
                self._store.fetch_all(self._private)
            elif not self._fetch(program) and not self._store.is_marked(program.key):
                self._take_flight(program, program.key)
        except OSError as error:
            if _linux.is_a_users(error):
                raise
            self._lost.add(error.strerror or str(error))

    def after(self, program: Program) -> None:
        """Publish what was compiled, and let the flight go."""
        try:
            if program.asked and not program.hit and not program.failed:
                self._keep(program)
        except _entries.Torn:
            self._lost.add("a program could not be written whole (is the disk full?)")
        except OSError as error:
            if _linux.is_a_users(error):
                raise
            self._lost.add(error.strerror or str(error))
        finally:
            self._let_go(program)

    def end_all(self) -> None:
        """Let go of what JAX has never told the end of: after a job nothing is compiled."""
        while self._flights:
            _descriptors.close(self._flights.popitem()[1])

    def _let_go(self, program: Program) -> None:
        if (flights := self._flights.get(_place(program))) is not None:
            self._store.end_flight(flights)  # first, and still known: whatever a user's signal handler interrupts
            _descriptors.close(self._flights.pop(_place(program)))

    def _fetch(self, program: Program) -> bool:
        seal = self._store.fetch(program.key or "", self._private)
        if seal is not None:
            program.fetched = True
            program.saved_s = float(seal.get("compile_s", 0.0))
            program.text, program.constants = str(seal.get("text", "")), list(seal.get("constants", []))
        return seal is not None

    def _take_flight(self, program: Program, key: str) -> None:
        busy = any(thread == threading.get_ident() for thread, _ in list(self._flights))
        taken = False
        try:
            flights = self._flights[_place(program)] = self._store.open_flights()
            taken = self._wait_for_turn(flights, program, key, busy=busy)
            taken = taken and not self._fetch(program)  # else the one before us has published it
        finally:
            if not taken:
                self._let_go(program)

    def _wait_for_turn(self, flights: int, program: Program, key: str, *, busy: bool) -> bool:
        """Wait until nobody else compiles a program; say whether it is to be compiled here, and nowhere else."""
        began, poll_s, said = time.monotonic(), _SHORTEST_POLL_S, False
        while not self._store.take_flight(flights, key):
            waited = time.monotonic() - began
            if busy:  # this thread compiles another one already: it waits for nobody
                return False
            if poll_s == _SHORTEST_POLL_S:
                _phases.program(id(program), program.function, key, _phases.WAITING)
            if waited > _LONGEST_WAIT_S:
                self._store.mark(key, f"was not compiled within {_LONGEST_WAIT_S:.0f} s")
                logger.warning(
                    "jaxguard: waited %.0f s for another worker to compile a program; compiling it here", waited
                )
                return False
            if waited > _SAY_SO_S and not said:
                said = True
                logger.warning(
                    "jaxguard: another worker compiles the same program (%s); waiting for it since %.0f s. "
                    "`jaxguard stacks` shows which",
                    program.function or "of a function without a name",
                    waited,
                )
            time.sleep(poll_s)
            if self._fetch(program):
                return False
            poll_s = min(_LONGEST_POLL_S, 1.5 * poll_s)
        return True

    def _keep(self, program: Program) -> None:
        key = program.key
        if key is None:
            self._store.publish_all(self._private)
            return
        if program.fetched:  # it was there, and JAX could not read it
            self._store.discard(key, self._private)
            return
        names = ("function", "compile_s", "text", "constants")
        if not self._store.publish(key, self._private, **{name: getattr(program, name) for name in names}):
            program.stored = False
            if program.storable and len(program.function.encode()) < _LONGEST_NAME:
                _entries.check_writable(self._private)
                self._store.mark(key, "JAX does not store it")


def _place(program: Program) -> tuple[int, Program]:
    return threading.get_ident(), program

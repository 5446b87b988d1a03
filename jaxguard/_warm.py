"""Warm workers (`reuse=True`): idle ones wait here for the next call of this process, whichever thread makes it.

An idle worker keeps its slot. It is retired when another process waits for the slot, when a thread of this process
waits that cannot use this worker, when it was idle for some seconds, and when the program ends. A thread looks after
the idle ones; it exists only while there are any.
"""

from __future__ import annotations

import atexit
import select
import threading
import time
from collections.abc import Hashable

from . import _descriptors, _interrupts
from ._dialogue import Worker

_IDLE_S = 5.0
_OTHERS_FIRST_S = 0.2
"""How long a thread of this process that waits gets to take a worker before it is retired in its favour."""
_LOOK_S = 0.1
_RETIRE_S = 40.0


class _House:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[Worker] = []
        self._keeper: threading.Thread | None = None
        self._leaving: list[threading.Thread] = []
        self._registered = False

    def keep(self, worker: Worker) -> None:
        """Take in a worker whose call is over."""
        if worker.ended:
            worker.close()
            worker.lease.close()
            return
        if not worker.trusted or worker.lease.foreign_waiters():
            worker.retire()
            return
        worker.idle_since = time.monotonic()
        worker.lease.tell(phase="warm")
        with self._lock:
            self._idle.append(worker)
            if not self._registered:
                self._registered = True
                atexit.register(retire_all)
            if self._keeper is None:
                self._keeper = threading.Thread(target=self._look_after, name="jaxguard-warm", daemon=True)
                self._keeper.start()
        _interrupts.wake_all()

    def take(self, key: Hashable) -> Worker | None:
        """Give the worker that was used last, if one fits; one that died while idle is let go of."""
        while True:
            with self._lock:
                worker = next((worker for worker in reversed(self._idle) if worker.key == key), None)
                if worker is None:
                    return None
                self._idle.remove(worker)
            worker.drain()  # without the lock: it writes to the user's streams
            if worker.is_dead():  # its keeper has not said so yet
                worker.end_now()
            if not worker.ended:
                return worker
            worker.close()
            worker.lease.close()

    def retire_all(self) -> None:
        with self._lock:
            out, self._idle = self._idle, []
        self._retire(out)
        until = time.monotonic() + _RETIRE_S
        for thread in list(self._leaving):
            thread.join(max(0.0, until - time.monotonic()))

    def _retire(self, workers: list[Worker]) -> None:
        # Each in a thread of its own: one that is slow to end must not keep the others' slots.
        self._leaving = [thread for thread in self._leaving if thread.is_alive()]
        for worker in workers:
            thread = threading.Thread(target=worker.retire, name="jaxguard-retire", daemon=True)
            self._leaving.append(thread)
            thread.start()

    def _look_after(self) -> None:
        while True:
            with self._lock:
                now = time.monotonic()
                out = [worker for worker in self._idle if self._shall_go(worker, now)]
                for worker in out:
                    self._idle.remove(worker)
                if not self._idle and not out:
                    self._keeper = None
                    return
                poll = select.poll()
                for worker in self._idle:
                    for descriptor in (*worker.descriptors, *worker.lease.doorbells):
                        poll.register(descriptor, select.POLLIN)
            self._retire(out)
            # A worker that was taken meanwhile has its descriptors in there too: one look too many does no harm.
            if poll.poll(1000 * _LOOK_S):
                self._drain()

    def _drain(self) -> None:
        """Pass on what idle workers print. Nobody can take them meanwhile, and whoever wanted to is woken."""
        with self._lock:
            workers, self._idle = self._idle, []
        for worker in workers:
            worker.drain()
        with self._lock:
            self._idle += workers
        _interrupts.wake_all()

    @staticmethod
    def _shall_go(worker: Worker, now: float) -> bool:
        idle_s = now - worker.idle_since
        if worker.ended or idle_s > _IDLE_S or worker.lease.foreign_waiters():
            return True
        return idle_s > _OTHERS_FIRST_S and worker.lease.anybody_waits()


_house = _House()


def keep(worker: Worker) -> None:
    """Take in a worker whose call is over: for the next call, or to be ended."""
    _house.keep(worker)


def take(key: Hashable) -> Worker | None:
    """Give an idle worker that fits, if there is one."""
    return _house.take(key)


def retire_all() -> None:
    """End all idle workers of this process the normal way."""
    _house.retire_all()


def _after_fork_in_child() -> None:
    global _house  # noqa: PLW0603 – the workers are the parent's
    _house = _House()


_descriptors.after_fork_in_child(_after_fork_in_child)

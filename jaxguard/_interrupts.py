"""Ctrl-C and SIGTERM: end the workers, let their trials be told, then do what would have happened.

Each guarded call is registered here while it runs. The handler stands in front of the one that was there: it ends the
workers, waits up to 2 s until their trials are finished (so that none stays RUNNING in a storage for ever), and then
delegates. The calls raise KeyboardInterrupt, which `catch=(Exception,)` of a study cannot swallow.

Python installs handlers from the main thread only. A study's thread asks the main thread by a pending call, and nudges
it out of a system call. Source: Python/C API, `Py_AddPendingCall`.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from . import _descriptors, _linux, _trials, _whereabouts, errors

logger = logging.getLogger("jaxguard")

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_FINISH_S = 2.0
_NUDGE_EVERY_S, _GIVE_UP_S = 0.05, 1.0
_numbers = itertools.count()


class Call:
    """A guarded call under way: what must be ended, and how it is told."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.id = f"{os.getpid()}.{next(_numbers)}"
        self.thread = threading.get_ident()
        self.roots = _trials.Roots(self.id)
        self.end_worker: Callable[[], None] | None = None
        self.wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._signal: str | None = None

    def interrupt(self, name: str) -> None:
        """End the call, wherever it is: waiting for a slot, or for its worker."""
        self._signal = name
        self.ring()
        if self.end_worker is not None:
            self.end_worker()

    def ring(self) -> None:
        """Let the call look again, if it waits for a slot. Callable from anywhere."""
        with _descriptors.creating():  # not while it is closed: its number may be a stranger's file a moment later
            if self.wake >= 0:
                os.eventfd_write(self.wake, 1)

    def close(self) -> None:
        """The call is over."""
        with _descriptors.creating():
            wake, self.wake = self.wake, -1
            _descriptors.close(wake)

    def interrupted(self) -> BaseException | None:
        """What the call shall raise, once it was interrupted."""
        return None if self._signal is None else KeyboardInterrupt(f"{self.name} was ended by {self._signal}")

    def check(self) -> None:
        """Raise if the call was interrupted."""
        if (error := self.interrupted()) is not None:
            raise error

    def fail_trials(self) -> None:
        """Tell the trials that the call is for as failed."""
        for trial in filter(_unfinished, self.roots.trials):
            try:
                trial.study.tell(trial, state=sys.modules["optuna"].trial.TrialState.FAIL)
            except Exception:
                logger.warning("jaxguard: trial %s could not be told as failed", trial.number, exc_info=True)

    def at_work(self) -> bool:
        """Say whether the call, or the trial it is for, is still to be finished."""
        if self.id not in _active:
            return any(map(_unfinished, self.roots.trials))
        return True


def _unfinished(trial: Any) -> bool:
    try:
        return not trial.study.get_trials(deepcopy=False)[trial.number].state.is_finished()
    except Exception:  # noqa: BLE001 – a storage that is out of reach finishes nothing
        return False


_active: dict[str, Call] = {}
_previous: dict[int, list[Any]] = {number: [] for number in _SIGNALS}
"""What stood before, the first one first: a program may put its own handler in front of ours, which calls ours."""
_depth = 0
_stopping: str | None = None
_install_lock = threading.Lock()


@contextmanager
def call(name: str) -> Iterator[Call]:
    """A call that signals can end, for the duration of the block."""
    if _stopping is not None:
        text = f"{name} was not begun: this process is told to end by {_stopping}"
        raise KeyboardInterrupt(text)
    here = threading.get_ident()
    if any(other.thread == here for other in list(_active.values())):
        text = (
            f"{name} was called while this thread is in a guarded call: by a signal handler or a finalizer that "
            "interrupted it, whose slot it could wait for. Call it from another thread, or later."
        )
        raise errors.JaxguardError(text)
    _have_handlers()
    _whereabouts.answer_here(_whereabouts.PARENT)
    with _descriptors.creating():
        running = Call(name)
        _descriptors.own(running.wake)
    _active[running.id] = running
    try:
        yield running
    except (Exception, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException:  # a signal handler of the user's that leaves by sys.exit: a study takes no notice of that
        running.fail_trials()
        raise
    finally:
        _active.pop(running.id, None)
        running.close()
        if not _active and threading.current_thread() is threading.main_thread():
            _uninstall()


def wake_all() -> None:
    """Let every waiting call look again: a warm worker has come free."""
    for running in list(_active.values()):
        running.ring()


# ---------------------------------------------------------------- the handler


def _on_signal(number: int, frame: FrameType | None) -> None:
    global _stopping, _depth  # noqa: PLW0603 – facts about this process
    stood = _previous[number]
    before = stood[-1 - _depth] if _depth < len(stood) else signal.SIG_DFL
    if before == signal.SIG_IGN:
        return
    name = signal.Signals(number).name
    main = threading.main_thread().ident
    calls = list(_active.values())
    if number == signal.SIGTERM:
        _stopping = name
    for running in calls:
        # Ctrl-C in the main thread is delivered by the handler before us, as KeyboardInterrupt where it happens.
        if number == signal.SIGTERM or running.thread != main:
            running.interrupt(name)
    if callable(before):
        _wait_for([running for running in calls if running.thread != main])
        _stopping = None  # a handler that returns has decided that the process goes on
        _depth += 1
        try:
            before(number, frame)
        finally:
            _depth -= 1
        return
    if all(running.thread != main for running in calls):
        # The main thread waits for others (`n_jobs` > 1): it must not come back from there as if all were well.
        _end_by(number, calls)
        return
    # The default: this process ends. Not from here: the main thread must be free to finish its own trial. And not
    # daemonic: a main thread that reaches its end first must still be ended by the signal.
    threading.Thread(target=_end_by, args=(number, calls), name="jaxguard-end", daemon=False).start()


def _wait_for(calls: list[Call]) -> None:
    until = time.monotonic() + _FINISH_S
    while time.monotonic() < until and any(running.at_work() for running in calls):
        time.sleep(0.002)


def _end_by(number: int, calls: list[Call]) -> None:
    _wait_for(calls)
    _linux.set_handler(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


# ---------------------------------------------------------------- installing it


def _installed() -> bool:
    # None: a handler that was not installed from Python; nothing can be delegated to it, so it stays.
    return all(signal.getsignal(number) in {_on_signal, None} for number in _SIGNALS)


def _install() -> None:
    for number in _SIGNALS:
        before = signal.getsignal(number)
        if before not in {_on_signal, None}:
            _previous[number].append(before)
            signal.signal(number, _on_signal)


def _uninstall() -> None:
    """Let the handlers that were there before stand alone again.

    A process that is idle must end at once by SIGTERM where that is the default: a handler in Python runs only when the
    main thread comes back to Python, and a pool's worker that has just gone to wait for work may never do so.
    """
    for number in _SIGNALS:
        if signal.getsignal(number) is _on_signal:
            signal.signal(number, _previous[number][-1])
            _previous[number].pop()  # after that: a user's time limit may come between


def _have_handlers() -> None:
    """Stand in front of the handlers that are there now: notebooks and frameworks change theirs at any time."""
    if _installed():
        return
    if threading.current_thread() is threading.main_thread():
        _install()
        return
    with _install_lock:
        if not _installed():
            _ask_the_main_thread()


_pending: list[Any] = []
"""Keeps the callback alive: a main thread that sits in native code may run it much later."""


def _ask_the_main_thread() -> None:
    done = threading.Event()

    def run(_: object) -> int:
        try:
            _install()
        finally:
            done.set()
        return 0

    callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(run)
    _pending.append(callback)
    ctypes.pythonapi.Py_AddPendingCall(callback, None)
    until = time.monotonic() + _GIVE_UP_S
    while not done.wait(_NUDGE_EVERY_S) and time.monotonic() < until:
        _nudge_the_main_thread()  # again: a signal that comes just before the main thread goes to sleep is lost


def _nudge_the_main_thread() -> None:
    """Have the main thread come out of a wait for a lock, and look."""
    if signal.getsignal(signal.SIGURG) == signal.SIG_DFL:
        # A signal that is ignored interrupts no system call: give it a handler that does nothing (`abs`).
        libc = _linux.libc()
        _linux.set_handler(signal.SIGURG, libc.abs)
        libc.siginterrupt(signal.SIGURG, 1)
    ident = threading.main_thread().ident
    if ident is not None:
        signal.pthread_kill(ident, signal.SIGURG)


def _after_fork_in_child() -> None:
    global _install_lock, _stopping
    _active.clear()
    _uninstall()
    _install_lock, _stopping = threading.Lock(), None


_descriptors.after_fork_in_child(_after_fork_in_child)

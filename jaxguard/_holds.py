"""Holds: what this thread, or this process, already has, so that nobody ever waits for an ancestor.

A hold belongs to the thread that opened it; in a worker it belongs to the whole process. Inside one, a guarded call
uses what is there. A *child process* of a holder is told by JAXGUARD_HOLD in its environment, which carries the word
of the lease: as long as a beacon with that word shines, waiting there would be waiting for an ancestor.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from . import _beacons, _descriptors, _settings, errors
from ._gpus import Device

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Hold:
    """A slot that is held here."""

    gpus: float
    """How many devices JAX sees in it, or the share of one."""
    nonce: str
    """The word of its lease."""
    devices: tuple[Device, ...]
    slot: Any = None
    """What `gpu_slot` gave."""
    call: Callable[..., Any] | None = None
    """How to run a function in this hold; None runs it in this process."""


_here = threading.local()
_process: list[Hold] = []
_dropped: list[threading.local] = []
"""In a forked child, the parent's: kept, so that its open blocks are not ended by being forgotten."""


def current() -> Hold | None:
    """The innermost hold of this thread, else that of the process."""
    stack: list[Hold] = getattr(_here, "stack", [])
    return stack[-1] if stack else _process[-1] if _process else None


@contextmanager
def opened(hold: Hold) -> Iterator[None]:
    """This thread has a hold for the duration of the block."""
    stack: list[Hold] = _here.__dict__.setdefault("stack", [])
    stack.append(hold)
    try:
        yield
    finally:
        # By identity and wherever it is: two `with` blocks may end in another order than they began (ExitStack).
        for index in range(len(stack) - 1, -1, -1):
            if stack[index] is hold:
                del stack[index]
                break


def enter(guard: object, opened: AbstractContextManager[T]) -> T:
    """Enter what a guard opened for a `with`, on this thread's own list: a guard itself keeps nothing."""
    entered: list[Any] = _here.__dict__.setdefault("entered", [])
    entry = guard, opened
    value = opened.__enter__()
    try:
        entered.append(entry)
    except BaseException as error:  # a user's time limit: then the `with` has not begun, and will not end it
        entered[:] = [other for other in entered if other is not entry]
        opened.__exit__(type(error), error, error.__traceback__)
        raise
    return value


def leave(guard: object, *exception: Any) -> bool | None:
    """Leave what `enter` entered last for this guard.

    Raises:
        RuntimeError: If another thread entered it.
    """
    entered: list[tuple[object, AbstractContextManager[Any]]] = getattr(_here, "entered", [])
    for index in range(len(entered) - 1, -1, -1):
        if entered[index][0] is guard:
            return entered.pop(index)[1].__exit__(*exception)
    if any(guard is other for before in _dropped for other, _ in before.__dict__.get("entered", ())):
        return None  # a forked child comes to the end of a block of its parent, whose hold it does not have
    raise RuntimeError("this block was entered by another thread: a hold belongs to the thread that opened it")


def opened_for_process(hold: Hold) -> None:
    """This process is a worker: all its threads share the hold, until it ends."""
    _process.append(hold)
    os.environ[_settings.HOLD] = hold.nonce


@contextmanager
def importing(name: str) -> Iterator[None]:
    """This worker is importing the module of its function."""
    _here.importing = name
    try:
        yield
    finally:
        del _here.importing


def refuse_while_importing(name: str) -> None:
    """Raise if a guarded call is made by the import of a guarded function's own module.

    Raises:
        JaxguardError: Each worker would run the whole program again.
    """
    function = getattr(_here, "importing", None)
    if function is not None:
        text = (
            f"{name} was called while a worker (pid {os.getpid()}) imports the module of {function}: that module runs "
            "its study when it is imported, so each worker would run it again. Put that part into a function, or under "
            'if __name__ == "__main__":'
        )
        raise errors.JaxguardError(text)


def refuse_under_ancestor(name: str) -> None:
    """Raise if an ancestor process holds a slot for this one.

    Raises:
        JaxguardError: Waiting here for a slot could be waiting for that ancestor, for ever.
    """
    word = os.environ.get(_settings.HOLD)
    if not word:
        return
    holder = next((beacon for beacon in _beacons.seen() if beacon.nonce == word), None)
    if holder is not None and holder.pid == os.getpid():
        return  # another thread of this process holds it: not an ancestor, it ends by itself
    if holder is not None:
        text = (
            f"{name} was called in a child process (pid {os.getpid()}) of a trial or gpu_slot block that holds a slot "
            f"(lit by pid {holder.pid}): it would wait for its own ancestor. Call it outside of the trial, or call the "
            "unguarded function here (jaxguard keeps it as __wrapped__)."
        )
        raise errors.JaxguardError(text)


def refuse_more(hold: Hold, name: str, gpus: float) -> None:
    """Raise if a nested call asks for more devices than its hold has."""
    if gpus > max(1, hold.gpus):
        text = (
            f"{name} asks for gpus={gpus:g} inside a hold that has gpus={hold.gpus:g}: it would wait for its own "
            "ancestor. Ask for the larger number outside, or for no more than that inside."
        )
        raise errors.JaxguardError(text)


def _after_fork_in_child() -> None:
    global _here  # noqa: PLW0603 – a child holds nothing: its copies of the descriptors are closed
    _dropped.append(_here)
    _here = threading.local()
    _process.clear()


_descriptors.after_fork_in_child(_after_fork_in_child)

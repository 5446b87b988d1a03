"""Descriptors that a forked child must not keep.

A lease is a descriptor, and so is the line to a worker: a child forked by the user's program (a pool, a data loader)
that kept a copy would keep the slot, or delay the end-of-file by which a death is noticed. So the descriptors that
matter are registered here, and closed in every child that `os.fork` makes. (`subprocess` and `os.system` do not pass
here: what they start loses the descriptors at exec.)

One lock goes around registering, closing and forking, so that the register and the descriptors always agree. It is the
innermost lock of all: nothing is called, logged or waited for under it.
"""

from __future__ import annotations

import os
import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from . import _linux

_owned: set[int] = set()
_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
"""Owned sockets: in a child these objects must not close their number once more, which is another file's by then."""
_lock = threading.RLock()
_forgetters: list[Callable[[], None]] = []


@contextmanager
def creating() -> Iterator[None]:
    """No fork happens inside: open descriptors and `own` them in here, and no child slips between."""
    with _lock:
        yield


def own(*descriptors: int) -> None:
    """From now on, close these in every forked child."""
    with _lock:
        _owned.update(descriptors)


def own_socket(connection: socket.socket) -> None:
    """The same for a socket."""
    with _lock:
        _owned.add(connection.fileno())
        _sockets.add(connection)


def disown(*descriptors: int) -> None:
    """Somebody else closes these, inside the same `creating` block."""
    with _lock:
        _owned.difference_update(descriptors)


def close(*descriptors: int) -> None:
    """Close descriptors, owned or not."""
    with _lock:
        for descriptor in descriptors:
            _owned.discard(descriptor)
            try:
                os.close(descriptor)
            except OSError as error:  # closed by a fork's clean-up, or by a user who closes everything
                if _linux.is_a_users(error):
                    raise


def close_socket(connection: socket.socket) -> None:
    """Close a socket whose descriptor may be owned."""
    descriptor = connection.detach()
    if descriptor >= 0:
        close(descriptor)


def without_inheritance(descriptors: list[int]) -> list[int]:
    """Mark descriptors that came over a socket or through exec: none of them outlives another exec."""
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    return descriptors


def after_fork_in_child(forget: Callable[[], None]) -> None:
    """Call `forget` in every forked child, after the owned descriptors were closed."""
    _forgetters.append(forget)


def _after_fork_in_child() -> None:
    global _lock  # noqa: PLW0603 – the old lock is held by a thread that does not exist here
    for descriptor in _owned:
        try:
            os.close(descriptor)
        except OSError:
            pass
    for connection in _sockets:
        connection.detach()
    _owned.clear()
    _sockets.clear()
    _lock = threading.RLock()
    for forget in _forgetters:
        forget()


os.register_at_fork(
    before=lambda: _lock.acquire(),  # noqa: PLW0108 – the lock of that moment: a child makes its own
    after_in_parent=lambda: _lock.release(),  # noqa: PLW0108 – as above
    after_in_child=_after_fork_in_child,
)

"""Leases: the locks that make a slot exclusive.

A device is held by whoever holds a lock on its range of `/dev/null`: an open-file-description lock, which belongs to a
descriptor and not to a process. Nobody can unlink that inode, all users of the host meet there, the lock travels with
its descriptor to keeper and worker, and the kernel frees it when the last of them ends, however they end.

A lease is that descriptor with a beacon for each device. Source: fcntl(2), "Open file description locks".
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable

from . import _beacons, _descriptors, _linux
from ._devices import Device

UNITS = 840
"""Length of a device's range: halves to eighths of it are whole."""
_SPACING = 1 << 12
_WAITING = 2048
"""Offset, behind a line's range, of the mark that somebody waits in it."""


def open_locks() -> int:
    """A fresh open file description on which ranges can be locked; close it to let all of them go."""
    with _descriptors.creating():
        descriptor = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        _descriptors.own(descriptor)
    return descriptor


def start_of(name: str) -> int:
    """Where the range of a device, or the mark of a line, begins."""
    return _beacons.place(name) * _SPACING


def mark_waiting(descriptor: int, lines: Iterable[str]) -> None:
    """Let newcomers see that somebody waits in these lines."""
    for line in lines:
        _linux.lock_range(descriptor, start_of(line) + _WAITING, 1, shared=True)


def somebody_waits(descriptor: int, lines: Iterable[str]) -> bool:
    """Say whether somebody may be waiting in one of these lines."""
    return any(_linux.range_is_locked(descriptor, start_of(line) + _WAITING, 1) for line in lines)


class Lease:
    """Devices held by this process, and by every process that was given the descriptors."""

    def __init__(self, devices: tuple[Device, ...], locks: int) -> None:
        self.devices = devices
        self.nonce: str = _beacons.nonce()
        self.waited_s: float = 0.0
        self._owner = os.getpid()
        self._locks = locks
        self._beacons: list[socket.socket] = []
        self._connections: list[socket.socket] = []
        try:
            for device in devices:
                self._beacons.append(_beacons.light(_beacons.HOLDER, device.lock, 0, self.nonce))
        except BaseException:
            self.close()
            raise

    @property
    def closed(self) -> bool:
        return self._locks < 0

    @property
    def descriptors(self) -> list[int]:
        """What another process needs to hold the lease too."""
        return [self._locks, *self.doorbells]

    @property
    def doorbells(self) -> list[int]:
        """What becomes readable when somebody begins to wait for this lease to end."""
        return [beacon.fileno() for beacon in self._beacons]

    def foreign_waiters(self) -> bool:
        """Say whether another process is connected to a beacon of this lease, waiting for it to end."""
        return any(peer.pid != os.getpid() for peer in self._waiters())

    def anybody_waits(self) -> bool:
        """Say whether anybody, a thread of this process too, is waiting for this lease to end."""
        return bool(self._waiters())

    def _waiters(self) -> list[_linux.Peer]:
        for beacon in self._beacons:
            while True:
                try:
                    connection, _ = beacon.accept()
                except OSError:  # nobody else is at the door
                    break
                connection.setblocking(False)
                _descriptors.own(connection.fileno())
                self._connections.append(connection)
        still = []
        for connection in self._connections:
            if _beacons.hung_up(connection):
                _descriptors.close_socket(connection)
            else:
                still.append(connection)
        self._connections = still
        return [_linux.peer(connection) for connection in still]

    def __del__(self) -> None:
        """A lease that nobody has any more (an exception came between two steps) must not keep its devices."""
        if "_connections" in self.__dict__:
            self.close()

    def close(self) -> None:
        """Give this process's hold up. The lock goes first: whoever is woken by a beacon finds the device free."""
        if os.getpid() != self._owner:  # a forked child's copies were closed when it began
            return
        if self._locks >= 0:
            _descriptors.close(self._locks)
            self._locks = -1
        for open_socket in (*self._beacons, *self._connections):
            _descriptors.close_socket(open_socket)
        self._beacons, self._connections = [], []


def try_take(candidates: tuple[Device, ...], take: int) -> Lease | None:
    """Lock `take` of the candidates if so many are free: all or nothing, without waiting."""
    locks = open_locks()
    taken: list[Device] = []
    try:
        for device in candidates:
            if _linux.lock_range(locks, start_of(device.lock), UNITS):
                taken.append(device)
                if len(taken) == take:
                    lease = Lease(tuple(taken), locks)
                    locks = -1
                    return lease
        return None
    finally:
        if locks >= 0:
            _descriptors.close(locks)

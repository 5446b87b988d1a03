"""Leases: devices, or shares of them, that are held.

A lease is a descriptor with locks on the units that it holds (`_locks`), a beacon for each device, and a record for its
own user. It travels to keeper and worker by its descriptors, and ends with the last of them.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from typing import Any

from . import _beacons, _descriptors, _linux, _locks, _records, _tenants
from ._gpus import Device
from ._shares import UNITS

_TOLD = 16
"""Of how many devices a record tells at most."""


class Lease:
    """Devices held by this process, and by every process that was given the descriptors."""

    def __init__(self, devices: tuple[Device, ...], locks: int, units: int = UNITS, offset: int = 0) -> None:
        self.devices = devices
        self.units = units
        self.offset = offset
        """At which unit of the first device its share begins."""
        self.nonce: str = _beacons.nonce()
        self.waited_s: float = 0.0
        self.gpus: float = len(devices)
        """How many devices JAX sees in it, or the share of one, as a guard was told."""
        self._owner = os.getpid()
        self._locks = locks
        self._record: _records.Record | None = None
        self._beacons: list[socket.socket] = []
        self._at_rest: list[socket.socket] = []
        self._connections: list[socket.socket] = []
        try:
            for device in devices:
                self._beacons.append(_beacons.light(_beacons.HOLDER, device.lock, units, self.nonce))
        except BaseException:
            self.close()
            raise

    @property
    def closed(self) -> bool:
        return self._locks < 0

    @property
    def share(self) -> float:
        """The part of each device."""
        return self.units / UNITS

    @property
    def descriptors(self) -> list[int]:
        """What another process needs to hold the lease too."""
        return [self._locks, *self.doorbells]

    @property
    def doorbells(self) -> list[int]:
        """What becomes readable when somebody begins to wait for this lease to end."""
        return [beacon.fileno() for beacon in self._beacons]

    def tell(self, **facts: Any) -> None:
        """Say to this user what the lease is for."""
        if self._record is None:
            devices = [device.id for device in self.devices[:_TOLD]]
            self._record = _records.Record(self.nonce, {"devices": devices, **facts})
        else:
            self._record.tell(**facts)

    def rest(self) -> None:
        """Say to all that nothing runs under this lease, which nevertheless cannot be let go."""
        self.tell(phase="idle")
        for device in self.devices if not self._at_rest else ():
            self._at_rest.append(_beacons.light(_beacons.IDLE, device.lock, self.units, self.nonce))

    def resume(self) -> None:
        """Something runs under it again."""
        self.waited_s = 0.0
        while self._at_rest:
            _descriptors.close_socket(self._at_rest.pop())

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
                except OSError as error:  # nobody else is at the door
                    if _linux.is_a_users(error):
                        raise
                    break
                connection.setblocking(False)
                _descriptors.own_socket(connection)
                self._connections.append(connection)
        still = []
        for connection in self._connections:
            if _beacons.hung_up(connection):
                _descriptors.close_socket(connection)
            else:
                still.append(connection)
        self._connections = still
        return [_linux.peer(connection) for connection in still]

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """A lease that nobody has any more (an exception came between two steps) must not keep its devices."""
        if "_connections" in self.__dict__ and not is_finalizing():  # then modules are empty, and the kernel does it
            self.close()

    def close(self) -> None:
        """Give this process's hold up. The lock goes first: whoever is woken by a beacon finds the device free."""
        if os.getpid() != self._owner:  # a forked child's copies were closed when it began
            return
        if self._locks >= 0:
            _descriptors.close(self._locks)
            self._locks = -1
        for open_socket in (*self._beacons, *self._at_rest, *self._connections):
            _descriptors.close_socket(open_socket)
        self._beacons, self._at_rest, self._connections = [], [], []
        if self._record is not None:
            self._record.close()
            self._record = None


def try_take(
    candidates: tuple[Device, ...], take: int, units: int = UNITS, *, for_this_process: bool = False
) -> Lease | None:
    """Lock units of `take` of the candidates if so many are free: all or nothing, without waiting.

    A device on which others compute without right counts as taken. Shares go where most is free.
    """
    locks = _locks.open_locks()
    taken: list[Device] = []
    offset = 0
    try:
        if units < UNITS:
            candidates = _emptiest_first(locks, candidates)
        if take > 1:  # look first: nobody finds a device locked for a moment by a request that cannot be served
            candidates = tuple(device for device in candidates if not _locks.units_held(locks, device.lock))
            if len(candidates) < take:
                return None
        for device in candidates:
            pieces = _locks.lock_units(locks, device.lock, units)
            if not pieces:
                continue
            if _tenants.keep_off(device, for_this_process=for_this_process):
                _locks.unlock_units(locks, device.lock, pieces)
                continue
            offset = offset if taken else pieces[0][0]
            taken.append(device)
            if len(taken) == take:
                _locks.mark_protocol(locks)
                lease = Lease(tuple(taken), locks, units, offset)
                locks = -1
                return lease
        return None
    finally:
        if locks >= 0:
            _descriptors.close(locks)


def _emptiest_first(locks: int, candidates: tuple[Device, ...]) -> tuple[Device, ...]:
    return tuple(sorted(candidates, key=lambda device: _locks.units_held(locks, device.lock)))

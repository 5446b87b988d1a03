"""Beacons: listening abstract Unix sockets that say who holds and who waits.

A beacon is proof of life (the kernel removes it with the last process that has it), a wake-up (whoever is connected
sees the connection hang up at that moment), and a record: its name carries the protocol, what it is about, and who
lit it. `SO_PEERCRED` proves the process id. All this is information: only the range locks of `_leases` decide.
Anybody can light a beacon, so names are read strictly and believed in nothing that matters.

Abstract sockets belong to a network namespace: whoever waits must also look at the locks now and then.

    jaxguard/<protocol>/<h, i or w>/<place>/<number>/<pid>/<since>/<nonce>

The number is a waiter's ticket (when it came, in ns of the monotonic clock), or the units that a holder has.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import socket
import time
from dataclasses import dataclass

from . import _descriptors, _linux

PROTOCOL = 1
HOLDER, IDLE, WAITER = "h", "i", "w"
"""A holder; beside it, one that runs nothing and still cannot let go; one who waits."""
_LISTENING = b"00010000"  # the flag __SO_ACCEPTCON of /proc/net/unix
_NAME = re.compile(
    rf"jaxguard/{PROTOCOL}/([hiw])/([0-9a-f]{{12}})/(\d{{1,20}})/(\d{{1,10}})/(\d{{1,12}})/([0-9a-f]{{12}})"
)
_BACKLOG = 4096
"""As many may have connected that nobody has accepted: a holder that runs its user's code accepts none."""


def place(name: str) -> int:
    """A number of 48 bits for a device or a line: where it lies among the locks, and its word in beacons' names."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big")


def nonce() -> str:
    """A word that no other holder or waiter has."""
    return secrets.token_hex(6)


def light(kind: str, about: str, number: int, word: str) -> socket.socket:
    """Light a beacon about a device or a line; it shines until all copies of the socket are closed."""
    with _descriptors.creating():
        beacon = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        _descriptors.own_socket(beacon)
    name = f"jaxguard/{PROTOCOL}/{kind}/{place(about):012x}/{number}/{os.getpid()}/{int(time.time())}/{word}"
    beacon.bind(f"\0{name}")
    beacon.listen(_BACKLOG)
    return beacon


@dataclass(frozen=True, slots=True)
class Sighting:
    """A beacon that was seen, as its name tells."""

    name: str
    kind: str
    place: int
    number: int
    pid: int
    since: int
    nonce: str

    def connect(self) -> socket.socket | None:
        """Connect to the beacon, to see it hang up; None if it is gone or its queue is full."""
        try:
            with _descriptors.creating():
                line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
                _descriptors.own_socket(line)
        except OSError as error:  # no descriptor is left: the locks decide without
            if _linux.is_a_users(error):
                raise
            return None
        try:
            line.connect(f"\0{self.name}")
        except OSError as error:
            _descriptors.close_socket(line)
            if _linux.is_a_users(error):
                raise
            return None
        return line

    def proved(self) -> _linux.Peer | None:
        """Ask the kernel who lit the beacon; None if it is gone."""
        line = self.connect()
        if line is None:
            return None
        try:
            return _linux.peer(line)
        finally:
            _descriptors.close_socket(line)


def hung_up(connection: socket.socket) -> bool:
    """Say whether the other end of a connection to a beacon is gone; whoever sends anything over one is no beacon."""
    try:
        connection.recv(1)
    except BlockingIOError:
        return False
    except OSError as error:
        if _linux.is_a_users(error):
            raise
    return True


def seen() -> list[Sighting]:
    """All beacons that shine in this network namespace, in the order of their tickets."""
    found = []
    with open("/proc/net/unix", "rb") as table:
        for row in table:
            start = row.find(b"@jaxguard/")
            if start < 0 or row.split()[3] != _LISTENING:
                continue
            match = _NAME.fullmatch(row[start + 1 :].strip().decode("ascii", "replace"))
            if match:
                kind, where, number, pid, since, word = match.groups()
                found.append(Sighting(match[0], kind, int(where, 16), int(number), int(pid), int(since), word))
    return sorted(found, key=lambda beacon: (beacon.number, beacon.nonce))

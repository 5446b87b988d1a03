"""The line: first come, first served among all requests of the host whose devices overlap.

Whoever must wait lights a beacon in the line of each device it could use, with the time of its arrival as the ticket.
Who has nobody ahead tries the locks and watches the holders' beacons; who has somebody ahead watches the last of those.
A beacon that goes out wakes who watches it. No lock is held while waiting, and a waiter that dies leaves the line by
dying.
"""

from __future__ import annotations

import logging
import math
import os
import select
import socket
import time
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Self, TypeVar

from . import _beacons, _descriptors, _leases, _linux, errors
from ._devices import Device, Request

logger = logging.getLogger("jaxguard")

Slot = TypeVar("Slot")

_PASSED_OVER_S = 2.0
_WARN_AFTER_S, _WARN_EVERY_S = 10.0, 300.0
_LOOK_AGAIN_S = 1.0
_FIRST_LOOK_S, _LAST_LOOK_S = 0.002, 0.5
"""Between looks when there is no beacon to watch: a holder about to light its own, or in another network namespace."""


def wait(
    name: str,
    request: Request,
    slot_timeout: float,
    attempt: Callable[[], Slot | None],
    wake: int,
    interrupted: Callable[[], None],
) -> Slot:
    """Wait until `attempt` gives a slot.

    Args:
        name: Who waits, for messages.
        request: What is waited for.
        slot_timeout: For how long, in seconds; 0 tries once.
        attempt: Takes the slot if it is there; called only when it is this request's turn.
        wake: An eventfd; a write to it makes the wait look again at once.
        interrupted: Raises if the wait shall end.

    Raises:
        SlotTimeout: If no slot came free in that time.
    """
    began = time.monotonic()
    locks = _leases.open_locks()
    try:
        if not _leases.somebody_waits(locks, request.lines) and (slot := attempt()) is not None:
            return slot
        _leases.mark_waiting(locks, request.lines)
        with _Place(request) as place:
            warn_at = began + _WARN_AFTER_S
            while True:
                interrupted()
                ahead, holders = place.look()
                if not ahead and (slot := attempt()) is not None:
                    return slot
                now = time.monotonic()
                left = began + slot_timeout - now
                if left <= 0:
                    raise _timeout(request, now - began, holders, ahead)
                if now >= warn_at:
                    logger.warning(
                        "jaxguard: %s waits for a slot since %.0f s: %s",
                        name,
                        now - began,
                        describe(request, holders, ahead),
                    )
                    warn_at = now + _WARN_EVERY_S
                place.sleep(ahead[-1:] or holders, min(left, warn_at - now), wake)
    finally:
        _descriptors.close(locks)


class _Place:
    """A place in the lines of a request."""

    def __init__(self, request: Request) -> None:
        self._devices = {_beacons.place(device.lock) for device in request.candidates}
        self._lines = {_beacons.place(line): line for line in request.lines}
        self._ticket = time.monotonic_ns()  # the same clock for all processes of the host
        self._nonce = _beacons.nonce()
        self._own: list[socket.socket] = []
        self._watched: dict[str, socket.socket] = {}
        self._stopped_since: dict[str, float] = {}
        self._look_again_s = _FIRST_LOOK_S

    def __enter__(self) -> Self:
        try:
            for line in self._lines.values():
                self._own.append(_beacons.light(_beacons.WAITER, line, self._ticket, self._nonce))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for open_socket in (*self._own, *self._watched.values()):
            _descriptors.close_socket(open_socket)

    def look(self) -> tuple[list[_beacons.Sighting], list[_beacons.Sighting]]:
        """Who is ahead, in order and without those who are passed over; and who holds what could be used."""
        beacons = _beacons.seen()
        ahead = [
            beacon
            for beacon in beacons
            if beacon.kind == _beacons.WAITER
            and beacon.place in self._lines
            and (beacon.ticket, beacon.nonce) < (self._ticket, self._nonce)
        ]
        holders = [beacon for beacon in beacons if beacon.kind == _beacons.HOLDER and beacon.place in self._devices]
        return [beacon for beacon in ahead if not self._passed_over(beacon)], holders

    def _passed_over(self, beacon: _beacons.Sighting) -> bool:
        """A waiter that is stopped (Ctrl-Z, a debugger) does not hold up those behind it for more than 2 s."""
        status = _linux.status(beacon.pid)
        if status is None or status.state not in "Tt":
            self._stopped_since.pop(beacon.name, None)
            return False
        return time.monotonic() - self._stopped_since.setdefault(beacon.name, time.monotonic()) >= _PASSED_OVER_S

    def sleep(self, watch: Iterable[_beacons.Sighting], limit_s: float, wake: int) -> None:
        """Sleep until one of those is gone, somebody wakes us, or it is time to look again."""
        wanted = {beacon.name: beacon for beacon in watch}
        for name in [name for name in self._watched if name not in wanted]:
            _descriptors.close_socket(self._watched.pop(name))
        for name, beacon in wanted.items():
            if name not in self._watched and (line := beacon.connect()) is not None:
                self._watched[name] = line
        if self._watched:
            self._look_again_s, nap = _FIRST_LOOK_S, _LOOK_AGAIN_S
        else:
            nap = self._look_again_s
            self._look_again_s = min(2 * nap, _LAST_LOOK_S)
        poll = select.poll()
        poll.register(wake, select.POLLIN)
        for line in self._watched.values():
            poll.register(line, select.POLLIN)
        for descriptor, _ in poll.poll(1000 * min(nap, limit_s)):
            if descriptor == wake:
                try:
                    os.eventfd_read(wake)
                except BlockingIOError:
                    pass
        for name, line in list(self._watched.items()):
            if _beacons.hung_up(line):
                _descriptors.close_socket(self._watched.pop(name))


def describe(request: Request, holders: list[_beacons.Sighting], ahead: list[_beacons.Sighting]) -> str:
    """Say in words who holds what a request could use, and who waits before it."""
    by_place = {_beacons.place(device.lock): device for device in request.candidates}
    words = []
    if holders:
        held = sorted({_label(by_place[beacon.place]) for beacon in holders})
        oldest = min(holders, key=lambda beacon: beacon.since)
        words.append(f"{', '.join(held)} held, the oldest by {_who(oldest)}")
    else:
        words.append("the slots are held by processes that cannot be seen from here (another container?)")
    if ahead:
        words.append(f"{len(ahead)} in the line before this call, the last {_who(ahead[-1])}")
    return "; ".join(words)


def _label(device: Device) -> str:
    return f"GPU {device.index} ({device.id})" if device.is_gpu else device.id


def _pid(beacon: _beacons.Sighting) -> int:
    proved = beacon.proved()
    return proved.pid if proved is not None and proved.pid else beacon.pid


def _who(beacon: _beacons.Sighting) -> str:
    proved = beacon.proved()
    pid = proved.pid if proved is not None and proved.pid else beacon.pid
    user = f"uid {proved.uid}, " if proved is not None else ""
    since = datetime.fromtimestamp(beacon.since).astimezone().strftime("%H:%M:%S")
    if pid == os.getpid():
        return f"this process (pid {pid}: another trial, or a gpu_slot block of another thread, since {since})"
    return f"pid {pid} ({user}`{_linux.command(pid)}`, since {since})"


def _timeout(
    request: Request, waited_s: float, holders: list[_beacons.Sighting], ahead: list[_beacons.Sighting]
) -> errors.SlotTimeout:
    kind = "GPU" if request.candidates[0].is_gpu else "CPU"
    number = "slot" if request.take == 1 else f"{request.take} slots"
    text = (
        f"no {kind} {number} free after {waited_s:.1f} s: {describe(request, holders, ahead)}. "
        "Raise slot_timeout=, lower n_jobs, or end what holds it."
    )
    pids = tuple(dict.fromkeys(_pid(beacon) for beacon in sorted(holders, key=lambda beacon: beacon.since)))
    return errors.SlotTimeout(text, waited_s=waited_s, holders=pids)


def check_slot_timeout(slot_timeout: object) -> None:
    """Raise unless `slot_timeout` is a number of seconds, 0 or more."""
    if isinstance(slot_timeout, bool) or not isinstance(slot_timeout, int | float):
        text = f"slot_timeout must be a number of seconds (inf, the default, never gives up), not {slot_timeout!r}"
        raise TypeError(text)
    if math.isnan(slot_timeout) or slot_timeout < 0:
        text = f"slot_timeout must be 0 (try once) or more seconds, not {slot_timeout}; inf never gives up"
        raise ValueError(text)

"""The line: first come, first served among all requests of the host whose devices overlap.

Whoever must wait lights a beacon in the line of each device it could use, with the time of its arrival as the ticket.
A device is *contested* for a request as long as somebody waits in its line who came before. A request tries the locks
of the devices that are not, and watches their holders; on the others it watches the last one ahead. A beacon that goes
out wakes who watches it. No lock is held while waiting, and a waiter that dies leaves the line by dying.
"""

from __future__ import annotations

import logging
import math
import os
import select
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from . import _beacons, _descriptors, _linux, _locks, _parties, _records, _settings, _shares, _tenants, errors
from ._devices import Request
from ._gpus import Device

logger = logging.getLogger("jaxguard")

Slot = TypeVar("Slot")

_PASSED_OVER_S = 2.0
_WARN_AFTER_S, _WARN_EVERY_S = 10.0, 300.0
_HOPELESS_AFTER_S = 30.0
"""For how long nothing but idle holders and foreign programs may be in the way, before the wait is an error."""
_LOOK_AGAIN_S, _LOOK_SELDOM_S = 1.0, 8.0
"""How long to sleep at most: near the head of the line, and far behind, where others notice who is stopped there."""
_WATCHED = 64
"""How many are watched at most: each takes a descriptor, and anybody can light beacons."""
_NEAR = 2
"""As many are watched ahead, so that one who is stopped and does not leave hides nobody from those behind."""
_FIRST_LOOK_S, _LAST_LOOK_S = 0.002, 0.5
"""Between looks when there is no beacon to watch: a holder about to light its own, or in another network namespace."""


@dataclass(frozen=True, slots=True)
class View:
    """What a waiter sees of the line at one moment."""

    ahead: list[_beacons.Sighting]
    """Who came before and wants some of the same devices, in order."""
    holders: list[_beacons.Sighting]
    """Who holds what could be used."""
    idle: list[_beacons.Sighting]
    """Those of the holders who run nothing, and still cannot let go."""
    free: tuple[Device, ...]
    """The devices that are not contested."""
    watch: list[_beacons.Sighting]
    """Those whose going could change something."""


def wait(
    name: str,
    request: Request,
    slot_timeout: float,
    attempt: Callable[[tuple[Device, ...]], Slot | None],
    wake: int,
    interrupted: Callable[[], None],
    facts: dict[str, Any] | None = None,
    ours: Callable[[], Slot | None] = lambda: None,
) -> Slot:
    """Wait until `attempt` gives a slot.

    Args:
        name: Who waits, for messages.
        request: What is waited for.
        slot_timeout: For how long, in seconds; 0 tries once.
        attempt: Takes the slot from these devices if it is there; called only for devices that are not contested.
        wake: An eventfd; a write to it makes the wait look again at once.
        interrupted: Raises if the wait shall end.
        facts: What the waiter tells its own user of itself.
        ours: Gives a slot that this process has and that has come free for this call, whoever is ahead.

    Raises:
        SlotTimeout: If no slot came free in that time, or none can come free.
    """
    began = time.monotonic()
    locks = _locks.open_locks()
    try:
        if not _locks.somebody_waits(locks, request.lines) and (slot := attempt(request.candidates)) is not None:
            return slot
        _locks.mark_waiting(locks, request.lines)
        with _Place(request, {"function": name, **(facts or {}), "phase": "waiting"}) as place:
            warn_at = began + _WARN_AFTER_S
            hopeless_at = math.inf
            while True:
                interrupted()
                if (slot := ours()) is not None:
                    return slot
                view = place.look()
                if len(view.free) >= request.take and (slot := attempt(view.free)) is not None:
                    return slot
                now = time.monotonic()
                left = began + slot_timeout - now
                if left <= 0:
                    raise _timeout(request, now - began, view)
                stuck = _stuck(locks, request, view)
                if len(request.candidates) - len(stuck) >= request.take:
                    hopeless_at = math.inf
                elif hopeless_at == math.inf:
                    hopeless_at = now + _HOPELESS_AFTER_S
                elif now >= hopeless_at:
                    reasons = _proved(stuck, view)
                    if len(request.candidates) - len(reasons) < request.take:
                        raise _hopeless(now - began, view, reasons)
                    hopeless_at = math.inf
                if now >= warn_at:
                    logger.warning(
                        "jaxguard: %s waits for a slot since %.0f s: %s", name, now - began, describe(request, view)
                    )
                    warn_at = now + _WARN_EVERY_S
                place.sleep(view.watch, min(left, warn_at - now, hopeless_at - now), wake)
    finally:
        _descriptors.close(locks)


def _stuck(locks: int, request: Request, view: View) -> dict[Device, list[_beacons.Sighting]]:
    """The devices that will not come free by themselves: with their idle holders, or with none for foreign programs."""
    found = {}
    for device in request.candidates:
        if not device.is_gpu:
            continue
        held = _locks.units_held(locks, device.lock)
        where = _beacons.place(device.lock)
        idle = [beacon for beacon in view.idle if beacon.place == where]
        # The locks say how much is held; if it is no more than what the idle ones have, nobody else will let go of any.
        if held > _shares.UNITS - request.units and held <= sum(beacon.number for beacon in idle):
            found[device] = idle
        elif not held and not _settings.allow_foreign() and _tenants.of(device).foreign:
            found[device] = []
    return found


def _proved(stuck: dict[Device, list[_beacons.Sighting]], view: View) -> dict[Device, str]:
    """The same in words; without devices whose holders only seem to be idle, because somebody else says so."""
    found = {}
    for device, idle in stuck.items():
        if idle:
            lit_by = {beacon.nonce: beacon.proved() for beacon in view.holders}
            if any(beacon.proved() != lit_by.get(beacon.nonce) for beacon in idle):
                continue
            who = " and ".join(_parties.in_words(_parties.behind(beacon, idle=True)) for beacon in idle)
            why = "its gpu_slot block has ended, but its JAX keeps the memory"
            found[device] = f"{_label(device)} is kept by {who}: {why}"
        else:
            found[device] = f"{_tenants.describe(_tenants.of(device))} on {_label(device)} without a slot"
    return found


class _Place:
    """A place in the lines of a request."""

    def __init__(self, request: Request, facts: dict[str, Any]) -> None:
        self._candidates = request.candidates
        self._facts = facts
        self._record: _records.Record | None = None
        self._devices = {_beacons.place(device.lock): _beacons.place(device.line) for device in request.candidates}
        self._lines = {_beacons.place(line): line for line in request.lines}
        self._ticket = time.monotonic_ns()  # the same clock for all processes of the host
        self._nonce = _beacons.nonce()
        self._own: list[socket.socket] = []
        self._watched: dict[str, socket.socket] = {}
        self._tried: dict[str, float] = {}
        self._stopped_since: dict[str, float] = {}
        self._look_again_s = _FIRST_LOOK_S
        self._nap_s = _LOOK_AGAIN_S

    def __enter__(self) -> Self:
        try:
            self._record = _records.Record(self._nonce, self._facts)
            for line in self._lines.values():
                self._own.append(_beacons.light(_beacons.WAITER, line, self._ticket, self._nonce))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for open_socket in (*self._own, *self._watched.values()):
            _descriptors.close_socket(open_socket)
        if self._record is not None:
            self._record.close()

    def look(self) -> View:
        """See who is there."""
        ahead: list[_beacons.Sighting] = []
        holders: list[_beacons.Sighting] = []
        idle: list[_beacons.Sighting] = []
        for beacon in _beacons.seen():
            if beacon.kind == _beacons.WAITER:
                before = (beacon.number, beacon.nonce) < (self._ticket, self._nonce)
                if before and beacon.place in self._lines:
                    ahead.append(beacon)
            elif beacon.place in self._devices:
                (holders if beacon.kind == _beacons.HOLDER else idle).append(beacon)
        last: dict[int, _beacons.Sighting] = {}
        for beacon in ahead:
            # The first of a line who is not passed over keeps all behind from it: only up to him one has to look.
            if beacon.place in last or not self._passed_over(beacon):
                last[beacon.place] = beacon
        free = tuple(device for device in self._candidates if self._line_of(device) not in last)
        open_to_us = {_beacons.place(device.lock) for device in free}
        waiters = {beacon.nonce: beacon for beacon in ahead if beacon.place in last}  # one beacon of each is enough
        self._nap_s = _LOOK_AGAIN_S if len(waiters) <= _NEAR else _LOOK_SELDOM_S
        nearest = {beacon.nonce: beacon for beacon in last.values()} | dict(list(waiters.items())[-_NEAR:])
        watch = [*nearest.values(), *(beacon for beacon in holders if beacon.place in open_to_us)]
        return View(ahead, holders, idle, free, watch[:_WATCHED])

    def _line_of(self, device: Device) -> int:
        return self._devices[_beacons.place(device.lock)]

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
        now = time.monotonic()
        self._tried = {name: at for name, at in self._tried.items() if now - at < _LAST_LOOK_S}
        for name, beacon in wanted.items():
            if name in self._watched or name in self._tried:  # one that hangs up at once is not called again at once
                continue
            self._tried[name] = now
            if (line := beacon.connect()) is not None:
                self._watched[name] = line
        if self._watched:
            self._look_again_s, nap = _FIRST_LOOK_S, self._nap_s
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


def describe(request: Request, view: View) -> str:
    """Say in words who holds what a request could use, and who waits before it."""
    by_place = {_beacons.place(device.lock): device for device in request.candidates}
    words = []
    if view.holders:
        held = sorted(_part(by_place[place], view.holders) for place in {beacon.place for beacon in view.holders})
        oldest = min(view.holders, key=lambda beacon: beacon.since)
        words.append(f"{', '.join(held)} held, the oldest by {_parties.in_words(_parties.behind(oldest))}")
    foreign = [(device, tenants) for device in request.candidates if (tenants := _tenants.of(device)).foreign]
    words += [f"{_tenants.describe(tenants)} on {_label(device)} without a slot" for device, tenants in foreign]
    if not words and not view.ahead:
        words.append("the slots are held by processes that cannot be seen from here (another container?)")
    if view.ahead:
        waiters = len({beacon.nonce for beacon in view.ahead})
        last = _parties.in_words(_parties.behind(view.ahead[-1]))
        words.append(f"{waiters} in the line before this call, the last {last}")
    return "; ".join(words)


def _part(device: Device, holders: list[_beacons.Sighting]) -> str:
    units = sum(beacon.number for beacon in holders if beacon.place == _beacons.place(device.lock))
    return _label(device) if units >= _shares.UNITS else f"{_label(device)} to {units / _shares.UNITS:.0%}"


def _label(device: Device) -> str:
    return f"GPU {device.index} ({device.id})" if device.is_gpu else device.id


def _timeout(request: Request, waited_s: float, view: View) -> errors.SlotTimeout:
    kind = "GPU" if request.candidates[0].is_gpu else "CPU"
    what = f"no {kind} slot free" if request.take == 1 else f"no {request.take} {kind} slots free together"
    if request.units < _shares.UNITS:
        what = f"no share of {request.gpus:g} of a {kind} free"
    described = describe(request, view)
    advice = "Raise slot_timeout=, lower n_jobs, or end what holds it."
    if "without a slot" in described:
        advice = f"End those programs, or set {_settings.ALLOW_FOREIGN}=1 to use a GPU beside them."
    text = f"{what} after {waited_s:.1f} s: {described}. {advice} `jaxguard slots` shows all."
    pids = dict.fromkeys(_parties.behind(b).pid for b in sorted(view.holders, key=lambda beacon: beacon.since))
    return errors.SlotTimeout(text, waited_s=waited_s, holders=tuple(pids))


def _hopeless(waited_s: float, view: View, stuck: dict[Device, str]) -> errors.SlotTimeout:
    text = (
        f"no GPU slot will come free: after {waited_s:.1f} s, {'; '.join(stuck.values())}. End those processes, or in "
        f"them use isolated_jax_worker, which gives the memory back; {_settings.ALLOW_FOREIGN}=1 uses a GPU beside "
        "programs that hold no slot."
    )
    idle = [_parties.behind(beacon).pid for beacon in sorted(view.idle, key=lambda beacon: beacon.since)]
    foreign = [process.pid for device in stuck for process in _tenants.of(device).foreign]
    return errors.SlotTimeout(text, waited_s=waited_s, holders=tuple(dict.fromkeys([*idle, *foreign])))


def check_slot_timeout(slot_timeout: object) -> None:
    """Raise unless `slot_timeout` is a number of seconds, 0 or more."""
    if isinstance(slot_timeout, bool) or not isinstance(slot_timeout, int | float):
        text = f"slot_timeout must be a number of seconds (inf, the default, never gives up), not {slot_timeout!r}"
        raise TypeError(text)
    if math.isnan(slot_timeout) or slot_timeout < 0:
        text = f"slot_timeout must be 0 (try once) or more seconds, not {slot_timeout}; inf never gives up"
        raise ValueError(text)

"""Who holds and who waits: what a beacon proves and its record tells, as facts and in words."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import datetime

from . import _beacons, _linux, _records


@dataclass(frozen=True, slots=True)
class Party:
    """A holder or a waiter."""

    pid: int
    proved: bool
    """Whether the kernel vouches for the process id, or only the beacon says it."""
    uid: int | None
    user: str
    command: str
    since: int
    """Seconds since the epoch."""
    function: str = ""
    study: str = ""
    trial: int | None = None
    phase: str = ""
    """`running`, `warm` (a worker that is kept for the next call), `idle` (nothing runs), `waiting`."""


def behind(beacon: _beacons.Sighting, *, idle: bool = False) -> Party:
    """Find out who lit a beacon. Of another user's only what `ps` shows is told."""
    peer = beacon.proved()
    proved = peer is not None and peer.pid > 0
    pid = peer.pid if peer is not None and proved else beacon.pid
    facts = _records.read(pid, beacon.nonce) if proved else {}
    trial = facts.get("trial")
    return Party(
        pid=pid,
        proved=proved,
        uid=peer.uid if peer is not None else None,
        user=_linux.user(peer.uid) if peer is not None else "?",
        command=_linux.command(pid) if proved else "?",
        since=beacon.since,
        function=_text(facts.get("function")),
        study=_text(facts.get("study")),
        trial=trial if isinstance(trial, int) else None,
        phase="idle" if idle else _text(facts.get("phase")),
    )


def _text(value: object) -> str:
    return "" if value is None else _linux.printable(str(value))


def in_words(party: Party) -> str:
    """Say it in words."""
    since = _clock(party.since)
    work = job(party)
    if party.pid == os.getpid():
        what = work or "another trial, or a gpu_slot block of another thread"
        return f"this process (pid {party.pid}: {what}, since {since})"
    who = f"{party.user}, `{party.command}`" if party.proved else "as it says itself"
    return f"pid {party.pid} ({who}{work and ', '}{work}, since {since})"


def _clock(seconds: int) -> str:
    try:
        return datetime.fromtimestamp(seconds).astimezone().strftime("%H:%M:%S")
    except (ValueError, OverflowError, OSError):  # a beacon may say anything
        return "?"


def job(party: Party) -> str:
    """What it works at, as far as this user may know."""
    parts = []
    if party.trial is not None:
        parts.append(f"trial {party.trial} of study {party.study!r}")
    elif party.function:
        parts.append(party.function)
    if party.phase not in {"", "running", "waiting"}:
        parts.append(party.phase)
    return ", ".join(parts)

"""Who computes on a GPU without holding a slot of it: other programs, and the remains of the last holder.

NVML names the processes. One that descends from a holder of the device is there by right; of all others it is said
that the device is FOREIGN. Where process ids cannot be matched (a container counts its own) nothing is known.
"""

from __future__ import annotations

import enum
import logging
import os
from dataclasses import dataclass

from . import _beacons, _linux, _nvml, _settings
from ._gpus import Device

logger = logging.getLogger("jaxguard")

_FIRST_NAMESPACE = "pid:[4026531836]"
"""The namespace of process ids in which the driver counts, by the number that Linux gives it (PROC_PID_INIT_INO)."""
_GENERATIONS = 64

_warned: set[str] = set()


class State(enum.Enum):
    """What can be said of a device, beside its locks."""

    ALONE = "alone"
    """Nobody computes on it without right."""
    FOREIGN = "foreign"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Tenants:
    """Who is on a device without right."""

    state: State
    foreign: tuple[_nvml.Process, ...] = ()


def of(device: Device, also_rightful: frozenset[int] = frozenset()) -> Tenants:
    """Look who computes on a device, besides its holders and those that `also_rightful` names."""
    if not device.is_gpu:
        return Tenants(State.ALONE)
    running = _nvml.processes(device.id)
    if running is None:
        return Tenants(State.UNKNOWN)
    if not running:
        return Tenants(State.ALONE)
    if not _counts_as_the_driver():
        return Tenants(State.UNKNOWN)
    rightful = _holders_of(device) | also_rightful
    foreign = tuple(process for process in running if not _descends(process.pid, rightful))
    return Tenants(State.FOREIGN if foreign else State.ALONE, foreign)


def keep_off(device: Device, *, for_this_process: bool) -> bool:
    """Say whether a device, whose lock was just taken, must be left alone for now."""
    tenants = of(device, frozenset({os.getpid()} if for_this_process else ()))
    if tenants.state is State.UNKNOWN and _nvml.is_there() and device.id not in _warned:
        _warned.add(device.id)
        logger.warning(
            "jaxguard: cannot tell who computes on GPU %s (%s): the process ids of the driver are not those of this "
            "container. A program that holds no slot would not be noticed.",
            device.index,
            device.id,
        )
    return tenants.state is State.FOREIGN and not _settings.allow_foreign()


def describe(tenants: Tenants) -> str:
    """Say in words who is there without right."""
    return " and ".join(who(process) for process in tenants.foreign)


def who(process: _nvml.Process) -> str:
    """Say in words who a process is."""
    memory = "" if process.memory_bytes is None else f", {process.memory_bytes / 2**20:.0f} MiB"
    uid = _linux.owner(process.pid)
    if uid is None:
        return f"pid {process.pid} (has ended, but the driver has not given its memory back{memory})"
    return f"pid {process.pid} ({_linux.user(uid)}, `{_linux.command(process.pid)}`{memory})"


def _counts_as_the_driver() -> bool:
    try:
        return os.readlink("/proc/self/ns/pid") == _FIRST_NAMESPACE
    except OSError:
        return False


def _holders_of(device: Device) -> frozenset[int]:
    """The pids that beacons say.

    To prove each would fill the queues of holders that accept nobody, and gain little: whoever lies here hides a
    program of its own, which needs no lie to be on the card.
    """
    where = _beacons.place(device.lock)
    lit = [beacon for beacon in _beacons.seen() if beacon.kind == _beacons.HOLDER and beacon.place == where]
    return frozenset(beacon.pid for beacon in lit)


def _descends(pid: int, ancestors: frozenset[int]) -> bool:
    """Say whether a process is one of these, or was started by one: keeper and worker, and what a trial starts."""
    for _ in range(_GENERATIONS):
        if pid in ancestors:
            return True
        status = _linux.status(pid)
        if status is None or status.parent <= 1:
            return False
        pid = status.parent
    return False

"""What can be wrong on a host, found by looking: nothing is started, held or changed.

The order is that of a call: versions, devices, locks, cores, memory, the store of programs, variables.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import sys
from collections.abc import Callable, Iterator

from . import _cache, _devices, _environment, _linux, _locks, _oom, _settings, _slots, _store, _variables, errors
from ._findings import Finding, Verdict

Check = Callable[[], Iterator[Finding]]


def of_all() -> Iterator[Finding]:
    """All findings of all checks; one that fails itself is a finding too."""
    for check in ALL:
        name = check.__name__
        try:
            yield from check()
        except (errors.JaxguardError, ValueError) as error:  # what a guarded call would raise as well
            yield Finding(name, Verdict.BAD, str(error), "each guarded call would fail with this")
        except OSError as error:
            yield Finding(name, Verdict.NOTE, f"could not be checked: {error}")


# ---------------------------------------------------------------- versions, devices


_TOLD = ("jax", "jaxlib", "optuna", "joblib", "loky", "filelock")
_PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version.partition("+")[0])[:3]))


def versions() -> Iterator[Finding]:
    """Python, JAX and its parts, and whether they fit each other and jaxguard."""
    found = {name: _version(name) for name in (*_TOLD, *_PLUGINS)}
    told = ", ".join(f"{name} {version}" for name, version in found.items() if version)
    yield Finding("versions", Verdict.OK, f"Python {sys.version.split()[0]}, {told}")
    for name, lowest in _required().items():
        version = found.get(name) or _version(name)
        if version is None or _numbers(version) < _numbers(lowest):
            fact = f"{name} {version} is here" if version else f"{name} is not installed"
            yield Finding(
                "versions",
                Verdict.BAD,
                fact,
                f"jaxguard needs {name} {lowest} or newer (hydra-optuna-sweeper asks for an older Optuna than that)"
                if name == "optuna"
                else f"jaxguard needs {name} {lowest} or newer",
                f"pip install -U '{name}>={lowest}'",
            )
    jax, jaxlib = found["jax"], found["jaxlib"]
    if jax and jaxlib and (_numbers(jaxlib) > _numbers(jax) or _numbers(jaxlib)[:2] != _numbers(jax)[:2]):
        yield Finding(
            "versions",
            Verdict.BAD,
            f"jax {jax} and jaxlib {jaxlib} are not of one version",
            "JAX fails when it is imported, or computes with an older compiler than it was written for",
            "pip install -U jax jaxlib",
        )
    if words := _devices.versions_that_do_not_fit():
        yield Finding(
            "versions",
            Verdict.BAD,
            words.strip(),
            "JAX passes a plugin of another version over, and trials would run on the CPU",
            "pip install -U 'jaxguard[cuda]', or 'jax[cuda12]' for an older driver",
        )


def _required() -> dict[str, str]:
    try:
        rows = importlib.metadata.requires("jaxguard") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    return {match[1]: match[2] for row in rows if (match := re.fullmatch(r"([\w-]+)>=([\d.]+)", row))}


def devices() -> Iterator[Finding]:
    """What this process may use, and what narrows it."""
    found = _devices.usable()
    kind = f"{len(found)} GPUs ({found[0].kind})" if found[0].is_gpu else f"no GPU: {len(found)} CPU slots"
    masks = [f"{name}={os.environ[name]}" for name in ("CUDA_VISIBLE_DEVICES", _settings.DEVICES) if name in os.environ]
    given = f", within {' and '.join(masks)}" if masks else ""
    yield Finding("devices", Verdict.OK, f"{kind}{given}; slot_count() is {_devices.slot_count()}")


def slots() -> Iterator[Finding]:
    """Who holds them, and whether that will ever end."""
    view = _slots.look(_devices.usable())
    taken = [device for device in view["devices"] if device["state"] != "FREE"]
    free = len(view["devices"]) - len(taken)
    yield Finding("slots", Verdict.OK, f"{free} of {len(view['devices'])} free, {len(view['line'])} waiting")
    for device in taken:
        for holder in device["holders"]:
            status = _linux.status(holder["pid"]) if holder["proved"] else None
            if status is not None and status.state in "Tt":
                yield Finding(
                    "slots",
                    Verdict.BAD,
                    f"{device['id']} is held by pid {holder['pid']} (`{holder['command']}`), which is stopped",
                    "it lets nothing go before it runs again, and others wait for it",
                    f"kill -CONT {holder['pid']}   (or end it: kill -KILL {holder['pid']})",
                )
            elif holder["phase"] == "idle":
                yield Finding(
                    "slots",
                    Verdict.NOTE,
                    f"{device['id']} is kept by pid {holder['pid']} (`{holder['command']}`), where nothing runs",
                    "its JAX keeps the memory until the process ends",
                    f"kill {holder['pid']}, or use isolated_jax_worker there",
                )
            else:
                yield Finding(
                    "slots", Verdict.NOTE, f"{device['id']} is held by pid {holder['pid']} (`{holder['command']}`)"
                )
        if device["state"] == "FOREIGN":
            who = " and ".join(process["words"] for process in device["foreign"])
            yield Finding(
                "slots",
                Verdict.BAD,
                f"{who} computes on {device['id']} without a slot",
                "guarded calls keep off that GPU, and wait",
                f"end it, or set {_settings.ALLOW_FOREIGN}=1 to use the GPU beside it",
            )


def locks() -> Iterator[Finding]:
    """The file on whose ranges exclusion rests."""
    folder = _settings.directory()
    descriptor = _locks.open_locks(make=False)
    try:
        inode = os.fstat(descriptor).st_ino
    finally:
        os.close(descriptor)
    yield Finding("locks", Verdict.OK, f"{folder or _locks.NULL}, inode {inode}")


# ---------------------------------------------------------------- cores, memory, files

_SHM = "/dev/shm"  # noqa: S108 – looked at, not written
_LITTLE_SHM = 64 << 20


def cores() -> Iterator[Finding]:
    """Cores that may be used, and a quota that gives fewer."""
    mine, there, quota = len(_environment.cores()), os.cpu_count() or 0, _quota()
    yield Finding("cores", Verdict.OK, f"{mine} of {there} may be used{f', quota {quota:g}' if quota else ''}")
    if quota is not None and quota < mine:
        yield Finding(
            "cores",
            Verdict.NOTE,
            f"a control group allows {quota:g} cores of time, and {mine} may be used",
            "more threads run than there is time for, and all of them are held up",
            f"give the job whole cores, or start with: taskset -c 0-{max(0, int(quota) - 1)} python ...",
        )


def _quota() -> float | None:
    for path in ("/sys/fs/cgroup/cpu.max", "/sys/fs/cgroup/cpu/cpu.cfs_quota_us"):
        try:
            with open(path, encoding="utf-8") as file:
                words = file.read().split()
            if path.endswith("quota_us"):
                with open("/sys/fs/cgroup/cpu/cpu.cfs_period_us", encoding="utf-8") as file:
                    words += file.read().split()
        except OSError:
            continue
        if len(words) == 2 and words[0].isdecimal() and words[1].isdecimal():
            return round(int(words[0]) / int(words[1]), 2)
    return None


def memory() -> Iterator[Finding]:
    """The limit of memory, and whether the kernel has ended processes for it; and /dev/shm."""
    limit, killed = _oom.limit(), _oom.counts()
    text = f"limit {limit / 2**30:.1f} GiB" if limit is not None else "no limit but the host's"
    if killed.group:
        yield Finding(
            "memory",
            Verdict.NOTE,
            f"{text}; the kernel has ended {killed.group} processes of this control group for want of memory",
            "trials may need more than there is",
            "run fewer trials at a time, or give the job more memory",
        )
    else:
        yield Finding("memory", Verdict.OK, text)
    try:
        shm = os.statvfs(_SHM)
    except OSError:
        return
    free = shm.f_bavail * shm.f_frsize
    if free < _LITTLE_SHM:
        yield Finding(
            "memory",
            Verdict.BAD,
            f"{_SHM} has {free / 1e6:.0f} MB free of {shm.f_blocks * shm.f_frsize / 1e6:.0f} MB",
            "pools and data loaders of trials keep their semaphores and arrays there, and die by SIGBUS",
            "delete what nobody uses there (ls -l /dev/shm), or give the container more: docker run --shm-size=2g",
        )
    else:
        yield Finding("memory", Verdict.OK, f"{_SHM} has {free / 2**30:.1f} GiB free")


def store() -> Iterator[Finding]:
    """Where compiled programs are kept: whether it can be relied on, how big it is, what is torn."""
    root = _store.root()
    lost = "trials run, and each compiles for itself"
    mend = f"name another directory of your own, on a local disk: export {_settings.CACHE_DIR}=/path"
    try:
        found = [_store.Store(root, kind, make=False) for kind in _store.kinds(root)]
    except (errors.JaxguardError, OSError) as error:
        yield Finding("store", Verdict.BAD, str(error), lost, mend)
        return
    there = root
    while not os.path.exists(there):
        there = os.path.dirname(there)
    if not os.path.isdir(there) or not os.access(there, os.W_OK | os.X_OK) or os.statvfs(there).f_flag & os.ST_RDONLY:
        yield Finding("store", Verdict.BAD, f"{there} cannot be written", lost, mend)
        return
    entries = [(each, entry) for each in found for entry in each.entries()]
    size = _cache.size(sum(entry.bytes for _, entry in entries))
    yield Finding("store", Verdict.OK, f"{root}: {len(entries)} programs, {size}")
    torn = sum(not each.is_sound(entry) for each, entry in entries)
    if torn:
        yield Finding(
            "store", Verdict.BAD, f"{torn} programs of it are torn", "they are compiled again", "jaxguard cache verify"
        )


ALL: tuple[Check, ...] = (versions, devices, slots, locks, cores, memory, store, _variables.environment)

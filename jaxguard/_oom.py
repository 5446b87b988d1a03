"""Has the kernel ended processes for want of memory? Its own counts, before and after a death, tell.

Sources: the kernel's cgroup-v2 documentation (`memory.events`), cgroup-v1 (`memory.oom_control`), /proc/vmstat.
"""

from __future__ import annotations

from typing import NamedTuple

from . import _linux

_ADVICE = "Make the model or the batch smaller, or run fewer trials at a time"
_UNLIMITED = 1 << 60
"""cgroup v1 has no word for "no limit", only a very large number."""


class Counts(NamedTuple):
    """How many processes the kernel has ended for want of memory; None where it does not tell."""

    group: int | None
    """Of this process's control group."""
    host: int | None
    """Of the host; a container sees that of its host too."""


def counts() -> Counts:
    """Read the counts as they are now."""
    folder = _group()
    files = [f"{folder}/memory.events", f"{folder}/memory.oom_control"] if folder else []
    known = [count for file in files if (count := _number(file, "oom_kill")) is not None]
    return Counts(known[0] if known else None, _number("/proc/vmstat", "oom_kill"))


def explain(before: Counts) -> str:
    """Say, after a death by SIGKILL, what the counts tell about it."""
    after = counts()
    if before.group is not None and after.group is not None and after.group > before.group:
        most = limit()
        words = f" of {most / 2**30:.1f} GiB" if most is not None else ""
        return (
            f"out of memory: since this worker began, the kernel ended {after.group - before.group} of the processes "
            f"that share a memory limit{words} with it. {_ADVICE}"
        )
    if before.host is not None and after.host is not None and after.host > before.host:
        return (
            f"most likely out of memory: since this worker began, the kernel ended {after.host - before.host} "
            f"processes of this host for that. {_ADVICE}"
        )
    if after.host is None:
        return "by the kernel for want of memory, or by hand; the kernel does not tell which here"
    return (
        "by hand or by another program (a scheduler, a daemon that watches memory): the kernel's count of processes "
        "that it ended for want of memory has not changed"
    )


def _group() -> str | None:
    """The directory of the control group that limits this process's memory, as far as it can be seen from here."""
    try:
        with open("/proc/self/cgroup", encoding="utf-8", errors="surrogateescape") as file:
            rows = [row.rstrip("\n").split(":", 2) for row in file if row.count(":") > 1]
    except OSError as error:
        if _linux.is_a_users(error):
            raise
        return None
    for controllers, base in (("memory", "/sys/fs/cgroup/memory"), ("", "/sys/fs/cgroup")):
        for _, names, path in rows:
            if controllers in names.split(","):
                # In a container the path may be that of the host, and the group itself be mounted at the base.
                for folder in (base + path.rstrip("/"), base):
                    if _linux.is_there(f"{folder}/memory.{'oom_control' if controllers else 'events'}"):
                        return folder
    return None


def limit() -> int | None:
    """The limit of memory of this process's control group, in bytes; None if it has none that can be seen."""
    for name in ("memory.max", "memory.limit_in_bytes"):
        try:
            with open(f"{_group()}/{name}", encoding="ascii") as file:
                text = file.read().strip()
        except OSError:
            continue
        return int(text) if text.isdecimal() and int(text) < _UNLIMITED else None
    return None


def _number(path: str, name: str) -> int | None:
    try:
        with open(path, encoding="ascii") as file:
            rows = (row.split() for row in file)
            return next((int(row[1]) for row in rows if len(row) == 2 and row[0] == name), None)
    except (OSError, ValueError) as error:
        if _linux.is_a_users(error):
            raise
        return None

"""The locks on which exclusion rests: ranges of an inode that no user can unlink.

That is `/dev/null`, or the file in JAXGUARD_DIR.

A lock is an open-file-description lock: it belongs to a descriptor and not to a process, travels with it to keeper and
worker, and the kernel frees it when the last of them ends, however they end. Source: fcntl(2).

    a device    840 units from `start_of(its name)`
    a line      one shared byte behind its range says that somebody waits in it
    a protocol  one shared byte each, held with every lease: two that do not know each other's places must not meet
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import stat
from collections.abc import Iterable
from contextlib import ExitStack

from . import _beacons, _descriptors, _linux, _settings, errors
from ._shares import UNITS

logger = logging.getLogger("jaxguard")

NULL = "/dev/null"
_NULL_DEVICE = os.makedev(1, 3)
_FILE = "jaxguard.locks"
"""Name of the lock file in JAXGUARD_DIR."""
_SPACING = 1 << 12
_WAITING = 2048
"""Offset, behind a line's range, of the mark that somebody waits in it."""
_PROTOCOLS = 64
"""How many protocols the marks can tell apart."""

_warned = False


def open_locks(*, make: bool = True) -> int:
    """A fresh open file description on which ranges can be locked; close it to let all of them go.

    Args:
        make: Whether root makes the directory and file of JAXGUARD_DIR if they are not there.

    Raises:
        JaxguardError: If there is no place for the locks, or JAXGUARD_DIR is none that all users can rely on.
    """
    folder = _settings.directory()
    path, flags = (NULL, 0) if folder is None else (os.path.join(folder, _FILE), os.O_NOFOLLOW)
    try:
        if folder is not None:
            _prepare(folder, make=make and os.geteuid() == 0)
        elif (reason := _unusable(NULL, os.lstat(NULL) if _linux.is_there(NULL) else None)) is not None:
            path, flags = _own_file(reason), os.O_NOFOLLOW
        with _descriptors.creating():
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | flags)
            _descriptors.own(descriptor)
    except OSError as error:
        if _linux.is_a_users(error):
            raise
        raise errors.JaxguardError(_cannot(path, error.strerror or str(error))) from error
    if folder is not None:
        try:
            _check_file(path, descriptor)
        except BaseException:
            _descriptors.close(descriptor)
            raise
    return descriptor


def start_of(name: str) -> int:
    """Where the range of a device, or the mark of a line, begins."""
    return _beacons.place(name) * _SPACING


def lock_units(descriptor: int, name: str, count: int) -> list[tuple[int, int]]:
    """Lock so many units of a device, wherever they are free, in one piece or several: nothing is lost to gaps.

    Returns:
        What was locked, as start and length in units; empty if so many were not free.
    """
    if UNITS - units_held(descriptor, name) < count:  # not even for a moment: somebody may be trying just once
        return []
    start = start_of(name)
    pieces: list[tuple[int, int]] = []
    at, missing = 0, count
    while missing and at < UNITS:
        gap, after = _gap(descriptor, start, at, min(at + missing, UNITS))
        if gap == 0:
            at = after
        elif _linux.lock_range(descriptor, start + at, gap):  # else somebody was faster: look again
            pieces.append((at, gap))
            at += gap
            missing -= gap
    if missing:
        unlock_units(descriptor, name, pieces)
        return []
    return pieces


def unlock_units(descriptor: int, name: str, pieces: Iterable[tuple[int, int]]) -> None:
    """Let units go again."""
    for first, length in pieces:
        _linux.unlock_range(descriptor, start_of(name) + first, length)


def units_held(descriptor: int, name: str) -> int:
    """How many units of a device others hold."""
    start, at, held = start_of(name), 0, 0
    while at < UNITS:
        gap, after = _gap(descriptor, start, at, UNITS)
        held += 0 if gap else min(after, UNITS) - at
        at = at + gap if gap else after
    return held


def _gap(descriptor: int, start: int, at: int, end: int) -> tuple[int, int]:
    """How many units are free from `at` on; if none is, where the lock that is there ends."""
    while (busy := _linux.lock_in_range(descriptor, start + at, end - at)) is not None:
        if busy[0] <= start + at:
            return 0, busy[1] - start
        end = busy[0] - start  # the kernel names any lock in the range, not the first one
    return end - at, end


def mark_waiting(descriptor: int, lines: Iterable[str]) -> None:
    """Let newcomers see that somebody waits in these lines."""
    for line in lines:
        _linux.lock_range(descriptor, start_of(line) + _WAITING, 1, shared=True)


def somebody_waits(descriptor: int, lines: Iterable[str]) -> bool:
    """Say whether somebody may be waiting in one of these lines."""
    return any(_linux.range_is_locked(descriptor, start_of(line) + _WAITING, 1) for line in lines)


def mark_protocol(descriptor: int) -> None:
    """Say which protocol this holder follows.

    Raises:
        JaxguardError: If somebody holds devices by another one, whose locks may be elsewhere.
    """
    own, first = _beacons.PROTOCOL, start_of("protocol")
    _linux.lock_range(descriptor, first + own, 1, shared=True)
    for low, high in ((0, own), (own + 1, _PROTOCOLS)):
        other = _linux.lock_in_range(descriptor, first + low, high - low)
        if other is not None:
            text = (
                f"a program on this host holds devices by jaxguard's protocol {max(other[0] - first, low)}, and this "
                f"one follows protocol {own}: they would not see each other's slots. Use the same version of "
                "jaxguard in both, or wait until that program has ended."
            )
            raise errors.JaxguardError(text)


# ---------------------------------------------------------------- where the locks are


@functools.cache
def _null_works() -> bool:
    """Say whether locks on /dev/null exclude each other; some sandboxes have another idea of it."""
    return _excludes(NULL)


def _excludes(path: str) -> bool:
    """Say whether locks exclude each other there. A place that somebody has locked, says so too: any user may."""
    place = _SPACING * (1 << 49) + int.from_bytes(os.urandom(4), "big")
    with ExitStack() as stack:
        first = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        stack.callback(os.close, first)
        second = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        stack.callback(os.close, second)
        try:
            return not _linux.lock_range(first, place, 1) or not _linux.lock_range(second, place, 1)
        except OSError as error:
            if error.errno in {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS}:  # there is no such thing here
                return False
            raise


def _unusable(path: str, found: os.stat_result | None) -> str | None:
    if found is None:
        return f"{path} is not there"
    if not stat.S_ISCHR(found.st_mode) or found.st_rdev != _NULL_DEVICE:
        return f"{path} is not the null device"
    return None if _null_works() else f"{path} has no locks here"


def _own_file(reason: str) -> str:
    """The second best: a lock file of this user."""
    global _warned  # noqa: PLW0603 – once per process
    base = os.environ.get("XDG_RUNTIME_DIR") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = os.path.join(base, "jaxguard")
    path = os.path.join(folder, _FILE)
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        found = os.lstat(folder)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise errors.JaxguardError(_cannot(path, f"{folder} is not a directory of this user alone"))
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
    except OSError as error:
        if _linux.is_a_users(error):
            raise
        raise errors.JaxguardError(_cannot(path, error.strerror or str(error))) from error
    if not _excludes(path):
        raise errors.JaxguardError(_cannot(path, "its file system has no open-file-description locks"))
    if not _warned:
        _warned = True
        logger.warning(
            "jaxguard: %s, so that slots are held by locks on %s: programs of other users, and of other containers, "
            "are not excluded. Set %s to a directory, owned by root, that all of them see.",
            reason,
            path,
            _settings.DIR,
        )
    return path


def _cannot(path: str, reason: str) -> str:
    return (
        f"no device can be held: {path} cannot be used for locks ({reason}). Set {_settings.DIR} to a directory on a "
        f"local disk, owned by root, with a file {_FILE!r}, owned by root and writable for all."
    )


@functools.cache
def _prepare(folder: str, *, make: bool) -> None:
    """Make the directory and its file, where this process may; check that nobody but root can exchange them."""
    path = os.path.join(folder, _FILE)
    missing = _check_folders(folder)
    if not make or _linux.is_there(path):
        if missing:
            raise errors.JaxguardError(_refused(folder, f"{missing[-1]} is not there"))
        return
    try:
        for part in reversed(missing):
            os.mkdir(part)
            os.chmod(part, 0o755)  # noqa: S103 – for all users, whatever the umask says
        _check_folders(folder)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.fchmod(descriptor, 0o666)
        finally:
            os.close(descriptor)
        logger.warning(
            "jaxguard: made %s. Slots exclude only programs whose %s is this directory, on a disk they share.",
            path,
            _settings.DIR,
        )
    except FileExistsError:
        pass  # another process of root was faster
    except OSError as error:
        if _linux.is_a_users(error):
            raise
        raise errors.JaxguardError(_cannot(path, error.strerror or str(error))) from error


def _check_folders(folder: str) -> list[str]:
    """Raise unless all that is there of a path is root's alone; give what is not there, the longest first."""
    if os.path.realpath(folder) != os.path.normpath(folder):
        text = f"it leads through a link to {os.path.realpath(folder)}: give that path"
        raise errors.JaxguardError(_refused(folder, text))
    missing = []
    part = os.path.normpath(folder)
    while True:
        try:
            found = os.lstat(part)
        except FileNotFoundError:
            missing.append(part)
        except OSError as error:
            if _linux.is_a_users(error):
                raise
            raise errors.JaxguardError(_refused(folder, f"{part}: {error.strerror}")) from error
        else:
            if not stat.S_ISDIR(found.st_mode):
                raise errors.JaxguardError(_refused(folder, f"{part} is not a directory"))
            if found.st_uid != 0:
                raise errors.JaxguardError(_refused(folder, f"{part} is owned by uid {found.st_uid}, not by root"))
            if found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX:
                raise errors.JaxguardError(_refused(folder, f"others than root can exchange files in {part}"))
        if part == "/":
            break
        part = os.path.dirname(part)
    if _linux.is_on_network(folder):
        kind = _linux.file_system(folder)
        raise errors.JaxguardError(_refused(folder, f"it is on a network or user file system ({kind})"))
    return missing


def _check_file(path: str, descriptor: int) -> None:
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != 0:
        raise errors.JaxguardError(_refused(path, "it is not a file owned by root"))
    if not _checked(found.st_dev, found.st_ino, path):
        raise errors.JaxguardError(_refused(path, "its file system has no open-file-description locks"))


@functools.cache
def _checked(_device: int, _inode: int, path: str) -> bool:
    return _excludes(path)


def _refused(path: str, reason: str) -> str:
    return (
        f"{_settings.DIR}: {path} cannot be used for locks that all users share: {reason}. It must be a directory on a "
        f"local disk, it and all above it owned by root, with a file {_FILE!r}, owned by root and writable for all: "
        f"run one guarded call as root, which makes it, or `install -m 666 /dev/null DIRECTORY/{_FILE}`."
    )

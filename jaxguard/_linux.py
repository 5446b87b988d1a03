"""What Linux offers and Python has no name for: range locks, subreapers, death signals, the process table.

Sources: fcntl(2) for open-file-description locks, prctl(2), unix(7) for SO_PEERCRED, proc(5).
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import os
import platform
import re
import select
import signal
import socket
import stat
import struct
import sys
from typing import Any, NamedTuple

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_FLOCK = "hhqqi4x"  # struct flock on 64-bit Linux: type, whence, start, length, pid
_CREDENTIALS = "3i"  # struct ucred: pid, uid, gid
_TGKILL = {"x86_64": 234, "aarch64": 131}
"""Its number, where the C library has no name for it; JAX runs on no other Linux."""
_LONGEST_NAME = 60
_NETWORK = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "lustre", "beegfs", "gpfs", "glusterfs"}


@functools.cache
def libc() -> Any:
    """The C library of this process; calls let go of the GIL."""
    return ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    if libc().prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def die_with_parent() -> None:
    """Have the kernel kill this process when the *thread* that forked it ends: fork from single-threaded ones only."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def become_subreaper() -> None:
    """Become the parent of all descendants that lose theirs."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def lock_range(fd: int, start: int, length: int, *, shared: bool = False) -> bool:
    """Lock a range for the open file description of `fd`, if it is free; say whether it was."""
    kind = fcntl.F_RDLCK if shared else fcntl.F_WRLCK
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack(_FLOCK, kind, os.SEEK_SET, start, length, 0))
    except (BlockingIOError, PermissionError):  # EAGAIN or EACCES: both mean that somebody holds it
        return False
    return True


def unlock_range(fd: int, start: int, length: int) -> None:
    """Let a range go that the open file description of `fd` holds."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack(_FLOCK, fcntl.F_UNLCK, os.SEEK_SET, start, length, 0))


def lock_in_range(fd: int, start: int, length: int) -> tuple[int, int] | None:
    """A lock in the range that another open file description holds, as its start and end; None if there is none."""
    asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, start, length, 0)
    kind, _, first, count, _ = struct.unpack(_FLOCK, fcntl.fcntl(fd, fcntl.F_OFD_GETLK, asked))
    if kind == fcntl.F_UNLCK:
        return None
    return first, first + count if count else sys.maxsize


def range_is_locked(fd: int, start: int, length: int) -> bool:
    """Say whether another open file description holds a lock in the range."""
    return lock_in_range(fd, start, length) is not None


def wait_readable(descriptor: int, limit_s: float) -> bool:
    """Wait until a descriptor is readable and say whether it is; `select` knows none from 1024 on."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(1000 * limit_s))


class Peer(NamedTuple):
    """Who is at the other end of a Unix socket, as the kernel noted it when the connection or listener was made."""

    pid: int
    uid: int


def peer(connection: socket.socket) -> Peer:
    """Ask the kernel who is at the other end."""
    size = struct.calcsize(_CREDENTIALS)
    pid, uid, _ = struct.unpack(_CREDENTIALS, connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return Peer(pid, uid)


class Status(NamedTuple):
    """A few words of /proc/<pid>/stat."""

    state: str
    parent: int
    session: int
    started: int
    """When the process started, in clock ticks since boot: with the pid it names one process for good."""


def status(pid: int, thread: int | None = None) -> Status | None:
    """Look a process up, or one of its threads; None if there is none."""
    try:
        with open(f"/proc/{pid}/stat" if thread is None else f"/proc/{pid}/task/{thread}/stat", "rb") as file:
            words = file.read().rpartition(b")")[2].split()
    except OSError as error:
        if is_a_users(error):
            raise
        return None
    return Status(words[0].decode(), int(words[1]), int(words[3]), int(words[19]))


def set_handler(number: int, handler: Any) -> None:
    """Set what a signal does, from any thread: SIG_DFL, SIG_IGN, or a function of the C library.

    `signal.signal` may be used in the main thread only.
    """
    libc().signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    address = int(handler) if isinstance(handler, int) else ctypes.cast(handler, ctypes.c_void_p)
    libc().signal(number, address)


def catches(pid: int, number: int) -> bool:
    """Say whether a process has a handler for a signal."""
    return _mask(f"/proc/{pid}/status", b"SigCgt:") >> (number - 1) & 1 == 1


def _mask(path: str, word: bytes) -> int:
    """A set of signals in a status file. Source: proc(5)."""
    try:
        with open(path, "rb") as file:
            return next((int(line.split()[1], 16) for line in file if line.startswith(word)), 0)
    except OSError:
        return 0


def threads(pid: int) -> list[int]:
    """The threads of a process, the main one first."""
    try:
        return sorted(map(int, os.listdir(f"/proc/{pid}/task")))
    except OSError:
        return []


def signal_thread(pid: int, thread: int, number: int) -> None:
    """Send a signal to one thread of a process; nothing happens if it is gone."""
    libc().syscall(ctypes.c_long(_TGKILL[platform.machine()]), pid, thread, int(number))


def is_pending(pid: int, thread: int, number: int) -> bool:
    """Say whether a signal is still on its way to a thread."""
    return _mask(f"/proc/{pid}/task/{thread}/status", b"SigPnd:") >> (number - 1) & 1 == 1


def switches(pid: int, thread: int) -> bytes:
    """How often a thread has come off its core, as proc(5) tells; the same words mean that it has not run meanwhile."""
    try:
        with open(f"/proc/{pid}/task/{thread}/status", "rb") as file:
            return b"".join(line for line in file if b"ctxt_switches" in line)
    except OSError:
        return b""


def blocks(pid: int, thread: int, number: int) -> bool:
    """Say whether a thread has a signal blocked."""
    return _mask(f"/proc/{pid}/task/{thread}/status", b"SigBlk:") >> (number - 1) & 1 == 1


def waits_for_a_signal(pid: int, thread: int) -> bool:
    """Say whether a thread is in pause(2) or a kin of it, which any signal ends; where the kernel tells."""
    try:
        with open(f"/proc/{pid}/task/{thread}/wchan", "rb") as file:
            return re.search(b"pause|sigsuspend|sigtimedwait", file.read()) is not None
    except OSError:
        return False


def own_pid(pid: int) -> int:
    """The pid of a process as it knows it itself: in a container, another one than ours."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            return next((int(line.split()[-1]) for line in file if line.startswith(b"NSpid:")), pid)
    except OSError:
        return pid


def state(pid: int, thread: int | None = None) -> str:
    """The state of a process, or of one of its threads, as one letter; X if there is none."""
    found = status(pid, thread)
    return "X" if found is None else found.state


def is_a_users(error: BaseException) -> bool:
    """Say whether not the system has raised an error, but a signal handler of the user's, which Python runs anywhere.

    Such a handler is a user's time limit, and what it raises is mostly a TimeoutError, without a number of the system.
    (Other errors without one are of libraries, such as io.UnsupportedOperation of a stream.)
    """
    return isinstance(error, TimeoutError) and error.errno is None


def is_directory(path: str) -> bool:
    """Say whether there is a directory; `os.path.isdir` would swallow a user's time limit."""
    return stat.S_ISDIR(_mode(path))


def is_file(path: str) -> bool:
    """The same of a file."""
    return stat.S_ISREG(_mode(path))


def is_there(path: str) -> bool:
    """The same of anything, a link that leads nowhere too."""
    return _mode(path, follow_symlinks=False) != 0


def _mode(path: str, *, follow_symlinks: bool = True) -> int:
    try:
        return os.stat(path, follow_symlinks=follow_symlinks).st_mode
    except OSError as error:
        if is_a_users(error):
            raise
        return 0


def identity(descriptor: int) -> tuple[int, int]:
    """Which file a descriptor stands for: one that is closed and opened again is another one."""
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino


def owner(pid: int) -> int | None:
    """The user id of a process; None if there is none."""
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return None


def user(uid: int) -> str:
    """The name of a user, or the number of one that has none."""
    import pwd

    try:
        return printable(pwd.getpwuid(uid).pw_name)
    except (KeyError, OSError):
        return f"uid {uid}"


def printable(text: str) -> str:
    """Make text of others fit to be shown: nothing in it steers a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def command(pid: int) -> str:
    """What `ps` would show of a process, shortened: a Python's script, or the module after -m, else the program."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = [printable(word.decode("utf-8", "replace")) for word in file.read(1 << 16).split(b"\0") if word]
    except OSError:
        return "?"
    rest = iter(words)
    program = os.path.basename(next(rest, "?"))
    for word in rest if program.startswith(("python", "pypy")) else ():
        if word == "-c":
            return f"{program} -c"
        if word in {"-W", "-X"}:
            next(rest, None)
        elif word == "-m" or not word.startswith("-"):
            name = " ".join((next(rest, "?") if word == "-m" else word).split())
            return (
                name if len(name) <= _LONGEST_NAME else f"…{name[1 - _LONGEST_NAME :]}"
            )  # a script's own name is last
    return program


def children(pid: int) -> set[int]:
    """The children of a process, zombies included."""
    found: set[int] = set()
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children", "rb") as file:
                found.update(map(int, file.read().split()))
    except OSError:
        pass
    return found


def memory_bytes(pid: int | str = "self") -> int:
    """Resident memory of a process, in bytes; 0 if there is no such process."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def file_system(path: str) -> str:
    """The kind of file system that a path is on. Source: proc(5), mountinfo."""
    path, best, kind = os.path.realpath(path), "", ""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as table:
        for row in table:
            left, _, right = row.partition(" - ")
            point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), left.split()[4])
            inside = path == point or path.startswith(point.rstrip("/") + "/")
            if inside and len(point) >= len(best):
                best, kind = point, right.split()[0]
    return kind


def is_on_network(path: str) -> bool:
    """Say whether a path, which need not be there yet, is on a file system whose locks cannot be relied on."""
    kind = file_system(path)
    return kind in _NETWORK or kind.startswith("fuse")


def check_platform() -> None:
    """Raise where jaxguard's ground is missing, with the reason."""
    if sys.platform == "linux":
        return
    from . import errors

    text = (
        f"jaxguard cannot run workers on {sys.platform}: its locks and its clean-up rest on Linux (5.4 or newer). "
        "Use jaxguard.testing.inline() or JAXGUARD_INLINE=1 to run guarded functions in this process."
    )
    raise errors.JaxguardError(text)

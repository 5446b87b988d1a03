"""Where the threads of a process are: it writes their stacks when it is sent a signal, its own user reads them.

`faulthandler` writes from the signal's handler itself, whatever the threads do: in XLA, in C code that holds the GIL,
asleep. It writes to a memory file of the process, found by its name among its descriptors, as records are. No system
call of the process fails by it, and nothing is stopped. Sources: faulthandler's documentation, proc(5).

The signal would end a process that does not expect it, so it is sent only where the kernel says that it is caught.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import re
import signal
import time
from collections.abc import Callable

from . import _descriptors, _linux

SIGNAL = signal.SIGRTMIN + 3
PARENT, KEEPER, WORKER = "jaxguard-stacks", "jaxguard-keeper-stacks", "jaxguard-worker-stacks"
"""The names of the files: a parent has those of its workers open too, beside its own."""
_LARGE = 1 << 20
"""From this size on, in bytes, a reader empties the file first."""
_WAIT_S, _POLL_S = 1.0, 0.01
_OWN_FRAME = re.compile(r'jaxguard/_worker\.py", line \d+ in _do$')
_STOPPED = "stopped, by SIGSTOP, Ctrl-Z or a debugger: nothing of it runs until it gets SIGCONT"
_STATES = {
    "T": _STOPPED,
    "t": _STOPPED,
    "D": "in a system call that cannot be interrupted: a disk, a network file system or a driver does not answer",
    "Z": "ended",
    "X": "ended",
}
_SILENT = "TtZX"


def new_file(name: str) -> int:
    """Make the file for the stacks of a process."""
    with _descriptors.creating():
        file = os.memfd_create(name, os.MFD_CLOEXEC)
        _descriptors.own(file)
    fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)  # so that it can be emptied at any time
    return file


_answers = False


def answer(file: int) -> None:
    """Write this process's stacks to a file whenever the signal comes."""
    global _answers  # noqa: PLW0603 – a fact about this process
    # Ignored from when the interpreter ends faulthandler: a signal on its way then must not end the process.
    _linux.ignore(SIGNAL)
    faulthandler.register(SIGNAL, file=file, all_threads=True)
    _answers = True


def answer_here(name: str) -> None:
    """The same for this process, once for all; unless it uses the signal for itself."""
    with _descriptors.creating():
        if not _answers and not _linux.catches(os.getpid(), SIGNAL):
            answer(new_file(name))


def ask(pid: int, name: str) -> str:
    """The stacks of a process of the same user, or in parentheses why there are none."""
    try:
        pidfd = os.pidfd_open(pid)  # first: from here on the number cannot come to mean another process
    except OSError:
        return why_silent(pid)
    file = -1
    try:
        file = _open(pid, name)
        return read(file, pid, lambda: signal.pidfd_send_signal(pidfd, SIGNAL))
    except OSError:
        return why_silent(pid)
    finally:
        os.close(pidfd)
        if file >= 0:
            os.close(file)


def read(file: int, pid: int | None, send: Callable[[], object], wait: Callable[[float], object] = time.sleep) -> str:
    """Send the signal, and read what comes.

    Args:
        file: The file of the process's stacks.
        pid: The process.
        send: Sends the signal to it.
        wait: Waits for so many seconds.
    """
    if pid is None or not _linux.catches(pid, SIGNAL):
        return why_silent(pid)
    if os.fstat(file).st_size > _LARGE:
        os.ftruncate(file, 0)
    before = size = os.fstat(file).st_size
    send()
    until = time.monotonic() + _WAIT_S
    while time.monotonic() < until and (status := _linux.status(pid)) is not None and status.state not in _SILENT:
        wait(_POLL_S)
        now = os.fstat(file).st_size
        if now > before and now == size:  # and nothing more has come since
            return from_the_job_on(os.pread(file, now - before, before))
        size = now
    return why_silent(pid)


def why_silent(pid: int | None) -> str:
    """Say, in parentheses, why a process gives no stacks."""
    status = None if pid is None else _linux.status(pid)
    state = "ended" if status is None else _STATES.get(status.state, "it does not answer, or not yet")
    return f"(no stacks: {state})"


def from_the_job_on(stacks: bytes) -> str:
    """Leave out the frames below the user's function, which are the worker's own."""
    lines, skipping = [], False
    for line in stacks.decode("utf-8", "backslashreplace").strip().splitlines():
        if line.startswith("Extension modules: "):
            continue
        skipping = line.startswith("  ") and (skipping or bool(_OWN_FRAME.search(line)))
        if not skipping:
            lines.append(line)
    return "\n".join(lines)


def names(pid: int) -> set[str]:
    """Which of the files a process has open; none if it is another user's."""
    found: set[str] = set()
    try:
        for number in os.listdir(f"/proc/{pid}/fd"):
            target = os.readlink(f"/proc/{pid}/fd/{number}")
            found.update(name for name in (PARENT, KEEPER, WORKER) if target == f"/memfd:{name} (deleted)")
    except OSError:  # ended, or not ours
        pass
    return found


def _open(pid: int, name: str) -> int:
    """Open the file of a process's stacks.

    Raises:
        FileNotFoundError: If it has none.
    """
    folder = f"/proc/{pid}/fd"
    for number in os.listdir(folder):
        try:
            if os.readlink(f"{folder}/{number}") == f"/memfd:{name} (deleted)":
                return os.open(f"{folder}/{number}", os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:  # closed meanwhile
            continue
    raise FileNotFoundError(folder)


def _after_fork_in_child() -> None:
    global _answers  # noqa: PLW0603 – as above
    if _answers:
        faulthandler.unregister(SIGNAL)  # its file is closed here, and the number may be another's
        _answers = False


_descriptors.after_fork_in_child(_after_fork_in_child)

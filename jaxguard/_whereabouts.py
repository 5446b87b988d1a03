"""Where the threads of a process are: it writes that into a memory file on a signal, and its own user reads it.

The file is found by its name among the process's descriptors, as records are. There are two signals, because a stack
that changes while it is read crashes the process, and a process that is stuck cannot read its own with care.

- `CAREFUL` has the main thread of a worker write all stacks, between two steps of the interpreter: safe at any time.
  It does not answer while it is in C code or in a system call.
- `AT_ONCE` has `faulthandler` write the stack of one thread in the signal's handler itself, whatever that thread does:
  in XLA, in C code that holds the GIL, asleep. It is sent only to threads that sleep in a system call, and to a main
  thread that did not answer the other one: their stacks do not change.

Nothing is stopped. Python goes on with the system call that a thread was in, and the kernel with most of C's calls;
C code that sleeps or polls sees EINTR, as with any signal. Either signal would end a process that does not expect it,
so it is sent only where the kernel says that it is caught. Sources: faulthandler's documentation, PEP 475, proc(5),
tgkill(2), signal(7) for what is restarted.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import re
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator

from . import _descriptors, _linux

CAREFUL, AT_ONCE = signal.SIGRTMIN + 2, signal.SIGRTMIN + 3
PARENT, KEEPER, WORKER = "parent", "keeper", "worker"
"""Whose file it is. A parent has those of its workers too, beside its own."""
_NAME = "jaxguard-stacks-{}-{}"
"""With the pid of who made it: a child has it too, for a moment between fork and exec."""
_TARGET = re.compile(r"/memfd:jaxguard-stacks-([a-z]+)-([0-9]{1,10}) \(deleted\)")
_LARGE = 1 << 20
"""From this size on, in bytes, a reader empties the file first."""
_CAREFUL_S, _MAIN_AT_ONCE_S, _AT_ONCE_S, _POLL_S = 0.5, 2.0, 0.3, 0.001
"""How long an answer may take, of a process, of its main thread, which may wait for a core, and of one that sleeps;
and the time between two looks."""
_OTHERS_S = 3.0
_QUIET_LOOKS = 3
_ASLEEP_S, _WINDOWS = 0.03, 4
"""Longer than Python's switch interval: a thread that has slept so long does not wait for the GIL."""
_TITLE = "Stack (most recent call first):"
_NO_FRAMES = "  <no Python frame>"
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


def new_file(kind: str) -> int:
    """Make the file for the stacks of a process."""
    with _descriptors.creating():
        file = os.memfd_create(_NAME.format(kind, os.getpid()), os.MFD_CLOEXEC)
        _descriptors.own(file)
    fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)  # so that it can be emptied at any time
    return file


_answers = False


def answer(file: int) -> None:
    """Let threads of this process write where they are, at once, into a file."""
    global _answers  # noqa: PLW0603 – a fact about this process
    # Ignored from when the interpreter ends faulthandler: a signal on its way then must not end the process.
    _linux.set_handler(AT_ONCE, signal.SIG_IGN)
    faulthandler.register(AT_ONCE, file=file, all_threads=False)
    _answers = True


def answer_carefully(file: int) -> None:
    """Let the main thread, which must call this, write where all threads are, between two of its steps."""
    identity = _linux.identity(file)

    def write(_: int, frame: types.FrameType | None) -> None:
        try:  # nothing of this may reach the user's code, in whose middle it runs
            if _linux.identity(file) == identity:  # else the user has closed it, and the number is another file's
                os.write(file, _all_stacks(frame).encode("utf-8", "backslashreplace"))
        except Exception:  # noqa: BLE001, S110 – whoever asked gets an answer in the other way
            pass

    signal.signal(CAREFUL, write)
    signal.siginterrupt(CAREFUL, False)  # no native code shall find its system calls interrupted


def answer_here(kind: str) -> None:
    """Let threads of this process write where they are; unless it uses the signal for itself."""
    with _descriptors.creating():
        if not _answers and not _linux.catches(os.getpid(), AT_ONCE):
            answer(new_file(kind))


def _all_stacks(here: types.FrameType | None) -> str:
    names = {thread.ident: thread.native_id for thread in threading.enumerate()}
    names[threading.main_thread().ident] = os.getpid()  # which after a fork has another one than Python says
    frames = sys._current_frames()  # noqa: SLF001 – documented, underscore and all
    if here is not None:
        frames[threading.get_ident()] = here
    return "\n\n".join(_title(names.get(ident), os.getpid()) + _lines(frame) for ident, frame in frames.items())


def _lines(frame: types.FrameType | None) -> str:
    """The same lines as faulthandler's."""
    lines = []
    while frame is not None:
        code = frame.f_code
        lines.append(f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_name}')
        frame = frame.f_back
    return "\n".join(lines)


def _title(thread: int | None, pid: int) -> str:
    return f"Thread {thread or '?'}{', the main one' if thread == pid else ''} (most recent call first):\n"


def ask(pid: int, kind: str) -> str:
    """The stacks of a process of the same user, or in parentheses why there are none."""
    try:
        pidfd = os.pidfd_open(pid)  # first: from here on the number cannot come to mean another process
    except OSError:
        return why_silent(pid)
    file = -1
    try:
        file = _open(pid, kind)
        return read(file, pid)
    except OSError:
        return why_silent(pid)
    finally:
        os.close(pidfd)
        if file >= 0:
            os.close(file)


def read(file: int, pid: int | None, wait: Callable[[float], object] = time.sleep) -> str:
    """Have the threads of a process write where they are, and read that.

    Args:
        file: The file of the process's stacks.
        pid: The process, which cannot have been replaced by another one meanwhile.
        wait: Waits for so many seconds.
    """
    if pid is None or not _linux.catches(pid, AT_ONCE) or _linux.state(pid) in _SILENT or not _has(pid, file):
        return why_silent(pid)
    _be_alone(file, wait)
    try:
        return _read(file, pid, wait)
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)


def _has(pid: int, file: int) -> bool:
    """Say whether a process still has a file: one that has closed all its files would write into another one."""
    identity = _linux.identity(file)
    for _, _, path in _files(pid):
        try:
            found = os.stat(path)
        except OSError:  # closed meanwhile
            continue
        if (found.st_dev, found.st_ino) == identity:
            return True
    return False


def _be_alone(file: int, wait: Callable[[float], object]) -> None:
    """Wait for others who ask the same process, but not for ever: one of them may be stopped."""
    until = time.monotonic() + _OTHERS_S
    while time.monotonic() < until:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            wait(_POLL_S)
            continue
        if os.fstat(file).st_size > _LARGE:
            os.ftruncate(file, 0)
        return


def _read(file: int, pid: int, wait: Callable[[float], object]) -> str:
    is_careful = _linux.catches(pid, CAREFUL)
    if is_careful and (stacks := _read_one(file, pid, pid, CAREFUL, _CAREFUL_S, wait)):
        return stacks
    found, running, asleep = [], 0, _asleep(pid, wait)
    for thread in _linux.threads(pid):
        if _linux.blocks(pid, thread, AT_ONCE) or _linux.waits_for_a_signal(pid, thread):
            continue
        if not (is_careful and thread == pid) and thread not in asleep:
            running += 1
            continue
        limit_s = _MAIN_AT_ONCE_S if thread == pid else _AT_ONCE_S
        stack = _read_one(file, pid, thread, AT_ONCE, limit_s, wait).removeprefix(_TITLE).lstrip("\n")
        if stack and stack != _NO_FRAMES:
            found.append(_title(thread, pid) + stack)
    if running:
        found.append(f"({running} threads of it are running at this moment, and were not interrupted to tell)")
    return "\n\n".join(found) or why_silent(pid)


def _asleep(pid: int, wait: Callable[[float], object]) -> set[int]:
    """The threads that sleep in a system call, and have done so for a while: one that waits for the GIL does not."""
    asleep: set[int] = set()
    for _ in range(_WINDOWS):
        before = {thread: _linux.switches(pid, thread) for thread in _linux.threads(pid) if thread not in asleep}
        until = time.monotonic() + _ASLEEP_S
        while before and time.monotonic() < until:
            wait(_POLL_S)
        asleep |= {
            thread
            for thread, count in before.items()
            if _linux.state(pid, thread) in "SD" and _linux.switches(pid, thread) == count
        }
    return {thread for thread in asleep if _linux.state(pid, thread) in "SD"}


def _read_one(file: int, pid: int, thread: int, number: int, limit_s: float, wait: Callable[[float], object]) -> str:
    """What comes after a signal to one thread; nothing if it is no thread of Python's, or does not answer."""
    before = size = os.fstat(file).st_size
    if not _linux.catches(pid, number):  # any more: it may have become another program
        return ""
    _linux.signal_thread(pid, thread, number)
    until = time.monotonic() + limit_s
    quiet = 0
    while quiet < _QUIET_LOOKS and time.monotonic() < until and _linux.state(pid) not in _SILENT:
        wait(_POLL_S)
        now = os.fstat(file).st_size
        done = now == size and (now > before or (number == AT_ONCE and not _linux.is_pending(pid, thread, number)))
        quiet = quiet + 1 if done else 0
        size = now
    return from_the_job_on(os.pread(file, max(0, size - before), before).decode("utf-8", "backslashreplace"))


def why_silent(pid: int | None) -> str:
    """Say, in parentheses, why a process gives no stacks."""
    state = "X" if pid is None else _linux.state(pid)
    return f"(no stacks: {_STATES.get(state, 'it does not answer, or not yet')})"


def from_the_job_on(text: str) -> str:
    """Leave out the frames below the user's function, which are the worker's own; of a crash, too."""
    lines, skipping = [], False
    for line in text.strip("\n").splitlines():
        if line.startswith("Extension modules: "):
            continue
        skipping = line.startswith("  ") and (skipping or bool(_OWN_FRAME.search(line)))
        if not skipping:
            lines.append(line)
    return "\n".join(lines)


def kinds(pid: int) -> set[str]:
    """Which kinds of files a process has that are its own; none if it is another user's."""
    own = _linux.own_pid(pid)
    return {kind for kind, made_by, _ in _files(pid) if made_by == own}


def _open(pid: int, kind: str) -> int:
    """Open the file of a process's stacks.

    Raises:
        FileNotFoundError: If it has none.
    """
    own = _linux.own_pid(pid)
    for other, made_by, path in _files(pid):
        if other == kind and (kind == WORKER or made_by == own):
            return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    raise FileNotFoundError(pid)


def _files(pid: int) -> Iterator[tuple[str, int, str]]:
    """The files of stacks that a process has open: the kind, who made it, where it is."""
    folder = f"/proc/{pid}/fd"
    try:
        numbers = os.listdir(folder)
    except OSError:  # ended, or not ours
        return
    for number in numbers:
        try:
            match = _TARGET.fullmatch(os.readlink(f"{folder}/{number}"))
        except OSError:  # closed meanwhile
            continue
        if match:
            yield match[1], int(match[2]), f"{folder}/{number}"


def _after_fork_in_child() -> None:
    global _answers  # noqa: PLW0603 – as above
    if _answers:
        faulthandler.unregister(AT_ONCE)  # its file is closed here, and the number may be another's
        _answers = False


_descriptors.after_fork_in_child(_after_fork_in_child)

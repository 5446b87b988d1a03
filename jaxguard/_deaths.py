"""How a worker ended, in words."""

from __future__ import annotations

import signal

from . import errors


def died(name: str, pid: int | None, status: int | None, output: str, *, keeper_gone: bool) -> errors.WorkerDied:
    """The error for a worker that ended without an answer.

    Args:
        name: The guarded function.
        pid: The worker's, or None if there never was one.
        status: Its exit code, or the negative number of the signal that ended it; None if it cannot be known.
        output: The last of what it wrote.
        keeper_gone: Whether its keeper was killed, and it with it.
    """
    number = -status if status is not None and status < 0 else None
    if keeper_gone:
        what = "its keeper was killed, and it with it"
    elif number is not None:
        what = f"ended by {_signal_name(number)}{_LIKELY.get(number, '')}"
    elif status is not None:
        what = f"it left with exit code {status} (sys.exit or os._exit)"
    else:
        what = "it could not be started"
    last = f" Its last output:\n{output}" if output else ""
    text = f"the worker of {name} (pid {pid}) ended without an answer: {what}.{last}"
    exit_code = status if number is None else None
    return errors.WorkerDied(text, pid=pid, exit_code=exit_code, signal=number, output=output)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


_LIKELY: dict[int, str] = {
    signal.SIGKILL: ", most likely by the kernel for want of memory, or by hand",
    signal.SIGSEGV: ", a crash in native code",
    signal.SIGABRT: ", an abort in native code",
    signal.SIGBUS: ", a crash in native code (a full /dev/shm?)",
    signal.SIGTERM: ", by hand or by the system",
}

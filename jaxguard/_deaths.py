"""How a worker ended, in words."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

from . import _oom, errors


@dataclass(frozen=True, slots=True)
class Subject:
    """Which worker, at what: for all that is said of its end."""

    function: str
    pid: int | None
    trial: int | None
    devices: tuple[str, ...]
    doing: str
    """What it said last that it does."""

    def __str__(self) -> str:
        trial = f", trial {self.trial}" if self.trial is not None else ""
        where = f", on {' and '.join(self.devices)}" if self.devices else ""
        return f"worker of {self.function} (pid {self.pid}{trial}{where})"


def too_late(worker: Subject, timeout_s: float, stacks: str) -> errors.WorkerTimeout:
    """The error for a worker that took too long."""
    text = (
        f"{worker.function} ran longer than timeout={timeout_s:g} s and was ended, the {worker} being in this phase: "
        f"{worker.doing}. Raise timeout=, or look where it was:\n{stacks}"
    )
    return errors.WorkerTimeout(
        text,
        pid=worker.pid,
        timeout_s=timeout_s,
        stacks=stacks,
        trial=worker.trial,
        devices=worker.devices,
        phase=worker.doing,
    )


def died(
    worker: Subject, status: int | None, written: str, killed_before: _oom.Counts, *, keeper_gone: bool
) -> errors.WorkerDied:
    """The error for a worker that ended without an answer.

    Args:
        worker: Which one.
        status: Its exit code, or the negative number of the signal that ended it; None if it cannot be known.
        written: The last of what it wrote.
        killed_before: How many processes the kernel had ended when it began.
        keeper_gone: Whether its keeper was killed, and it with it.
    """
    number = -status if status is not None and status < 0 else None
    if keeper_gone:
        what = "its keeper was killed, and it with it"
    elif number is not None:
        likely = _oom.explain(killed_before) if number == signal.SIGKILL else _LIKELY.get(number, "")
        what = f"ended by {_signal_name(number)}{likely and ', '}{likely}"
    elif status is not None:
        what = f"it left with exit code {status} (sys.exit or os._exit)"
    else:
        what = "it could not be started"
    said = f" It said why: {cause.rstrip('.')}." if (cause := _cause(written)) else ""
    output = written[-_LAST:].strip()
    last = f" Its last output:\n{output}" if output else ""
    text = f"the {worker} ended without an answer while {worker.doing}: {what}.{said}{last}"
    return errors.WorkerDied(
        text,
        pid=worker.pid,
        exit_code=status if number is None else None,
        signal=number,
        output=output,
        trial=worker.trial,
        devices=worker.devices,
        phase=worker.doing,
    )


_LAST = 4000
"""How much of its output is shown, in characters."""
_CAUSE = re.compile(
    r"^(F\d{4} .*|.*Check failed: .*|terminate called .*|\s*what\(\): .*|Fatal Python error: .*|LLVM ERROR: .*)$",
    re.MULTILINE,
)


def _cause(written: str) -> str:
    """The line in which XLA or C++ says why it aborts: often far above the end, which is full of stacks."""
    found = _CAUSE.search(written)
    return found[0].strip()[:500] if found else ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


_LIKELY: dict[int, str] = {
    signal.SIGSEGV: "a crash in native code",
    signal.SIGABRT: "an abort in native code",
    signal.SIGBUS: "a crash in native code (a full /dev/shm?)",
    signal.SIGTERM: "by hand or by the system",
}

"""What a killed keeper leaves behind, found by a mark in the environment with which it was started, and ended."""

from __future__ import annotations

import os
import signal
import time

from . import _linux, _settings

SWEEP_BOUND_S = 5.0
"""For how long that is gone after, in seconds."""


def sweep(mark: str) -> None:
    """End what a dead keeper left: all that has its mark in the environment with which it was started.

    Its workers died with it; their descendants are spread by then, in sessions of their own some of them.
    """
    line = f"{_settings.RUN}={mark}".encode()
    until = time.monotonic() + SWEEP_BOUND_S
    while (killed := _kill_marked(line)) and time.monotonic() < until:  # to a fixed point, as the keeper does
        for pidfd in killed:
            _linux.wait_readable(pidfd, max(0.0, until - time.monotonic()))
            os.close(pidfd)


def _kill_marked(line: bytes) -> list[int]:
    killed = []
    own = os.getpid()
    for name in os.listdir("/proc"):
        if not name.isdecimal() or int(name) == own:
            continue
        try:
            pidfd = os.pidfd_open(int(name))  # first: the number cannot come to mean another process
        except OSError:
            continue
        try:
            status = _linux.status(int(name))
            if status is not None and _has(int(name), line):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                if status.state not in "ZX":
                    killed.append(pidfd)
                    continue
        except OSError:
            pass
        os.close(pidfd)
    return killed


def _has(pid: int, line: bytes) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return line in file.read().split(b"\0")
    except OSError:
        return False

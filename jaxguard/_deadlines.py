"""What is due in a call, and when: nobody waits for a worker without a bound.

ordered ── no pid ──> say so ──> give the keeper up
   └─ pid: begun ── timeout ──> time is up ── grace ──> kill, again and again
            └────── answered ── end bound ──> kill, again and again
"""

from __future__ import annotations

import enum
import math
import time

GRACE_S = 3.0
"""Between asking a worker to end (SIGTERM) and ending it (SIGKILL)."""
NO_PID_S, NO_WORKER_S = 10.0, 120.0
"""After how long without a worker's pid this is said, and after how long its keeper is given up."""
END_S = 35.0
"""For how long a worker may take over its normal end; it bounds itself more narrowly."""


class Due(enum.Enum):
    """What the calling thread has to do now."""

    SAY_SO = enum.auto()
    """Tell the user that there is no worker yet."""
    GIVE_UP = enum.auto()
    """End the keeper, which does not answer."""
    TIME_UP = enum.auto()
    """Ask the worker to end, and say so with `Deadlines.terminated`."""
    KILL = enum.auto()
    """End the worker."""


class Deadlines:
    """The clock of one call; it starts when it is made."""

    def __init__(self, timeout_s: float) -> None:
        self.ordered = time.monotonic()
        self._timeout_s = timeout_s
        self._without_worker = self.ordered + NO_PID_S, Due.SAY_SO
        self._time_up_at: float | None = None
        self._kill_at = math.inf

    def due(self, *, begun: bool, answered: bool) -> tuple[Due | None, float]:
        """Tell what to do now; if nothing, for how many seconds to wait for news (may be infinite).

        Args:
            begun: The worker has a pid.
            answered: Its answer is here, and it is awaited to be gone.
        """
        now = time.monotonic()
        if not begun and not answered:
            at, what = self._without_worker
            if now < at:
                return None, at - now
            self._without_worker = max(self.ordered + NO_WORKER_S, now + 1), Due.GIVE_UP
            return what, 0
        if self._time_up_at is None:
            self._time_up_at = now + self._timeout_s
        if answered:
            self._kill_at = min(self._kill_at, now + END_S)
        if self._kill_at == math.inf:
            return (Due.TIME_UP, 0) if now >= self._time_up_at else (None, self._time_up_at - now)
        if now < self._kill_at:
            return None, self._kill_at - now
        self._kill_at = now + GRACE_S
        return Due.KILL, 0

    def terminated(self) -> None:
        """Note that the worker was asked to end."""
        self._kill_at = time.monotonic() + GRACE_S
